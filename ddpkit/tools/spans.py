"""Names for what a rank is doing, in its program's own words: a hang's report quotes them."""

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar

_doing: ContextVar[str] = ContextVar("doing", default="")


@contextlib.contextmanager
def doing(what: str) -> Iterator[None]:
    """Record messages that begin inside as a part of `what`, such as a pipeline's "1F0"."""
    token = _doing.set(what)
    try:
        yield
    finally:
        _doing.reset(token)


def now_doing() -> str:
    """Return the name of what this thread is doing, "" if it has none."""
    return _doing.get()
