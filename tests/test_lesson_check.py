"""`python -m ddpkit.exercises`: what a teacher hears of a student's notebook."""

import json
import subprocess
import sys

import pytest

from ddpkit.exercises import __main__ as command

nbformat = pytest.importorskip("nbformat", reason="Jupyter isn't installed")

CELLS = [
    "import time\nimport torch.distributed as dist\nfrom ddpkit.lesson import check",
    "1 / 0",
    """def neighbours():
    rank, world_size = dist.get_rank(), dist.get_world_size()
    return (rank - 1) % world_size, (rank + 1) % world_size

check.neighbours(neighbours)""",
    "def say_hello(): ...\n\ncheck.say_hello(say_hello)",
]


def handed_in(folder, *sources):
    path = folder / "student.ipynb"
    cells = [nbformat.v4.new_code_cell(source) for source in sources]
    cells.insert(0, nbformat.v4.new_markdown_cell("# Answers"))
    nbformat.write(nbformat.v4.new_notebook(cells=cells), path)
    return path


def test_each_exercise_gets_a_line_whatever_else_fails(tmp_path, capfd):
    notebook = handed_in(tmp_path, *CELLS)
    assert command.main([str(notebook), "--json"]) == 1
    printed, beside = capfd.readouterr()  # the kernel's own words, too
    found = json.loads(printed)[str(notebook)]
    assert found == {"neighbours": "right", "say_hello": "not written"}
    assert beside == f"{notebook}, 4 cells: ....\n"


def test_a_cell_that_hangs_ends_at_the_limit_and_the_rest_goes_on(tmp_path):
    ran = command.run(handed_in(tmp_path, "import time; time.sleep(1e6)", "2 + 2"), seconds=1)
    assert ran.cells[2].outputs[0]["data"]["text/plain"] == "4"


def test_points_and_exit_code(capsys, monkeypatch):
    def said(text):
        data = {"text/plain": text}
        return [nbformat.v4.new_output("execute_result", data)]

    right, wrong = (
        nbformat.v4.new_code_cell(f"check.{name}({name})", outputs=said(f"{sign} {name}: ..."))
        for name, sign in (("merge", "✓"), ("ring_cost", "✗"))
    )
    ran = nbformat.v4.new_notebook(cells=[right])
    monkeypatch.setattr(command, "run", lambda path, seconds: ran)
    assert command.main(["a.ipynb"]) == 0
    assert capsys.readouterr().out == "a.ipynb: 1 of 1 points\n  ✓ merge: right\n"
    ran.cells.append(wrong)
    assert command.main(["a.ipynb"]) == 1
    assert capsys.readouterr().out.endswith(
        "1 of 2 points\n  ✓ merge: right\n  ✗ ring_cost: wrong\n"
    )


def test_pieces_of_the_museum_count(tmp_path):
    sources = [
        "from ddpkit.exercises import museum",
        'museum.hook_averages(mechanism="b", number=3)',
        "museum.undivided(mechanism=..., number=...)",
        'museum.half_weights(mechanism="z", number=3)',
        'museum.merged_by_powers(mechanism="a", number=0)',
        'museum.sorted_as_words(mechanism="b", number=10)',
        "museum.half_weights()",
        "museum.score()",
    ]
    found = command.verdicts(command.run(handed_in(tmp_path, *sources), seconds=120))
    assert found.pop("museum.undivided") == "not written"
    assert list(found) == [
        f"museum.{n}" for n in ("half_weights", "merged_by_powers", "sorted_as_words")
    ]
    assert set(found.values()) <= {"right", "wrong"}
    assert found["museum.half_weights"] == "wrong"


def test_what_cant_be_run_is_said(tmp_path, capsys):
    assert command.main([str(tmp_path / "none.ipynb")]) == 2
    assert "none.ipynb couldn't be run: FileNotFoundError" in capsys.readouterr().err


@pytest.mark.wide
def test_the_command_s_old_name_goes_on_working():
    command = [sys.executable, "-m", "ddpkit.lesson.check", "none.ipynb"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "none.ipynb couldn't be run" in done.stderr
