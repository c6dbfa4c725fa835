"""Figures, animations and widgets for notebooks, and checks of readers' answers (module `check`).

Importing it has one effect, in notebooks only: slow cells get a progress line (module `progress`).
"""

from .progress import show_progress

show_progress()
