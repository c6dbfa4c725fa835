"""What `make lab` gives the reader: notebooks without answers, and never over the reader's own."""

import pytest

nbformat = pytest.importorskip("nbformat", reason="Jupyter isn't installed")
working_copy = pytest.importorskip("working_copy")


def write(path, source):
    cell = nbformat.v4.new_code_cell(source, execution_count=1)
    cell.outputs = [nbformat.v4.new_output("stream", text="the answer")]
    nbformat.write(nbformat.v4.new_notebook(cells=[cell]), path)


def test_a_copy_shows_no_answer_and_is_the_readers(tmp_path):
    source, target = tmp_path / "notebooks", tmp_path / "my_notebooks"
    source.mkdir()
    write(source / "00_first.ipynb", "1")
    assert working_copy.copy(source, target, "today") == []
    own = target / "00_first.ipynb"
    [cell] = nbformat.read(own, as_version=4).cells
    assert (cell.source, cell.outputs, cell.execution_count) == ("1", [], None)

    write(own, "my work")
    mine = own.read_text()
    assert working_copy.copy(source, target, "today") == []  # nothing new
    write(source / "00_first.ipynb", "2")
    [word] = working_copy.copy(source, target, "later")
    assert "beside it: 00_first.later.ipynb" in word
    assert nbformat.read(target / "00_first.later.ipynb", as_version=4).cells[0].source == "2"
    assert working_copy.copy(source, target, "even later") == []  # told once
    assert own.read_text() == mine


def test_a_notebook_that_the_reader_deleted_comes_back(tmp_path):
    source, target = tmp_path / "notebooks", tmp_path / "my_notebooks"
    source.mkdir()
    write(source / "00_first.ipynb", "1")
    working_copy.copy(source, target, "today")
    (target / "00_first.ipynb").unlink()
    assert working_copy.copy(source, target, "today") == []
    assert (target / "00_first.ipynb").exists()
