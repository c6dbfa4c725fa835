"""Make forks of this process cheap; only the fork server imports this, as its last module.

The fork server is the process from which multiprocessing forks every rank, after it has imported
torch and ddpkit. Importing this module acts at once. It empties caches of torch._dynamo, if that is
loaded: otherwise init_process_group would empty full ones in each rank. It exempts all objects that
exist by now from garbage collection: a collection in a rank would write to them, and thereby copy
the memory that rank and server share. And it asks the kernel to move the memory in use into huge
pages, so that a fork has fewer page table entries to copy.
"""

import atexit
import contextlib
import ctypes
import gc
import multiprocessing.popen_forkserver  # noqa: F401  otherwise every rank imports it
import sys

MADV_COLLAPSE = 25  # from Linux 6.1 on; an older kernel refuses, and nothing changes
HUGE_PAGE = 2**21


def use_huge_pages():
    """Ask the kernel to move this process's memory into pages of 2 MiB, so that forks are cheaper.

    A fork copies the page tables, and larger pages need fewer entries. Only writable private memory
    without a file behind it is moved, which includes the heap. A region that the kernel refuses to
    move stays as it is.
    OSError: there is no /proc/self/maps, as on macOS.
    """
    madvise = ctypes.CDLL(None).madvise
    with open("/proc/self/maps") as maps:
        regions = [line.split() for line in maps]
    for addresses, mode, _, _, _, *file in regions:
        if mode != "rw-p" or file not in ([], ["[heap]"]):
            continue
        begin, end = (int(address, 16) for address in addresses.split("-"))
        for page in range(-(-begin // HUGE_PAGE) * HUGE_PAGE, end - HUGE_PAGE + 1, HUGE_PAGE):
            madvise(ctypes.c_void_p(page), ctypes.c_size_t(HUGE_PAGE), MADV_COLLAPSE)


if "torch._dynamo" in sys.modules:  # once; otherwise init_process_group does it in each rank
    sys.modules["torch._dynamo"].trace_rules.clear_lru_cache()
gc.freeze()  # a full collection in a rank writes to all objects, which copies their pages: 0.1 s
atexit.register(gc.unfreeze)  # or C++ modules complain of leaks when the server ends
with contextlib.suppress(OSError):  # no /proc
    use_huge_pages()
