"""For the notebooks: figures, the replay player, checkers. Nothing else imports this package."""
