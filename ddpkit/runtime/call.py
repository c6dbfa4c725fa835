"""The call as bytes: a function from a cell, with all that it uses, and its arguments."""

import contextlib
import inspect
import types
import warnings

import cloudpickle

LARGE_BYTES = 10_000_000


def pickle_call(fn, args: tuple, kwargs: dict) -> bytes:
    """(fn, args, kwargs), pickled. ValueError names what can't be; a warning, what is large."""
    named = {f"argument {index}": value for index, value in enumerate(args)}
    named |= {f"argument {name}=": value for name, value in kwargs.items()}
    for name, value in named.items():
        if isinstance(value, types.GeneratorType):
            raise ValueError(
                "launch expected data that can be copied to other processes, got a generator as "
                f"{name}: pass list(...) of it, or make the generator inside the function"
            )
    try:
        call = cloudpickle.dumps((fn, args, kwargs))
    except Exception as error:
        culprit = _unpicklable(fn, named)
        raise ValueError(
            "launch expected a function and arguments that can be copied to other processes, got "
            f"{culprit} ({type(error).__name__}: {error}). Make it inside the function instead"
        ) from error
    if len(call) > LARGE_BYTES:
        _warn_large(fn, len(call))
    return call


def _used(fn) -> dict[str, object]:
    """The globals and closure variables that travel with `fn`."""
    with contextlib.suppress(TypeError, ValueError):  # no function; a variable not assigned yet
        used = inspect.getclosurevars(fn)
        return used.globals | used.nonlocals
    return {}


def _unpicklable(fn, arguments: dict[str, object]) -> str:
    """The name of what can't be pickled."""
    used = {f"the variable {name!r} that the function uses": v for name, v in _used(fn).items()}
    for name, value in (arguments | used).items():
        try:
            cloudpickle.dumps(value)
        except Exception:
            return name
    return repr(fn)


def _warn_large(fn, nbytes: int):
    sizes = {name: len(cloudpickle.dumps(value)) for name, value in _used(fn).items()}
    large = [f"{name} ({size / 1e6:.0f} MB)" for name, size in sizes.items() if size > LARGE_BYTES]
    what = "the function's arguments"
    if large:
        what = f"the variable {', '.join(large)} that the function uses"
    copies = f"every rank gets its own copy of {nbytes / 1e6:.0f} MB: {what}"
    warnings.warn(f"{copies}. Make or load it inside the function instead", stacklevel=4)
