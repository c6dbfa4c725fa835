"""Figures, animations and widgets for notebooks; its module `check` checks a reader's answers.

Importing this package turns on the progress line below cells that take long (`progress`).
"""

from .progress import show_progress

show_progress()
