"""Choose the backend of a launch, NCCL or Gloo, and give the reason for it."""

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
# Environment variables of ranks on the CPU, which hide the GPUs: PyTorch's FSDP2 and DeviceMesh
# would take one unasked, and so would `"cuda" if torch.cuda.is_available() else "cpu"`.
ON_CPU = {"CUDA_VISIBLE_DEVICES": ""}
Result = TypeVar("Result")


@dataclass
class Choice:
    """A backend, the reason for it, and what its ranks need in order to use it.

    backend: "nccl" or "gloo".
    gpus: with NCCL the number of visible GPUs; rank r computes on GPU r % gpus. With Gloo it is 0,
        even on a machine with GPUs: all ranks run on the CPU.
    line: the backend and the reason for it in one line, for the user.
    environ: environment variables to set in each rank, {name: value}; they win over the user's own.
        "{rank}" in a value stands for the rank.
    """

    backend: str
    gpus: int
    line: str
    environ: dict[str, str] = field(default_factory=dict)


def start_on(
    start: Callable[[Choice], Result], backend: str, world_size: int, link: Link | None = None
) -> Result:
    """Start the ranks with the backend chosen for them; return what `start` returns.

    `choose_backend` chooses, by the number of GPUs that the driver reports, since CUDA mustn't be
    initialized in this process. That number may be wrong, as for a card in MIG mode; only a rank
    finds out, and `start` raises NoGpu. With "auto", all are then started again, on the CPU (Gloo).
    start: a function that takes a `Choice` (the backend, and what ranks need in order to use it),
        and starts the ranks accordingly.
    backend: "auto", "nccl" or "gloo". world_size: the number of ranks.
    link: an emulated link (a slower network) between the ranks, with which the backend is always
        Gloo (`launch` refuses one with "nccl"); or None.
    With "nccl" this raises NoGpu if a rank can't use its GPU, ValueError if PyTorch can use no GPU.
    """
    try:
        return start(choose_backend(backend, world_size, link))
    except NoGpu as error:
        if backend == "nccl":
            raise
        return start(choose_gloo(f"{error}"))


def choose_backend(backend: str, world_size: int, link: Link | None = None) -> Choice:
    """Choose NCCL if every rank can use a GPU, otherwise Gloo on the CPU; return a `Choice`.

    It has the backend, the reason, and what ranks need in order to use it. If there are fewer GPUs
    than ranks, ranks share them: with "auto" only if NCCL is at least 2.30, the first that lets
    ranks of one host share a GPU; with "nccl" always, since an older NCCL can be made to take the
    ranks for different hosts. With "gloo" or an emulated link, choose Gloo.
    backend: "auto", "nccl" or "gloo". world_size: the number of ranks. link: an emulated link
        between them, or None; `launch` refuses one with "nccl".
    ValueError: `backend` is "nccl", and PyTorch can use no GPU.
    """
    if backend == "gloo":
        return choose_gloo("as asked")
    if link is not None:
        return choose_gloo(f"the emulated link ({link}) works on its wire")
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
    return choose_gloo(reason)


def choose_gloo(reason: str) -> Choice:
    """Return the `Choice` of Gloo: the ranks run on the CPU, and any GPUs are hidden from them.

    reason: why it was chosen, such as "as asked"; the user sees it as "gloo on CPU: as asked".
    """
    return Choice("gloo", 0, f"gloo on CPU: {reason}", ON_CPU)


def sharing(ranks: int, version: tuple[int, ...]) -> dict[str, str]:
    """Return the environment variables, {name: value}, with which NCCL lets ranks share a GPU.

    From version 2.30 on, one variable allows it, and the others prevent hangs; one of these is
    needed only if `ranks` is above 2. Older versions refuse two ranks of one host on one GPU, and
    recognize a host by NCCL_HOSTID. So each rank gets a different NCCL_HOSTID (the caller replaces
    "{rank}" in a value by the rank), and the others make data go through sockets.

    ranks: the largest number that share one GPU, 2 or more. version: NCCL's, such as (2, 30, 7).
    """
    if version >= SHARES_A_GPU:
        # NCCL 2.30.7 checks only the last pair of ranks for whether NVLS must stay off.
        environ = {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_NVLS_ENABLE": "0"}
        # NCCL's kernel waits on the GPU for the other ranks' kernels. Under MPS, where processes
        # share a context, all kernels must fit on the GPU at the same time, otherwise all hang, as
        # NCCL's manual says; without MPS, processes should take turns.
        return environ | ({"NCCL_MAX_CTAS": "4"} if ranks > 2 else {})
    apart = dict.fromkeys(("NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE", "NCCL_IB_DISABLE"), "1")
    return apart | {"NCCL_NET": "Socket", "NCCL_HOSTID": "ddpkit-{rank}"}


def nccl_version() -> tuple[int, ...]:
    """Return the version of the NCCL library that torch has loaded, such as (2, 30, 7).

    If the library can't be asked, this is the version that torch was built with, which may differ;
    () if torch was built without NCCL.
    """
    try:
        number = ctypes.c_int()
        ctypes.CDLL("libnccl.so.2").ncclGetVersion(ctypes.byref(number))
    except (OSError, AttributeError):
        return tuple(torch.cuda.nccl.version()) if dist.is_nccl_available() else ()
    return number.value // 10000, number.value // 100 % 100, number.value % 100
