"""Pickle a function call for other processes: the function, all that it uses, and its arguments.

The function may come from a notebook's cell.
"""

import contextlib
import dis
import functools
import importlib
import inspect
import io
import marshal
import sys
import time
import types
import warnings

import cloudpickle
import torch

LARGE_BYTES = 10_000_000
LONG_S = 1.0  # after which a warning says how long copying took


def pickle_call(fn, args: tuple, kwargs: dict) -> bytes:
    """Return (fn, args, kwargs) pickled, with the globals and closure variables that `fn` uses.

    A function that can be imported is pickled as just its name. Warn if the result is larger than
    10 MB (LARGE_BYTES), since every rank gets a copy, and name what is large in it.
    ValueError: an argument, a variable or `fn` can't be pickled; the message names it.
    """
    named = {f"argument {index}": value for index, value in enumerate(args)}
    named |= {f"argument {name}=": value for name, value in kwargs.items()}
    for name, value in named.items():
        if isinstance(value, types.GeneratorType):
            raise ValueError(
                "launch expected data that can be copied to other processes, got a generator as "
                f"{name}: pass list(...) of it, or make the generator inside the function"
            )
    begun = time.perf_counter()
    try:
        call = _dumps((fn, args, kwargs))
    except Exception as error:
        culprit = _unpicklable(fn, named)
        raise ValueError(
            "launch expected a function and arguments that can be copied to other processes, got "
            f"{culprit} ({type(error).__name__}: {error}). Make it inside the function instead"
        ) from error
    if len(call) > LARGE_BYTES:
        _warn_large(fn, named, len(call), time.perf_counter() - begun)
    return call


def on_cpu(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor on the CPU; a Parameter stays a Parameter, and requires_grad is kept.

    It is detached from autograd's graph. If the tensor is on the CPU already, the result shares its
    memory.
    """
    copy = tensor.detach().cpu()
    if isinstance(tensor, torch.nn.Parameter):
        return torch.nn.Parameter(copy, tensor.requires_grad)
    return copy.requires_grad_(tensor.requires_grad)


def _on_gpu(tensor: torch.Tensor) -> torch.Tensor:
    """Move a tensor to the current GPU and return it; in a rank on the CPU, leave it there.

    It is called when a rank unpickles a tensor that was on a GPU. A Parameter stays a Parameter.
    """
    if torch.cuda.is_available():
        tensor.data = tensor.data.cuda()
    return tensor


class _Pickler(cloudpickle.Pickler):
    """A pickler of function calls; tensors that are on a GPU here arrive on the rank's own GPU.

    They are pickled as copies on the CPU, because the rank may have another GPU than this process.
    In the rank, `_on_gpu` moves them to its GPU; if it has none, they stay on the CPU.
    Modules that have a class of their own, such as torch.backends.cudnn, are pickled by name, since
    cloudpickle does that only for plain modules.
    """

    def reducer_override(self, obj):
        if isinstance(obj, torch.Tensor) and obj.is_cuda:
            return _on_gpu, (on_cpu(obj),)
        if isinstance(obj, types.CodeType):  # from 3.1.3 on, cloudpickle drops the file's name
            with contextlib.suppress(ValueError):  # it has a constant that isn't one of Python's
                return marshal.loads, (marshal.dumps(obj),)
        named = isinstance(obj, types.ModuleType) and type(obj) is not types.ModuleType
        if named and sys.modules.get(obj.__name__) is obj:
            return importlib.import_module, (obj.__name__,)
        return super().reducer_override(obj)


def _dumps(value) -> bytes:
    """Return `value` pickled for a rank; tensors on a GPU of this process will be on the rank's."""
    with io.BytesIO() as file:
        _Pickler(file).dump(value)
        return file.getvalue()


def _used(fn) -> dict[str, object]:
    """Return {name: value} of the globals and closure variables that `fn` uses.

    Errors and warnings take names from here for what can't be pickled or is large. A variable that
    is missing here is still pickled. A method's object has the name "the object whose method it
    is", an argument of a functools.partial a name such as "argument 0 of partial". Variables that
    only a function inside `fn` uses may be missing. All are missing if a closure variable has no
    value yet, or if the function (that of a method or partial) isn't written in Python.
    """
    if isinstance(fn, functools.partial):
        bound = {f"argument {index} of partial": value for index, value in enumerate(fn.args)}
        bound |= {f"argument {name}= of partial": value for name, value in fn.keywords.items()}
        return bound | _used(fn.func)
    if inspect.ismethod(fn):
        return {"the object whose method it is": fn.__self__} | _used(fn.__func__)
    with contextlib.suppress(TypeError, ValueError):  # no function; a variable not assigned yet
        used = inspect.getclosurevars(fn)  # its globals have the names of attributes among them
        named = {op.argval for op in dis.get_instructions(fn) if op.opname.endswith("_GLOBAL")}
        used_globals = {name: x for name, x in used.globals.items() if name in named}
        return used_globals | used.nonlocals
    return {}


def _unpicklable(fn, arguments: dict[str, object]) -> str:
    """Name the first argument or variable of a function call that can't be pickled.

    Return it in words: "argument 0", "the variable 'lock' that the function uses", or the repr of
    `fn` if each of them can be pickled.
    arguments: {words for each, such as "argument 0": its value}, tried before the variables.
    """
    used = {}
    for name, value in _used(fn).items():
        is_variable = name.isidentifier()
        used[f"the variable {name!r} that the function uses" if is_variable else name] = value
    for name, value in (arguments | used).items():
        try:
            _dumps(value)
        except Exception:
            return name
    return repr(fn)


def _warn_large(fn, arguments: dict[str, object], nbytes: int, seconds: float):
    """Warn that a call of `fn` is large: its pickle has `nbytes` bytes, and every rank gets a copy.

    Name its arguments, globals and closure variables of over 10 MB or, without any, `fn`.
    arguments: {words for each, such as "argument 0": its value}. seconds: how long the pickling
    took, which is mentioned if it is more than a second.
    """
    large = []
    for name, value in (_used(fn) | arguments).items():
        size = _pickled_bytes(value)
        if size > LARGE_BYTES:
            said = f"{name} ({size / 1e6:.0f} MB)"
            is_variable = name.isidentifier()
            large.append(f"the variable {said} that the function uses" if is_variable else said)
    what = f"every rank gets its own copy of {nbytes / 1e6:.0f} MB: {', '.join(large) or repr(fn)}"
    if seconds > LONG_S:
        what += f". Copying it took {seconds:.0f} s, and every rank takes as long"
    warnings.warn(f"{what}. Make or load it inside the function instead", stacklevel=4)


class _Counter(io.RawIOBase):
    """A file that only counts the bytes written to it, in `count`."""

    count = 0

    def write(self, data) -> int:
        self.count += len(data)
        return len(data)


def _pickled_bytes(value) -> int:
    """Return the size of `value` pickled, in bytes, without keeping the pickle.

    If it can't be pickled, return the number of bytes that were written before the error.
    """
    counter = _Counter()
    with contextlib.suppress(Exception):
        _Pickler(counter).dump(value)
    return counter.count
