"""Programs in the shape of other people's, right and sabotaged, under `ddpkit.debug`.

`make test` runs a dozen in ranks that are forked, without torchrun's seconds; `make test-all` runs
all of them under torchrun itself.
"""

import os
import sys
from pathlib import Path

import pytest
import torch.distributed as dist
from foreign_cases import FOREIGN, PROGRAMS, SABOTAGES
from foreign_runs import report, run, torchrun
from outside import FREEZE_S

from ddpkit import launch
from ddpkit.debug import main


def becomes_torchruns_rank(script, arguments, port):
    """Within `launch`: run a script under `ddpkit.debug` as torchrun would; its exit code."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world_size)}
    os.environ |= {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(world_size)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    os.environ["TORCHELASTIC_ERROR_FILE"] = str(script.parent / f"attempt/{rank}/error.json")
    if child := os.fork():
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    os.chdir(script.parent)
    main([str(script), *arguments])
    sys.stdout.flush()
    return os._exit(0)


def forked(folder, program, source, arguments):
    """(exit code by rank, all that the ranks printed) of a program under `ddpkit.debug`."""
    script = folder / f"{program}.py"
    script.write_text(source, encoding="utf-8")
    (folder / "attempt").mkdir()
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    start = becomes_torchruns_rank, script, arguments, store.port
    run = launch(*start, world_size=PROGRAMS[program][0], timeout=FREEZE_S)
    return list(run), "\n".join(run.output)


def need(program):
    if program == "accelerate_loop":
        pytest.importorskip("accelerate", reason="accelerate isn't installed")


def source_of(program):
    return (FOREIGN / f"{program}.py").read_text(encoding="utf-8")


@pytest.mark.parametrize("program", ["ddp_trainer", "pipeline_1f1b", "validation"])
def test_of_a_right_program_nothing_is_said(program, tmp_path):
    codes, said = forked(tmp_path, program, source_of(program), PROGRAMS[program][1])
    assert set(codes) == {0}, said
    assert "ddpkit: " not in said


@pytest.mark.parametrize("sabotage", [s for s in SABOTAGES if s.quick], ids=str)
def test_a_sabotage_is_explained(sabotage, tmp_path):
    arguments = PROGRAMS[sabotage.program][1] if sabotage.arguments is None else sabotage.arguments
    codes, said = forked(tmp_path, sabotage.program, sabotage.source(), arguments)
    assert sabotage.problems(report(said)) == [], said
    assert any(codes), "no rank has failed"


def printed_under_torchrun(folder, program, *, debug):
    """Run a program in a new folder; return (how it ran, {rank: what it printed})."""
    folder.mkdir()
    # One file a rank: in one pipe the ranks' lines run into each other.
    more = ["--redirects=1", f"--log-dir={folder}/logs"]
    script = FOREIGN / f"{program}.py"
    ran = torchrun(folder, program, script, debug=debug, limit_s=FREEZE_S, more=more)
    files = sorted(folder.glob("logs/*/attempt_0/*/stdout.log"))
    return ran, {path.parent.name: path.read_text() for path in files}


@pytest.mark.slow
@pytest.mark.parametrize("program", PROGRAMS)
def test_a_right_program_says_what_it_says_without_us(program, tmp_path):
    need(program)
    for attempt in range(3):
        folder = tmp_path / f"plain_{attempt}"
        plain, expected = printed_under_torchrun(folder, program, debug=False)
        # Seldom, a thread of PyTorch's aborts its rank while Python shuts down: this is no twin.
        if "terminate called" not in plain.err:
            break
    ours, printed = printed_under_torchrun(tmp_path / "debug", program, debug=True)
    assert (plain.code, ours.code) == (0, 0), plain.err + ours.err
    assert ours.report() == ""
    assert len(expected) == PROGRAMS[program][0]
    assert any(expected.values())
    assert printed == expected


@pytest.mark.slow
@pytest.mark.parametrize("sabotage", SABOTAGES, ids=str)
def test_a_sabotage_is_explained_under_torchrun(sabotage, tmp_path):
    need(sabotage.program)
    ran = run(sabotage, tmp_path, debug=True, limit_s=FREEZE_S)
    assert sabotage.problems(ran.report()) == [], ran.err
    assert ran.code == 1, f"expected torchrun's 1, got {ran.code}\n{ran.err}"


FALLS = """\
if self.rank == 1 and epoch == 1 and not os.path.exists("fell"):
    open("fell", "w").close()
    raise ValueError("once")
"""


@pytest.mark.slow
def test_torchrun_starts_the_ranks_anew_after_a_report(tmp_path):
    """And the program goes on from its snapshot."""
    line = "        self.train_data.sampler.set_epoch(epoch)\n"
    source = source_of("ddp_trainer")
    assert source.count(line) == 1
    script = tmp_path / "ddp_trainer.py"
    falls = "".join(f"        {each}\n" for each in FALLS.splitlines())
    script.write_text(source.replace(line, falls + line), encoding="utf-8")
    more = ["--max-restarts=1"]
    ran = torchrun(tmp_path, "ddp_trainer", script, debug=True, limit_s=FREEZE_S, more=more)
    assert ran.code == 0, ran.err
    assert ran.err.count("ddpkit: ") == 1
    assert "rank 1 raised ValueError: once" in ran.report()
    assert "[rank 0] goes on after epoch 1" in ran.out


# The harness itself

RIGHT = """\
deadlock: rank 1 waits in send for rank 0, which has returned.
rank 1: waiting  parameter_server.py:{} in work: {}
Every send needs a recv on the other rank."""


def test_a_wrong_report_is_found():
    (sabotage,) = (s for s in SABOTAGES if s.name == "the server stops one gradient early")
    line = "dist.send(gradient, dst=0, tag=GRADIENT)"
    number = [each.strip() for each in sabotage.source().splitlines()].index(line) + 1
    right = RIGHT.format(number, line)
    assert sabotage.problems(right) == []
    assert sabotage.problems("") == ["there is no report"]
    wrong = {
        right.replace("for rank 0", "for rank 2"): "what happened",
        right.replace(f":{number} ", f":{number + 1} "): "line",
        right.replace("Every send", "No send"): "advice",
        f"{right} GLHF!": "misleads",
        f"rank 1 raised: Connection closed by peer. {right}": "begins with",
    }
    for said, what in wrong.items():
        (found,) = sabotage.problems(said)
        assert found.startswith(what)


def test_a_report_ends_where_others_speak():
    said = "W1123 torchrun\n\nddpkit: rank 1 raised\n  a.py:3\n\nW1123 10:00 torch\nTraceback (most"
    assert report(said).split() == ["rank", "1", "raised", "a.py:3"]
    assert report("ddpkit: one\nddpkit: two\n[rank0]: x").split() == ["one", "two"]


def test_each_program_is_sabotaged_at_least_twice_and_thirty_times_in_all():
    programs = [sabotage.program for sabotage in SABOTAGES]
    assert min(programs.count(program) for program in PROGRAMS) >= 2
    assert len(set(map(str, SABOTAGES))) == len(SABOTAGES) >= 30
    assert {Path(each).stem for each in FOREIGN.glob("*.py")} == set(PROGRAMS)
