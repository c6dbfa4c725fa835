"""What the tests of all attentions share: the textbook's, and how far from it rounding may be."""

import torch
from torch import Tensor


def randn(*shape, seed=0, dtype=torch.float64, device="cpu", grad=False) -> Tensor:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return x.to(device, dtype).requires_grad_(grad)


def exact(q: Tensor, k: Tensor, v: Tensor, causal: bool = False) -> Tensor:
    """softmax(q·kᵀ/√D)·v as in textbooks, in the dtype of q."""
    return _weights(q, k, causal) @ v


def _weights(q, k, causal):
    s = q @ k.mT * q.shape[-1] ** -0.5
    if causal:
        s = s.masked_fill(torch.ones_like(s, dtype=torch.bool).triu(1), -torch.inf)
    return s.softmax(-1)


def output_and_gradients(attend, q, k, v, do, causal=False) -> dict[str, Tensor]:
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    o = attend(q, k, v, causal)
    gradients = torch.autograd.grad(o, (q, k, v), do)
    return {"o": o.detach()} | dict(zip(("dq", "dk", "dv"), gradients, strict=True))


def complaint(attend, q, k, v, do, causal=False, factors=torch.float32) -> str | None:
    """What is wrong with o, dq, dk or dv of `attend`, if anything.

    The error may be twice that of textbook attention in the same dtype, and the rounding itself,
    where the textbook happens to have none: both as root mean squares, for of thousands of rounding
    errors the largest is a matter of luck. factors: what `attend` rounds factors of products to.
    """
    ours = output_and_gradients(attend, q, k, v, do, causal)
    plain = output_and_gradients(exact, q, k, v, do, causal)
    wide = [x.double() for x in (q, k, v, do)]
    right, magnitudes = output_and_gradients(exact, *wide, causal), _magnitudes(*wide, causal)
    for name, x in ours.items():
        if (x.dtype, x.shape) != (q.dtype, right[name].shape):
            return f"{name} is {x.dtype} {tuple(x.shape)}, expected {tuple(right[name].shape)}"
        error, allowed = _rms(x.double() - right[name]), _rms(plain[name].double() - right[name])
        floor = 2 * torch.finfo(factors).eps * _rms(magnitudes[name])
        floor += torch.finfo(q.dtype).eps * _rms(right[name])
        if not error <= 2 * allowed + floor:
            return (
                f"{name} is off by {error:.1e}, the textbook by {allowed:.1e} (floor {floor:.1e})"
            )
    return None


def _magnitudes(q, k, v, do, causal) -> dict[str, Tensor]:
    """The sum of the magnitudes of all that each result adds up.

    A weight's relative error is that of its exponent, so |q|·|k|ᵀ/√D counts, too; dp and delta, of
    which ds is the difference, are sums of their own.
    """
    scale, p = q.shape[-1] ** -0.5, _weights(q, k, causal)
    q, k, v, do = q.abs(), k.abs(), v.abs(), do.abs()
    p = p * (1 + q @ k.mT * scale)
    dp = do @ v.mT
    ds = p * (dp + (p * dp).sum(-1, keepdim=True)) * scale
    return {"o": p @ v, "dq": ds @ k, "dk": ds.mT @ q, "dv": p.mT @ do}


def _rms(x: Tensor) -> float:
    return x.square().mean().sqrt().item()
