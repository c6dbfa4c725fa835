"""Which backend a launch gets, and why."""

import ctypes
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from .link import Link


@dataclass
class Choice:
    """A backend and the reason for it. gpus: how many the ranks share out; 0 means CPU."""

    backend: str
    gpus: int
    line: str
    environ: dict[str, str] = field(default_factory=dict)


def choose_backend(backend: str, world_size: int, link: Link | None = None) -> Choice:
    """NCCL where every rank can have a GPU, one GPU shared where NCCL can do that, else Gloo on the CPU."""
    if backend == "gloo":
        return Choice("gloo", 0, "gloo on CPU: as asked")
    if link is not None:
        return Choice("gloo", 0, f"gloo on CPU: the emulated link ({link}) works on its wire")
    gpus = torch.cuda.device_count() if dist.is_nccl_available() else 0
    version = nccl_version() if gpus else ()
    dotted = ".".join(map(str, version))
    if gpus >= world_size:
        return Choice("nccl", gpus, f"nccl {dotted}: a GPU for each of {world_size} ranks")
    if gpus and version >= (2, 30):
        several = {"NCCL_MULTI_RANK_GPU_ENABLE": "1"}
        return Choice("nccl", gpus, f"nccl {dotted}: {world_size} ranks share {gpus} GPU{'s' * (gpus > 1)}", several)
    short = f"{gpus} GPU{'s' * (gpus != 1)} for {world_size} ranks, and NCCL {dotted} can't share one (2.30 can)"
    reason = short if gpus else "no GPU that PyTorch can use"
    if backend == "nccl":
        raise ValueError(
            f"backend='nccl' expected a GPU for each rank, got {reason}: use backend='auto' or fewer ranks"
        )
    return Choice("gloo", 0, f"gloo on CPU: {reason}")


def nccl_version() -> tuple[int, ...]:
    """The version of the NCCL that torch has loaded, which may be newer than the one it was built with; () without."""
    try:
        number = ctypes.c_int()
        ctypes.CDLL("libnccl.so.2").ncclGetVersion(ctypes.byref(number))
    except (OSError, AttributeError):
        return tuple(torch.cuda.nccl.version()) if dist.is_nccl_available() else ()
    return number.value // 10000, number.value // 100 % 100, number.value % 100
