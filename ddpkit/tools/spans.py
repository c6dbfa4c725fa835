"""Name what a program is doing, such as a pipeline's "1F0", for the report of a hang."""

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar

_doing: ContextVar[str] = ContextVar("doing", default="")


@contextlib.contextmanager
def doing(what: str) -> Iterator[None]:
    """Label messages that begin inside this context by `what`, such as a pipeline's "1F0"."""
    token = _doing.set(what)
    try:
        yield
    finally:
        _doing.reset(token)


def now_doing() -> str:
    """Return the innermost active `doing` name of this context, or "" if there is none."""
    return _doing.get()
