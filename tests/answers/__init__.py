"""Answers to every exercise, right and wrong, a file for each notebook."""

from itertools import chain

from . import (
    bucketed_ddp,
    collectives,
    data_parallel,
    flash_attention,
    memory,
    mixed_precision,
    ranks,
    ring,
    softmax,
    softmax_kernel,
    zero,
)

NOTEBOOKS = (
    ranks,
    collectives,
    ring,
    data_parallel,
    bucketed_ddp,
    mixed_precision,
    memory,
    zero,
    softmax,
    flash_attention,
    softmax_kernel,
)
WRONG = list(chain.from_iterable(notebook.WRONG for notebook in NOTEBOOKS))
RIGHT = list(chain.from_iterable(notebook.RIGHT for notebook in NOTEBOOKS))
