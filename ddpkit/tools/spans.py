"""Name what a program is doing, such as a pipeline's "1F0", so that reports can show it."""

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar

_doing: ContextVar[str] = ContextVar("doing", default="")


@contextlib.contextmanager
def doing(what: str) -> Iterator[None]:
    """Label the sends and receives made inside this context manager with `what`, such as "1F0".

    Reports of a hang or a mismatch show the label. Inside another `doing`, the inner label counts.
    """
    token = _doing.set(what)
    try:
        yield
    finally:
        _doing.reset(token)


def now_doing() -> str:
    """Return the label of the innermost `doing` around this line, or "" outside of any."""
    return _doing.get()
