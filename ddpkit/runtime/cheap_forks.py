"""Make forks cheap. Only the fork server imports this module, and imports it last."""

import atexit
import contextlib
import ctypes
import gc
import multiprocessing.popen_forkserver  # noqa: F401  each rank would import it
import sys

MADV_COLLAPSE = 25  # Linux 6.1; an older one refuses, and nothing changes
HUGE_PAGE = 2**21


def use_huge_pages():
    """Move this process's memory into 2 MiB pages, so that a fork copies smaller page tables."""
    madvise = ctypes.CDLL(None).madvise
    with open("/proc/self/maps") as maps:
        regions = [line.split() for line in maps]
    for addresses, mode, _, _, _, *file in regions:
        if mode != "rw-p" or file not in ([], ["[heap]"]):
            continue
        begin, end = (int(address, 16) for address in addresses.split("-"))
        for page in range(-(-begin // HUGE_PAGE) * HUGE_PAGE, end - HUGE_PAGE + 1, HUGE_PAGE):
            madvise(ctypes.c_void_p(page), ctypes.c_size_t(HUGE_PAGE), MADV_COLLAPSE)


if "torch._dynamo" in sys.modules:  # else init_process_group clears it in each rank, copying pages
    sys.modules["torch._dynamo"].trace_rules.clear_lru_cache()
gc.freeze()  # a full collection in a rank would write to all objects, and so copy them: 0.1 s
atexit.register(gc.unfreeze)  # else C++ modules complain of leaks when the server ends
with contextlib.suppress(OSError):  # no /proc
    use_huge_pages()
