"""What a refresh refuses to store. nbval and test_notebooks.py see what it does store."""

import pytest

nbformat = pytest.importorskip("nbformat", reason="Jupyter isn't installed")
refresh = pytest.importorskip("refresh")

QUIET = "A/A: 1.03; share of communication: 0.36\nfp32  5.9 ms  0.99 [0.97–1.04]     A/A\n"


def notebook_that_prints(text: str):
    cell = nbformat.v4.new_code_cell("print()", execution_count=1)
    cell.outputs = [nbformat.v4.new_output("stream", name="stdout", text=text)]
    return nbformat.v4.new_notebook(cells=[cell])


def test_a_quiet_run_is_kept():
    assert refresh.disturbed(notebook_that_prints(QUIET)) == []
    told = "Speed: with its 95 % interval. A/A: the first against itself; 1.9 is much.\n"
    assert refresh.disturbed(notebook_that_prints(told)) == []


@pytest.mark.parametrize(
    "line",
    [
        "A/A: 1.06",
        "A/A 0.94",
        "A/A: 1.00; share of communication: 0.29",
        "A/A: 1.00; share of communication: 0.55",
        "torch's ZeRO   20.3 ms    30 ms  18.91  12.61  1.38 [0.80–1.53]      A/A",
    ],
)
def test_a_disturbed_run_is_named(line):
    assert refresh.disturbed(notebook_that_prints(f"{QUIET}{line}\n")) == [line]


def test_a_disturbed_run_is_taken_again(tmp_path, monkeypatch):
    path, runs = tmp_path / "a.ipynb", iter(["A/A: 1.50\n", "A/A: 1.00\n"])
    nbformat.write(notebook_that_prints("A/A: 0.99\n"), path)
    ran = lambda notebook, folder: notebook.update(notebook_that_prints(next(runs)))  # noqa: E731
    monkeypatch.setattr(refresh, "run", ran)
    assert refresh.refresh(path) == []
    assert "1.00" in path.read_text()


def test_after_some_tries_nothing_is_stored(tmp_path, monkeypatch):
    path = tmp_path / "a.ipynb"
    nbformat.write(notebook_that_prints("A/A: 0.99\n"), path)
    before = path.read_bytes()
    disturbed = notebook_that_prints("A/A: 1.50\n")
    monkeypatch.setattr(refresh, "run", lambda notebook, folder: notebook.update(disturbed))
    assert refresh.refresh(path, tries=2) == ["A/A: 1.50"]
    assert path.read_bytes() == before


def test_anyway(tmp_path, monkeypatch):
    path, disturbed = tmp_path / "a.ipynb", notebook_that_prints("A/A: 1.50\n")
    nbformat.write(notebook_that_prints("A/A: 0.99\n"), path)
    monkeypatch.setattr(refresh, "run", lambda notebook, folder: notebook.update(disturbed))
    assert refresh.refresh(path, anyway=True) == []
    assert "1.50" in path.read_text()


def test_a_run_is_stored_whole_or_not_at_all():
    """The times of the first cell belong to those of the second, whose words have changed."""
    old, new = (nbformat.v4.new_notebook() for _ in range(2))
    for notebook, texts in ((old, ("5 ms\n", "9 ms\n")), (new, ("7 ms\n", "8 ms more\n"))):
        for number, text in enumerate(texts):
            cell = notebook_that_prints(text).cells[0]
            cell.id = f"cell{number}"
            notebook.cells.append(cell)
    refresh.keep_equal_outputs(new, old)
    assert new.cells[0].outputs[0].text == "7 ms\n"
    new.cells[1].outputs[0].text = "6 ms\n"
    refresh.keep_equal_outputs(new, old)
    assert [cell.outputs[0].text for cell in new.cells] == ["5 ms\n", "9 ms\n"]
