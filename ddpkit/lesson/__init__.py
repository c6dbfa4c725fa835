"""For the notebooks: figures, the replay player, checkers. Nothing else imports this package."""

from .progress import show_progress

show_progress()
