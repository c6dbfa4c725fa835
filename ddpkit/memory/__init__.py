"""The memory of training: model states, activations and the peak of a step.

Model states are parameters, gradients and the optimizer's state: a fixed number of bytes for each
parameter, whatever the batch. Activations are kept from forward for backward: their bytes grow with
the tokens, whatever the optimizer. For both there is a formula (`model_states`,
`block_activations`) and a count of the tensors that exist (`count_states`, `measure_saved`).
`watch` follows every tensor through a step. Files: `states`, `activations`, `saved`, `peak`.

Letters as in Korthikanti et al. 2022: b sequences of s tokens, width d, H heads. In PyTorch:
torch.cuda.memory. Notebooks 05 to 07.
"""

from .activations import (
    ByteDropout,
    MaterialisedAttention,
    Term,
    block_activations,
    block_bytes,
    checkpointed_activations,
    coefficients,
)
from .peak import KINDS, Timeline, alive, most_bytes, watch
from .saved import Saved, measure_saved
from .states import PRECISIONS, ModelStates, count_states, gpus_needed, model_states

__all__ = [
    "KINDS",
    "PRECISIONS",
    "ByteDropout",
    "MaterialisedAttention",
    "ModelStates",
    "Saved",
    "Term",
    "Timeline",
    "alive",
    "block_activations",
    "block_bytes",
    "checkpointed_activations",
    "coefficients",
    "count_states",
    "gpus_needed",
    "measure_saved",
    "model_states",
    "most_bytes",
    "watch",
]
