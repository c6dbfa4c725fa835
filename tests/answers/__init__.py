"""Answers to every exercise, right and wrong, a file for each notebook."""

from itertools import chain

from . import (
    notebook_00,
    notebook_01,
    notebook_02,
    notebook_03,
    notebook_04,
    notebook_05,
    notebook_06,
    notebook_07,
    notebook_08,
    notebook_09,
    notebook_09_triton,
)

NOTEBOOKS = (
    notebook_00,
    notebook_01,
    notebook_02,
    notebook_03,
    notebook_04,
    notebook_05,
    notebook_06,
    notebook_07,
    notebook_08,
    notebook_09,
    notebook_09_triton,
)
WRONG = list(chain.from_iterable(notebook.WRONG for notebook in NOTEBOOKS))
RIGHT = list(chain.from_iterable(notebook.RIGHT for notebook in NOTEBOOKS))
