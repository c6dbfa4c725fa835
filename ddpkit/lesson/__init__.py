"""Figures, players and widgets for the notebooks, and `check`, the checkers' name there."""

from .progress import show_progress

show_progress()
