"""The line of the user's own that made a call; the threads that make calls."""

import sys
import sysconfig
import threading
from concurrent.futures import ThreadPoolExecutor

import torch
from test_board import call

from ddpkit.runtime.board import CALLERS, Board
from ddpkit.runtime.place import is_library, is_pythons, place_in
from ddpkit.runtime.recorder import Recorder

INSTALLED = f"{sysconfig.get_path('purelib')}/frame/ops.py"
GATHER = """
def gather(call):
    return deliver(call)

def deliver(call):
    return call()
"""


def framework():
    names = {}
    exec(compile(GATHER, INSTALLED, "exec"), names)
    return names["gather"]


def here():
    return place_in(sys._getframe())


def test_a_call_of_the_users_own_is_at_its_line():
    file, line, function, via = place_in(sys._getframe())
    code = test_a_call_of_the_users_own_is_at_its_line.__code__
    assert (file, function, via) == (__file__, code.co_name, "")
    assert line == code.co_firstlineno + 1


def test_under_a_framework_both_lines_are_told():
    file, line, function, via = framework()(here)
    assert (file, function, via) == (__file__, "here", "")  # the user's own, called back
    file, line, function, via = exec_in(INSTALLED, "place_in(sys._getframe())")
    assert (file, function) == (__file__, "exec_in")
    assert via == f"{INSTALLED}:1:<module>"
    _, line, _, via = framework()(one_of_torchs())
    assert via == f"{INSTALLED}:6:deliver"
    assert line == test_under_a_framework_both_lines_are_told.__code__.co_firstlineno + 6


def test_in_autograds_own_thread_it_is_the_line_of_the_backward():
    """Hooks run there on a GPU: their stacks have no line of the user's."""
    torchs_file, found = torch.autograd.graph.__file__, []
    code = "def hook():\n    found.append(place_in(sys._getframe()))"
    names = {"place_in": place_in, "sys": sys, "found": found, "Thread": threading.Thread}
    exec(compile(code, torchs_file, "exec"), names)
    waits = "def _engine_run_backward():\n    run(hook)"
    names["run"] = in_a_thread_without_lines
    exec(compile(waits, torchs_file, "exec"), names)
    names["_engine_run_backward"]()
    line = test_in_autograds_own_thread_it_is_the_line_of_the_backward.__code__.co_firstlineno + 9
    assert [(file, at) for file, at, *_ in found] == [(__file__, line)]


def in_a_thread_without_lines(function):
    thread = threading.Thread(target=function)
    thread.start()
    thread.join()


def one_of_torchs():
    """A function of torch's that asks where it was called."""
    names = {"place_in": place_in, "sys": sys}
    code = compile(
        "def all_reduce():\n    return place_in(sys._getframe())", torch.__file__, "exec"
    )
    exec(code, names)
    return names["all_reduce"]


def exec_in(file, expression):
    return eval(compile(expression, file, "eval"), {"place_in": place_in, "sys": sys})


def test_whose_a_file_is():
    import json

    import pytest
    import typing_extensions

    assert [is_library(file) for file in (torch.__file__, json.__file__, __file__)] == [
        True,
        True,
        False,
    ]
    assert is_library(typing_extensions.__file__)  # around what torch calls deprecated
    assert not is_library(pytest.__file__)
    assert not is_library(INSTALLED)
    assert is_pythons(json.__file__)
    assert not is_pythons(torch.__file__)


def test_threads_have_places_as_long_as_they_live(tmp_path):
    board = Board(tmp_path / "board", 1, create=True)
    recorder = Recorder(0, board)
    places = []

    def call():
        places.append(recorder._caller())

    call()
    for _ in range(2):
        thread = threading.Thread(target=call)
        thread.start()
        thread.join()
    assert places == [0, 1, 1]  # the second thread got the place that the first left
    assert board.threads(0) == 1
    at_once = threading.Barrier(CALLERS + 2)

    def call_together():
        call()
        at_once.wait()

    threads = [threading.Thread(target=call_together) for _ in range(CALLERS + 1)]
    for thread in threads:
        thread.start()
    at_once.wait()
    for thread in threads:
        thread.join()
    assert sorted(places[3:]) == [*range(1, CALLERS), CALLERS - 1, CALLERS - 1]  # some share one
    assert board.threads(0) == 1
    board.close()


def test_a_pools_thread_that_waits_for_work_makes_no_calls(tmp_path):
    board = Board(tmp_path / "board", 1, create=True)
    recorder = Recorder(0, board)
    recorder._caller()
    with ThreadPoolExecutor(1) as pool:
        busy = threading.Event()
        work = pool.submit(lambda: (recorder._caller(), busy.wait()))
        while board.threads(0) < 2:
            pass
        recorder.count_callers(look=True)
        assert board.threads(0) == 2  # it waits in a line of the user's own
        busy.set()
        work.result()
        recorder.count_callers(look=True)
        while board.threads(0) == 2:  # it is on its way back to the pool
            recorder.count_callers(look=True)
        assert board.threads(0) == 1
    board.close()


def test_calls_are_counted_from_the_first_though_old_records_are_dropped(monkeypatch):
    monkeypatch.setattr("ddpkit.runtime.recorder.MOST_RECORDS", 4)
    mine = Recorder(0)
    for seq in range(7):
        mine.issue(call(seq))
    assert [record.number for record in mine.since(5)] == [5, 6]
