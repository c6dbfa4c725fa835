"""Find the line of the user's code that makes a call, and describe it for a report.

The line is the innermost of the user's code in a stack. The user's code is what is in no installed
package (torch included), nor in ddpkit or Python's own library. A place is (file, line, function,
via). If a framework such as lightning stands between the user's line and the call, via is the
framework's line that made the call, as "file:line:function"; otherwise it is "".
"""

import contextlib
import linecache
import os
import site
import sys
import sysconfig
import threading
import traceback
import types
from collections.abc import Callable
from functools import cache

import torch


def _folders(*paths: str) -> tuple[str, ...]:
    """Return the paths after os.path.normpath, with a slash at the end, for `str.startswith`."""
    return tuple(os.path.normpath(path) + os.sep for path in paths)


# A report skips frames of torch and ddpkit: it names the user's line.
_LIBRARY_FOLDERS = _folders(
    os.path.dirname(torch.__file__), os.path.dirname(os.path.dirname(__file__))
)
_PYTHONS_OWN = *_folders(sysconfig.get_path("stdlib")), "<frozen"
# Frameworks that the user has installed, such as accelerate and lightning.
_INSTALLED_FOLDERS = _folders(
    sysconfig.get_path("purelib"),
    sysconfig.get_path("platlib"),
    *site.getsitepackages(),
    site.getusersitepackages(),
)
# torch wraps its deprecated functions with this module.
_WRAPPERS = os.path.normpath(sys.modules["typing_extensions"].__file__)


@cache
def is_library(file: str) -> bool:
    """Return whether `file` is in torch, ddpkit or Python's own library.

    No other package counts, except for typing_extensions.py: calls of torch's deprecated functions
    pass through it.
    """
    return file.startswith((*_LIBRARY_FOLDERS, _WRAPPERS)) or is_pythons(file)


@cache
def is_pythons(file: str) -> bool:
    """Return whether `file` is in Python's own library; the site-packages inside don't count."""
    return file.startswith(_PYTHONS_OWN) and not is_installed(file)


@cache
def is_installed(file: str) -> bool:
    """Return whether `file` is in a folder of this Python's packages, such as site-packages."""
    return file.startswith(_INSTALLED_FOLDERS)


def call_site(skip: int = 1) -> tuple[str, int, str, str]:
    """Return (file, line, function, via) of the innermost line of the user's code in this stack.

    If there is none, return the first of these that exists: the innermost line of a framework; the
    line that called backward, found in the stack of another thread; the line that the main thread
    has reached; the line at which the search begins. `place_in` says what via is then.
    skip: how many innermost frames, this function's included, are known to be ddpkit's and aren't
        looked at, which saves time.
    """
    return place_in(sys._getframe(skip))


def place_in(frame: types.FrameType) -> tuple[str, int, str, str]:
    """Return (file, line, function, via) of the innermost line of the user's code in a stack.

    frame: the innermost frame of the stack.
    via: the innermost line of a framework, as "file:line:function", if there is one between the
        user's line and `frame`; otherwise "". A framework is any installed package but torch and
        ddpkit, whose lines are skipped like those of Python's own library.
    If no line is the user's, return the first of these that exists:
    - the innermost line of a framework, with "" for via.
    - the line that called backward, and its via, from another thread's stack: `frame` may be on a
      thread of autograd.
    - the line that the main thread has reached: the call itself may have been handed to a thread,
      as by pool.submit. Then via is the line of Python's own library that runs it there.
    - the line of `frame` itself, with "" for via.
    """
    outside_torch = innermost(frame, is_library)
    if outside_torch is None:
        in_backward = _in_backward()
        if in_backward is not None:
            return place_in(in_backward)
        main = innermost(sys._current_frames().get(threading.main_thread().ident), is_library)
        runs = innermost(frame, _is_library_or_wrapper)
        if main is None or runs is None:
            return _place(frame)
        file, line, function, _ = _place(runs)
        return *place_in(main)[:3], f"{file}:{line}:{function}"
    if not is_installed(outside_torch.f_code.co_filename):
        return _place(outside_torch)
    own = innermost(outside_torch, _is_library_or_installed)
    if own is None:
        return _place(outside_torch)
    file, line, function, _ = _place(outside_torch)
    return *_place(own)[:3], f"{file}:{line}:{function}"


def _in_backward() -> types.FrameType | None:
    """Return the frame of torch's `_engine_run_backward` in a thread that is in backward, or None.

    From it, the stack leads to the user's line. On a GPU, hooks run on threads of autograd's
    engine, whose stacks hold no such line. So all threads are searched; the first found counts.
    """
    for frame in sys._current_frames().values():
        while frame is not None and frame.f_code.co_name != "_engine_run_backward":
            frame = frame.f_back
        if innermost(frame, is_library) is not None:
            return frame
    return None


def innermost(frame: types.FrameType | None, skipped: Callable) -> types.FrameType | None:
    """Return the first frame, going outwards from `frame`, whose file isn't skipped, or None.

    skipped: a function that takes a file's path and tells whether to skip its frames.
    """
    while frame is not None and skipped(frame.f_code.co_filename):
        frame = frame.f_back
    return frame


def _is_library_or_installed(file: str) -> bool:
    """Return whether `file` isn't the user's code."""
    return is_library(file) or is_installed(file)


def _is_library_or_wrapper(file: str) -> bool:
    """Return whether `file` is torch's or ddpkit's, or contextlib.py, which runs `with` blocks."""
    return (not is_pythons(file) and is_library(file)) or file == contextlib.__file__


def _place(frame: types.FrameType) -> tuple[str, int, str, str]:
    """Return (file, line, function, via) of the line at which `frame` is, with "" for via."""
    return frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name, ""


def handled() -> str:
    """Return the exception that this thread is handling: "ValueError: no data (train.py:12)".

    Return "" outside of an `except` block, or a `finally` block that an exception led to. The line
    is the innermost of the user's code that raised it or let it through, if there is one. "no data"
    is the exception's first argument, and is left out if that isn't a string or a number.
    str(error) isn't used, since it may fail, or wait for a GPU.
    """
    error = sys.exc_info()[1]
    if error is None:
        return ""
    said = type(error).__name__
    if error.args and isinstance(error.args[0], str | int | float):
        text = error.args[0] if isinstance(error.args[0], str) else str(error.args[0])
        said += f": {text[:100].strip().partition(chr(10))[0]}"
    for frame, line in reversed(list(traceback.walk_tb(error.__traceback__))):
        if not _is_library_or_installed(frame.f_code.co_filename):
            return f"{said} ({short_path(frame.f_code.co_filename)}:{line})"
    return said


def describe_place(place: tuple) -> str:
    """Return a place in words: 'step, line 3: dist.all_reduce(x)', 'train.py:12 in step: ...'.

    The first form is that of a notebook's cell; outside of functions it is 'line 3 of the cell:
    ...'. The cell's number is left out, since it differs from session to session.
    place: (file, line, function), or with via after these, which is ignored. The line's text is
        added if the file can be read.
    """
    file, line, function, *_ = place
    whole = function == "<module>"
    where = f"{short_path(file)}:{line}" + ("" if whole else f" in {function}")
    if file.startswith("<") or "ipykernel_" in file:
        where = f"line {line} of the cell" if whole else f"{function}, line {line}"
    text = linecache.getline(file, line).strip()
    return f"{where}: {text}" if text else where


def short_path(file: str) -> str:
    """Return a file's path within site-packages or Python's library; if in neither, its name.

    For example 'torch/nn/functional.py', or 'train.py' for '/home/me/train.py'.
    """
    for folder in (*_INSTALLED_FOLDERS, *_PYTHONS_OWN[:-1]):
        if file.startswith(folder):
            return file[len(folder) :].replace(os.sep, "/")
    return os.path.basename(file)
