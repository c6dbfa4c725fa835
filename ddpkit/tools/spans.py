"""What a rank is doing, in the words of what it does: the report of a hang quotes them."""

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar

_doing: ContextVar[str] = ContextVar("doing", default="")


@contextlib.contextmanager
def doing(what: str) -> Iterator[None]:
    """Messages that begin inside are recorded as a part of `what`, as of a pipeline's "1F0"."""
    token = _doing.set(what)
    try:
        yield
    finally:
        _doing.reset(token)


def now_doing() -> str:
    """What this thread is doing, "" if it didn't say."""
    return _doing.get()
