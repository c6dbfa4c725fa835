"""Train a small GPT with everything on: any mesh of pipeline, data, context and tensor ranks.

    python -m ddpkit.train --data 2 --tensor 2 --steps 200
    torchrun --nproc-per-node 4 -m ddpkit.train --data 2 --tensor 2 --folder run

`TrainConfig` says what, `problems` what can't be; a `Trainer` takes steps on the ranks that are
there; `train` also resumes, logs and saves. Notebook 15.
"""

from .config import TrainConfig, problems
from .run import audit_samples, read_log, sample_text, train
from .state import state_of, whole_parameters
from .trainer import Trainer

__all__ = [
    "TrainConfig",
    "Trainer",
    "audit_samples",
    "problems",
    "read_log",
    "sample_text",
    "state_of",
    "train",
    "whole_parameters",
]
