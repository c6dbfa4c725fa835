"""The exercises of notebook 15 that run whole programs: a slow step, a save that is killed."""

from ddpkit import exercises as check
from ddpkit.exercises import capstone_runs

from .every import *  # noqa: F403


def test_as_found_both_traps_are_told_one_after_the_other():
    told = check.slow_step(capstone_runs.as_found).text
    assert "gradients 8 times" in told
    assert "no_sync" in told
    mistakes = {mistake.name: mistake for mistake in check.slow_step.mistakes}
    told = check.slow_step(mistakes["logs_each"]).text
    assert "a loss 5 times" in told


def test_a_kill_comes_before_every_change_on_the_disk(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = capstone_runs.kill_everywhere(check.publish.reference)
    assert found == {capstone_runs.KILLED: None, capstone_runs.SYNCED: capstone_runs.SIZES}
    left = {}
    for folder in tmp_path.iterdir():
        if folder.is_dir():
            left[int(folder.name)] = sorted(path.name for path in folder.iterdir())
    half_written = ["step-1", "step-2.writing"]
    # Two files deleted and their folder, a new one, two files opened and fsynced, the rename
    assert left.pop(0) == ["step-1", "step-2"]
    assert set(left) == set(range(1, 10))
    assert left.pop(4) == ["step-1"]
    assert all(names == half_written for names in left.values())
