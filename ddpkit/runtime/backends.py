"""Choose a launch's backend, and give the reason."""

import ctypes
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

import torch
import torch.distributed as dist

from ..tools.units import count
from .errors import NoGpu
from .link import Link

SHARES_A_GPU = (2, 30)  # the first NCCL that lets ranks of one host share a GPU
UPGRADE = f"pip install --upgrade nvidia-nccl-cu{(torch.version.cuda or '13').partition('.')[0]}"
# Environment variables of ranks on GPUs, unless the reader's environment sets them.
BY_DEFAULT = {
    "NCCL_SOCKET_IFNAME": "lo",  # by default NCCL listens where others on the network reach it
    # NCCL's watchdog would end a process whose kernel failed before Python can raise.
    "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",
    "TORCH_NCCL_LOG_CPP_STACK_ON_UNCLEAN_SHUTDOWN": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
}
# Of ranks on the CPU: PyTorch's FSDP2 and DeviceMesh would take a GPU unasked, and so does
# `"cuda" if torch.cuda.is_available() else "cpu"`.
ON_CPU = {"CUDA_VISIBLE_DEVICES": ""}
Result = TypeVar("Result")


@dataclass
class Choice:
    """A backend and the reason for it.

    gpus: the number of GPUs that the ranks share; 0 means CPU. environ: further environment
    variables of a rank; {rank} stands for its number.
    """

    backend: str
    gpus: int
    line: str
    environ: dict[str, str] = field(default_factory=dict)


def start_on(
    start: Callable[[Choice], Result], backend: str, world_size: int, link: Link | None = None
) -> Result:
    """Start a world with the chosen backend, and again with Gloo if a rank can't use its GPU.

    start: called with the `Choice`, starts the ranks; its result is returned. The choice relies on
    the driver's count of GPUs, since CUDA mustn't start in this process. That count may be wrong,
    as for a card in MIG mode, and only a rank finds out.
    """
    try:
        return start(choose_backend(backend, world_size, link))
    except NoGpu as error:
        if backend == "nccl":
            raise
        return start(on_cpu(f"{error}"))


def choose_backend(backend: str, world_size: int, link: Link | None = None) -> Choice:
    """Choose NCCL where ranks can have or share GPUs, otherwise Gloo on the CPU.

    ValueError: backend="nccl" without a GPU.
    """
    if backend == "gloo":
        return on_cpu("as asked")
    if link is not None:
        return on_cpu(f"the emulated link ({link}) works on its wire")
    gpus = torch.cuda.device_count() if dist.is_nccl_available() else 0
    version = nccl_version() if gpus else ()
    nccl = f"nccl {'.'.join(map(str, version))}"
    if gpus >= world_size:
        return Choice("nccl", gpus, f"{nccl}: a GPU for each of {world_size} ranks")
    if gpus and (version >= SHARES_A_GPU or backend == "nccl"):
        line = f"{nccl}: {world_size} ranks share {count(gpus, 'GPU')}, so bandwidths mean nothing"
        return Choice("nccl", gpus, line, sharing(-(-world_size // gpus), version))
    reason = "no GPU that PyTorch can use"
    if gpus:
        reason = f"{count(gpus, 'GPU')} for {world_size} ranks, and {nccl.upper()} can't share one"
        reason += f" (2.30 can: {UPGRADE})"
    if backend == "nccl":
        expected = f"backend='nccl' expected a GPU, got {reason}"
        raise ValueError(f"{expected}: use backend='auto'")
    return on_cpu(reason)


def on_cpu(reason: str) -> Choice:
    """Choose Gloo, for ranks that see no GPU."""
    return Choice("gloo", 0, f"gloo on CPU: {reason}", ON_CPU)


def sharing(ranks: int, version: tuple[int, ...]) -> dict[str, str]:
    """Return the environment variables with which NCCL lets `ranks` ranks use one GPU.

    Before 2.30, NCCL refuses two ranks of one host on one GPU. It believes NCCL_HOSTID, so each
    rank claims a host of its own; their data then goes through sockets.
    """
    if version >= SHARES_A_GPU:
        # NCCL 2.30.7 checks only the last pair of ranks for whether NVLS must stay off.
        environ = {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_NVLS_ENABLE": "0"}
        # A kernel waits on the GPU for the other ranks' kernels. In one context (MPS) all must fit
        # at once or all hang, as NCCL's manual says; separate processes should take turns.
        return environ | ({"NCCL_MAX_CTAS": "4"} if ranks > 2 else {})
    apart = dict.fromkeys(("NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE", "NCCL_IB_DISABLE"), "1")
    return apart | {"NCCL_NET": "Socket", "NCCL_HOSTID": "ddpkit-{rank}"}


def nccl_version() -> tuple[int, ...]:
    """Return the version of the NCCL that torch has loaded, not of its build; () without NCCL."""
    try:
        number = ctypes.c_int()
        ctypes.CDLL("libnccl.so.2").ncclGetVersion(ctypes.byref(number))
    except (OSError, AttributeError):
        return tuple(torch.cuda.nccl.version()) if dist.is_nccl_available() else ()
    return number.value // 10000, number.value // 100 % 100, number.value % 100
