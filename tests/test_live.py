"""`%%ranks`: names persist, values are shown by rank, a world that broke is replaced."""

import json
import os
import signal
import subprocess
import sys
import threading

import pytest
from outside import wait_until

from ddpkit import HangError, RankError
from ddpkit.inspect.trace import LANES
from ddpkit.runtime.board import IDLE
from ddpkit.runtime.live import GONE, OWN_NAMES, RanksMagic, magic_first
from ddpkit.runtime.look import Look


@pytest.fixture(scope="module")
def magic():
    magic = RanksMagic()
    yield magic
    for _ in range(2):  # closing twice does nothing
        magic.close()


@pytest.fixture
def cell(magic, capfd):
    """Run a cell; what it shows."""

    def run(source, line=""):
        capfd.readouterr()
        magic(line, source)
        return capfd.readouterr().out

    if magic.world is None or not magic.world.is_open or magic.world.world_size != 2:
        run("pass", "2")
    return run


@pytest.fixture
def fails(cell, magic):
    """Run a cell that must fail; the lines of its message."""

    def run(kind, source, line=""):
        with pytest.raises(kind) as caught:
            cell(source, line)
        return str(caught.value).splitlines()

    return run


# What a cell sees and shows.


def test_names_persist_between_cells(cell):
    assert cell("x = torch.full((2,), rank + 1.0)\ndist.all_reduce(x)") == ""
    assert cell("x") == "rank 0: tensor([3., 3.])\nrank 1: tensor([3., 3.])\n"
    assert cell("rank, world_size, device.type, dist.get_rank()") == (
        "rank 0: (0, 2, 'cpu', 0)\nrank 1: (1, 2, 'cpu', 1)\n"
    )
    cell("a = torch.ones(1)\nwork = dist.all_reduce(a, async_op=True)")
    assert cell("work.wait()\na.item()") == "rank 0: 2.0\nrank 1: 2.0\n"
    assert cell("dist.send(a, 1) if rank == 0 else dist.recv(a, 0)") == "rank 1: 0\n"


def test_output_comes_first_then_the_value_of_the_last_expression(cell):
    assert cell("print('said', rank)\nrank or None") == (
        "rank 0 | said 0\nrank 1 | said 1\nrank 1: 1\n"
    )
    assert cell("y = 3") == cell("None") == cell("") == cell("# only a comment") == ""
    matrix = "tensor([[0.],\n                [0.]])\n"
    assert cell("torch.zeros(2, 1)") == f"rank 0: {matrix}rank 1: {matrix}"


def test_it_says_where_the_rest_of_long_output_is(cell, capfd):
    assert "rank 1 | ... 100 more lines ...\n" in cell("print('\\n'.join('a' * 300))")
    with pytest.raises(RankError):
        cell("print('\\n'.join('a' * 300))\n1 / 0")
    more = "rank 1 | ... 100 more lines, all of them in the error's .output[1] ...\n"
    assert more in capfd.readouterr().out


def test_a_name_of_the_notebook_gets_a_hint(fails):
    assert fails(RankError, "name_of_the_notebook")[-1] == OWN_NAMES


def test_a_cell_is_traced(cell, magic, tmp_path):
    cell("dist.barrier()")  # of another cell
    trace = magic(f"--trace {tmp_path}/cell.json", "dist.all_reduce(torch.ones(1))\nrank")
    assert repr(trace) == f"{tmp_path}/cell.json: open it at https://ui.perfetto.dev"
    events = json.loads((tmp_path / "cell.json").read_text())["traceEvents"]
    calls = [(e["pid"], e["name"]) for e in events if e["ph"] == "X" and e["tid"] % LANES]
    assert calls == [(0, "all_reduce"), (1, "all_reduce")]
    assert magic("", "pass") is None


def test_some_ranks_only(cell):
    assert cell("z = 5\nrank", "--on 1") == "rank 1: 1\n"
    assert cell("'z' in globals()") == "rank 0: False\nrank 1: True\n"
    assert cell("rank", "--on 1,0") == "rank 0: 0\nrank 1: 1\n"


def test_functions_classes_and_imports_of_cells(cell):
    cell("import math\nclass Point:\n    def __init__(self, x): self.x = math.floor(x)")
    cell("found = [None] * world_size\ndist.all_gather_object(found, Point(rank + 0.5))")
    assert cell("[(p.x, isinstance(p, Point)) for p in found]", "--on 1") == (
        "rank 1: [(0, True), (1, True)]\n"
    )


# Failures. (A cell's first line is the one with %%ranks.)


def test_an_exception_keeps_the_world_when_the_ranks_are_in_step(cell, fails, magic):
    cell("kept = 7")
    world = magic.world
    lines = fails(RankError, "x = 1\nif rank == 1:\n    raise ValueError('no {}')")
    assert lines == [
        "rank 1 raised ValueError: no {}",
        "  line 4 of the cell: raise ValueError('no {}')",
    ]
    assert magic.world is world
    assert cell("kept") == "rank 0: 7\nrank 1: 7\n"


def test_what_fails_on_all_ranks_is_told_with_its_line(fails, cell, magic):
    world = magic.world
    assert fails(RankError, "1 / 0") == [
        "rank 0 raised ZeroDivisionError: division by zero",
        "  line 2 of the cell: 1 / 0",
        "Rank 1 failed in the same way.",
    ]
    lines = fails(RankError, "x = 1\nfor")
    assert lines[:2] == ["rank 0 raised SyntaxError: invalid syntax", "  line 3 of the cell: for"]
    assert fails(RankError, "!ls")[-1].startswith("%%ranks cells are plain Python")
    assert fails(RankError, "not_here")[-1].endswith(
        "not the notebook's, and each rank its own: define or import it in one."
    )
    lines = fails(RankError, "class Bad:\n    def __repr__(self): raise ValueError('shy')\nBad()")
    assert lines[0] == "rank 0 raised ValueError: shy"
    for leave in ("import sys; sys.exit(3)", "raise KeyboardInterrupt"):
        assert fails(RankError, leave)[0].startswith("rank 0 raised ")
    assert cell("rank") == "rank 0: 0\nrank 1: 1\n"
    assert magic.world is world


def test_an_exception_out_of_step_closes_the_world_and_says_so(cell, fails, magic):
    cell("lost = 7")
    lines = fails(RankError, "if rank == 1:\n    raise ValueError('no')\ndist.barrier()")
    assert lines[0] == "rank 1 raised ValueError: no"
    assert lines[-1] == GONE
    assert not magic.world.is_open
    assert cell("'lost' in globals()") == "rank 0: False\nrank 1: False\n"


@pytest.mark.parametrize(
    ("source", "line", "kind", "says"),
    [
        ("dist.barrier()", "--on 0", HangError, "deadlock: rank 0 waits in barrier for rank 1, wh"),
        ("dist.all_reduce(torch.ones(8 - rank))", "", HangError, "mismatch: rank 0 called all_red"),
        ("import os\nrank or os.abort()", "", RankError, "rank 0 was killed by SIGABRT."),
    ],
)
def test_a_world_that_broke_is_replaced_and_says_so(fails, cell, source, line, kind, says):
    lines = fails(kind, source, line)
    assert lines[0].startswith(says)
    assert lines[-1] == GONE
    if "mismatch" in says:
        assert any(f"line 2 of the cell: {source}" in line for line in lines)
    assert cell("rank") == "rank 0: 0\nrank 1: 1\n"


@pytest.mark.parametrize("line", ["", "--on 0"])
def test_a_rank_killed_between_cells(fails, cell, magic, line):
    os.kill(magic.world.ranks[1].process.pid, signal.SIGKILL)
    magic.world.ranks[1].process.join(5)
    lines = fails(RankError, "rank", line)
    assert lines[0].startswith("rank 1 was killed by SIGKILL.")
    assert lines[-1] == GONE


@pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")  # between open() and with
def test_an_interrupt_ends_the_world_and_says_so(cell, magic, capfd):
    threading.Timer(0.3, os.kill, [os.getpid(), signal.SIGINT]).start()
    with pytest.raises(KeyboardInterrupt):
        cell("print('so far')\nwhile True: pass")
    assert capfd.readouterr().out.splitlines() == ["rank 0 | so far", "rank 1 | so far", GONE]
    assert not magic.world.is_open
    assert cell("rank") == "rank 0: 0\nrank 1: 1\n"


# The size of the world, and usage.


def test_another_size_is_another_world_and_says_so(cell):
    cell("here = 1")
    said = "2 ranks were ended, and their variables with them; here are 3 new ones.\n"
    assert cell("'here' in globals()", "3") == said + "".join(
        f"rank {rank}: False\n" for rank in range(3)
    )
    assert cell("rank", "--on 2") == "rank 2: 2\n"


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("two", "expected %%ranks [N] [--on 0,2] [--trace FILE], got"),
        ("65", "%%ranks expected 1 to 64 ranks on one machine, got 65"),
        ("2 --on 2", "--on expected ranks from 0 to 1, got '2': there are 2 ranks"),
        (
            "2 --on a,b",
            "--on expected ranks separated by commas, without spaces, as in --on 0,2, got 'a,b'",
        ),
        ("2 --fast", "got '2 --fast': --fast means nothing here"),
        ("2 'unclosed", 'got "2 \'unclosed": '),
    ],
)
def test_usage_errors_start_nothing_and_end_nothing(cell, magic, line, complaint):
    world = magic.world
    with pytest.raises(ValueError, match="expected") as caught:
        magic(line, "rank")
    assert complaint in str(caught.value)
    assert magic.world is world
    assert world.is_open


def test_a_late_answer_is_not_taken_for_that_of_the_next_cell(cell, monkeypatch):
    """Rank 1 ends its cell just after the report of rank 0's error was settled."""
    late = Look.in_step

    def in_step(look):
        wait_until(lambda: look.board.state(1) == IDLE)
        return late(Look(look.board))

    monkeypatch.setattr(Look, "in_step", in_step)
    with pytest.raises(RankError):
        cell("import time\nif rank == 0: 1 / 0\ntime.sleep(1.0)\n'late'")
    assert cell("rank") == "rank 0: 0\nrank 1: 1\n"


def ipython(folder, *cells) -> subprocess.CompletedProcess:
    """What an IPython says to cells that come one after the other, `%load_ext ddpkit` first."""
    pytest.importorskip("IPython", reason="Jupyter isn't installed")
    runs = [f"ip.run_cell({cell!r})" for cell in ("%load_ext ddpkit", *cells)]
    shell = "from IPython.core.interactiveshell import InteractiveShell"
    source = "\n".join([shell, "ip = InteractiveShell.instance()", *runs])
    command = [sys.executable, "-c", source]
    own = {"IPYTHONDIR": str(folder)}
    return subprocess.run(command, env=os.environ | own, capture_output=True, text=True)


def test_a_comment_may_stand_above_the_magic(tmp_path):
    done = ipython(tmp_path, "# the sum\n\n%%ranks 2\nx = rank\n1 / 0")
    assert "rank 0 raised ZeroDivisionError" in done.stdout + done.stderr
    assert "line 5 of the cell: 1 / 0" in done.stdout + done.stderr


def test_other_cells_stay_as_they_are():
    for cell in ("x = 1\n%%ranks 2\n", "# %%ranks\nx\n", "%%ranks\nx\n", ""):
        lines = cell.splitlines(keepends=True)
        assert magic_first(lines) == lines


def test_a_notebook_hears_that_it_is_no_rank(tmp_path):
    cells = "import torch.distributed as dist\ndist.get_rank()", "1 / 0"
    done = ipython(tmp_path, *cells)
    assert done.stderr.count("The notebook itself is no rank. launch(f) calls f on ranks") == 1
