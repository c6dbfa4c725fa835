"""The course's kernels: `make lab` puts this file where IPython finds it.

A new kernel warns on the terminal that its messages on this machine aren't encrypted; readers took
that for an error.
"""

get_config().IPKernelApp.log_level = "ERROR"  # noqa: F821
