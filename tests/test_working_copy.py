"""What `make lab` gives the reader: notebooks without answers, never over theirs; saved widgets."""

import json
from types import SimpleNamespace

import pytest
from jupyter_server_config import STATE, VIEW, keep_widgets, saved_widgets

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
    own.unlink()
    assert working_copy.copy(source, target, "at last") == []
    assert own.exists()  # a notebook that the reader deleted comes back


def test_saved_is_what_is_shown_and_was_ever_known(tmp_path):
    """A player saved before its kernel ended; a picture for a widget that never was."""
    player, link, image = ({"state": {"x": f"IPY_MODEL_{name}"}} for name in ("", "player", ""))
    older = {"player": player, "link": link, "gone": image}
    file = {"metadata": {"widgets": {STATE: {"state": older}}}}
    (tmp_path / "a.ipynb").write_text(json.dumps(file))
    shown = [{VIEW: {"model_id": each}, "text/plain": ""} for each in ("player", "new", "never")]
    cell = {"outputs": [{"data": each} for each in shown] + [{"text": "printed"}]}
    widgets = {STATE: {"state": {"new": image}}}
    notebook = {"cells": [cell, {}], "metadata": {"widgets": widgets}}
    model = {"type": "notebook", "content": notebook}
    keep_widgets(model, "a.ipynb", SimpleNamespace(root_dir=tmp_path))
    assert saved_widgets(notebook) == {"player": player, "link": link, "new": image}
    assert [VIEW in each for each in shown] == [True, True, False]
