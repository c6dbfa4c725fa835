"""The exact twin of a model: small integers in float64, so that equal means equal to the last bit.

Sums and products of integers are exact in float64 up to 2⁵³, in whatever order they are added; so
are divisions that come out even. Then two right trainings have the same bits, and any difference is
a bug: no tolerance, no false alarm. What isn't made of sums and products is replaced by something
that is: GELU and its like by ReLU, dropout by nothing. What can't be replaced (softmax, a norm,
which takes a root) stays in the model, and `exact` returns its name: compare such a model within a
tolerance.

A mean over W ranks or m micro-batches must come out even: `exact_loss` multiplies by 12, so that
2, 3, 4 and their like divide it. Train with SGD whose rate is a power of two, for two steps: each
step multiplies, so numbers take more bits from step to step, and float64 has 53.
"""

import torch
from torch import Tensor, nn

SMOOTH = nn.GELU, nn.SiLU, nn.Tanh, nn.Sigmoid, nn.Softplus, nn.ELU
INEXACT = nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, nn.Softmax, nn.modules.batchnorm._BatchNorm
SCALE = 12  # 2, 3, 4, 6 divide it


def exact(model: nn.Module, seed: int = 0) -> list[str]:
    """Turn `model` into its exact twin, in place; return the names of modules that can't be exact.

    Parameters become integers from -1 to 1, in float64, drawn in order from `seed`; tied ones stay
    tied. Modules in SMOOTH become ReLU, and nn.Dropout drops nothing; those in INEXACT stay, and
    are named, as does the model itself, as "", if it is one in SMOOTH. Other modules (nn.Mish) and
    functions (`F.gelu`) stay, and aren't named.
    """
    generator = torch.Generator().manual_seed(seed)
    model.double()
    for parameter in model.parameters():
        values = torch.randint(-1, 2, parameter.shape, generator=generator)
        parameter.data = values.to(parameter.device, torch.float64)
    left = []
    for path, module in list(model.named_modules(remove_duplicate=False)):
        if isinstance(module, SMOOTH) and path:
            model.set_submodule(path, nn.ReLU())
        elif isinstance(module, nn.Dropout):
            module.p = 0.0
        elif isinstance(module, (SMOOTH, INEXACT)):
            left.append(path)
    return left


def exact_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """Sum 12 · (outputs - targets)² / 2 over each row; return the mean over the rows.

    outputs, targets: (rows, ...), integers in float64. Means are exact if rows × ranks ×
    micro-batches is a power of two, or three times one: 12 in all, for example.
    """
    squares = (outputs - targets).square() * (SCALE / 2)
    return squares.sum() / len(outputs)
