"""What can go wrong with ranks."""


class LaunchError(RuntimeError):
    """Ranks did not finish. `output`: what each printed; `wire`: their last records, by rank."""

    def __init__(
        self, message: str, output: list[str] | None = None, wire: list[list] | None = None
    ):
        super().__init__(message)
        self.output, self.wire = output or [], wire or []

    def _render_traceback_(self) -> list[str]:
        """What Jupyter shows: the report alone. The launcher's own frames explain nothing."""
        return f"{type(self).__name__}: {self}".splitlines()


class RankError(LaunchError):
    """A rank raised, exited or was killed. `rank` is the first that did on its own account."""

    def __init__(self, message: str, rank: int, **kwargs):
        super().__init__(message, **kwargs)
        self.rank = rank

    def __reduce__(self):
        return type(self), (str(self), self.rank), self.__dict__


class HangError(LaunchError):
    """A mismatch, a deadlock, or no result in time. The message is the report."""
