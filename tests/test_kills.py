"""Processes that die before each change of the disk."""

import os
import pickletools
from pathlib import Path

import pytest

from ddpkit.runtime.launch import launch
from ddpkit.tools.kills import kill_before_each_change, write_call


def save(folder, content):
    (folder / "new").mkdir()
    with open(folder / "new" / "a", "w") as file:
        file.write(content)
        file.flush()
        os.fsync(file)
    (folder / "left").read_text()
    (folder / "left").unlink()
    os.rename(folder / "new", folder / "whole")


def prepare(folder):
    folder.mkdir()
    (folder / "left").write_text("of an earlier save")


def left(folder):
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*"))


def test_each_is_killed_before_its_change_and_after_the_others(tmp_path):
    changes = kill_before_each_change(save, ("12345",), prepare, tmp_path)
    events = [event for event, *_ in changes]
    assert events == ["os.mkdir", "open", "os.fsync", "os.remove", "os.rename"]
    assert left(tmp_path / "0") == ["whole", "whole/a"]
    assert left(tmp_path / "1") == ["left"]
    assert left(tmp_path / "2") == ["left", "new"]
    assert left(tmp_path / "3") == left(tmp_path / "4") == ["left", "new", "new/a"]
    assert left(tmp_path / "5") == ["new", "new/a"]
    assert (tmp_path / "3" / "new" / "a").read_text() == "12345"  # flushed, the kill is later
    inode, nbytes = changes[2][1:]
    assert (inode, nbytes) == ((tmp_path / "0" / "whole" / "a").stat().st_ino, 5)


def unflushed(folder, content):
    with open(folder / "a", "w") as file:
        file.write(content)
        os.fsync(file.fileno())


def test_what_python_still_has_is_not_on_the_disk(tmp_path):
    changes = kill_before_each_change(unflushed, ("12345",), Path.mkdir, tmp_path)
    assert changes[1][2] == 0
    assert (tmp_path / "2" / "a").read_text() == ""


def raises(folder):
    raise OSError("no room")


def test_an_error_comes_through(tmp_path):
    with pytest.raises(RuntimeError, match="no room"):
        kill_before_each_change(raises, (), Path.mkdir, tmp_path)


def test_functions_of_a_shell_work_as_well(tmp_path):
    changes = kill_before_each_change(lambda folder: folder.rmdir(), (), Path.mkdir, tmp_path)
    assert changes == [["os.rmdir"]]
    assert not (tmp_path / "0").exists()
    assert (tmp_path / "1").exists()


def modules_in_a_call(folder):
    write_call(lambda folder: folder.rmdir(), (), folder)
    words = [word for _, word, _ in pickletools.genops((folder / "call").read_bytes())]
    return {word for word in words if isinstance(word, str) and word.startswith("ddpkit")}


def test_a_rank_sends_nothing_of_its_own_along(tmp_path):
    (named,) = launch(modules_in_a_call, tmp_path, world_size=1, backend="gloo")
    assert named == {"ddpkit.tools", "ddpkit.tools.kills"}  # where die_at says that it comes from
