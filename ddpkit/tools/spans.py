"""Name what a program is doing, such as a pipeline's "1F0", so that reports can show it."""

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar

_doing: ContextVar[str] = ContextVar("doing", default="")


@contextlib.contextmanager
def doing(what: str) -> Iterator[None]:
    """Label the messages that begin inside this context manager with `what`, such as "1F0".

    The label shows in reports. Inside another `doing`, the inner label counts.
    """
    token = _doing.set(what)
    try:
        yield
    finally:
        _doing.reset(token)


def now_doing() -> str:
    """Return the label of the innermost `doing` around this line, or "" outside of any."""
    return _doing.get()
