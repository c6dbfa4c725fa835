"""Make forks of this process cheap. Only the fork server imports this, as its last module."""

import atexit
import contextlib
import ctypes
import gc
import multiprocessing.popen_forkserver  # noqa: F401  otherwise each rank imports it
import sys

MADV_COLLAPSE = 25  # Linux 6.1; an older one refuses, and nothing changes
HUGE_PAGE = 2**21


def use_huge_pages():
    """Gather this process's memory in pages of 2 MiB, so that a fork copies smaller page tables."""
    madvise = ctypes.CDLL(None).madvise
    with open("/proc/self/maps") as maps:
        regions = [line.split() for line in maps]
    for addresses, mode, _, _, _, *file in regions:
        if mode != "rw-p" or file not in ([], ["[heap]"]):
            continue
        begin, end = (int(address, 16) for address in addresses.split("-"))
        for page in range(-(-begin // HUGE_PAGE) * HUGE_PAGE, end - HUGE_PAGE + 1, HUGE_PAGE):
            madvise(ctypes.c_void_p(page), ctypes.c_size_t(HUGE_PAGE), MADV_COLLAPSE)


if "torch._dynamo" in sys.modules:  # here, since in a rank init_process_group would clear it
    sys.modules["torch._dynamo"].trace_rules.clear_lru_cache()
gc.freeze()  # a full collection in a rank writes to all objects, which copies their pages: 0.1 s
atexit.register(gc.unfreeze)  # or C++ modules complain of leaks when the server ends
with contextlib.suppress(OSError):  # no /proc
    use_huge_pages()
