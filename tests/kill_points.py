"""Kill a training wherever it touches a file or another rank, start it again, and compare.

    python tests/kill_points.py --all            every point of every scenario, and a table
    python tests/kill_points.py --random 300     a soak: anywhere, at any time
    python tests/kill_points.py --some 4         four points of each scenario

Ranks are forked from one process that has imported everything, so that a run takes a second. They
die by SIGKILL, before a file operation or a collective, or in the middle of a write.
"""

import argparse
import builtins
import collections
import contextlib
import hashlib
import io
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

import torch
import torch._dynamo
import torch.distributed as dist
import torch.distributed.checkpoint
from torch._C._distributed_c10d import ProcessGroup

from ddpkit.train import TrainConfig, Trainer, report
from ddpkit.train import checkpoint as saving
from ddpkit.train.run import audit_samples, read_log, train
from ddpkit.train.state import counters, state_of

TINY = {"layers": 1, "width": 16, "heads": 2, "length": 8, "batch": 4, "steps": 6, "save_every": 2}
TEXT = bytes(range(60, 150))  # 11 sequences of 8: 6 steps of 4 pass two ends of an epoch
SEQUENCES = (len(TEXT) - 1) // TINY["length"]
MESHES = {
    "ddp": {"data": 2},
    "zero1": {"data": 2, "sharding": "zero1"},
    "fsdp": {"data": 2, "sharding": "fsdp"},
    "tensor": {"tensor": 2},
    "pipeline": {"pipeline": 2, "micro_batches": 2},
}
COLLECTIVES = "allreduce broadcast allgather _allgather_base reduce_scatter _reduce_scatter_base"
COLLECTIVES += " alltoall alltoall_base gather scatter reduce barrier send recv"
FILE_EVENTS = {
    "open": "open",
    "os.mkdir": "mkdir",
    "os.rename": "rename",
    "os.remove": "unlink",
    "os.rmdir": "rmdir",
    "os.scandir": "scandir",
    "os.listdir": "listdir",
}
A_SAVE = "a save and two steps"
PATIENCE_S = 10  # of a launcher with ranks that are left
STUCK_S = 60  # nothing here takes longer on the busiest machine


@dataclass(frozen=True)
class Point:
    """A moment of a rank: before the `number`-th thing, from 0, that it does in a phase."""

    rank: int
    phase: str  # "begin", "step 3", "save 4"
    number: int
    what: str = field(default="", compare=False)


class Points:
    """Counts what this rank does to the files of `folder` and with other ranks, in its phases.

    found: all points passed. It dies at `deadly`.
    """

    def __init__(self, rank: int, folder: str, deadly: Point | None):
        self.rank = rank
        self.folder = folder
        self.deadly = deadly
        self.phases = {"main": "begin", "save": "save 0"}
        self.count = collections.Counter()
        self.found: list[Point] = []

    def touch(self, what: str, before_death=None) -> None:
        main = threading.current_thread() is threading.main_thread()
        phase = self.phases["main" if main else "save"]
        point = Point(self.rank, phase, self.count[phase], what)
        self.count[phase] += 1
        self.found.append(point)
        if point == self.deadly:
            if before_death:
                before_death()
            os.kill(os.getpid(), signal.SIGKILL)

    def install(self) -> None:
        self.watch_files()
        self.watch_collectives()
        self.watch_phases()

    def watch_files(self) -> None:
        def audit(event: str, args: tuple) -> None:
            if event in FILE_EVENTS and self.ours(args[0]):
                self.touch(f"{FILE_EVENTS[event]} {self.short(args[0])}")

        sys.addaudithook(audit)
        plain_open, plain_sync = io.open, os.fsync

        def opened(path, mode="r", buffering=-1, *args, **options):
            if isinstance(path, int) or not self.ours(path) or not set(mode) & set("wax"):
                return plain_open(path, mode, buffering, *args, **options)
            file = io.BufferedWriter(WatchedFile(path, mode.replace("b", "").replace("t", "")))
            file.raw.points = self
            return file if "b" in mode else io.TextIOWrapper(file, "utf-8")

        def synced(handle):
            self.touch("fsync")
            plain_sync(handle)

        builtins.open = io.open = opened
        os.fsync = synced

    def ours(self, path) -> bool:
        """Tell whether a path is in the folder, or relative, as `shutil.rmtree` names files."""
        path = os.fspath(path) if isinstance(path, str | Path) else "/"
        return path.startswith(self.folder) or "/" not in path

    def short(self, path) -> str:
        return os.fspath(path).removeprefix(self.folder).lstrip("/") or "."

    def watch_collectives(self) -> None:
        for name in COLLECTIVES.split():
            plain = getattr(ProcessGroup, name)

            def call(group, *args, plain=plain, name=name, **options):
                self.touch(name)
                return plain(group, *args, **options)

            setattr(ProcessGroup, name, call)

    def watch_phases(self) -> None:
        plain_step, plain_write = Trainer.step, saving.Checkpoints.write

        def step(trainer, number):
            self.phases["main"] = f"step {number}"
            return plain_step(trainer, number)

        def write(checkpoints, step, *args):
            self.phases["save"] = f"save {step}"
            return plain_write(checkpoints, step, *args)

        Trainer.step, saving.Checkpoints.write = step, write


class WatchedFile(io.FileIO):
    """A file whose writes are points: before one, and when half of it is written."""

    points: Points

    def write(self, data) -> int:
        half = bytes(data)[: len(data) // 2]
        self.points.touch("write")
        self.points.touch("half a write", before_death=lambda: super(WatchedFile, self).write(half))
        return super().write(data)


# One run


@dataclass
class Ended:
    """The end of a run of two ranks: exit codes by rank (None: it had to be killed), reports."""

    codes: list[int | None]
    reports: list[dict | None]
    said: str
    seconds: float


def run(config: TrainConfig, deadly: Point | None = None, random_after: float | None = None):
    """Train on forked ranks, of which one dies at `deadly`, or any after some seconds."""
    begun = time.perf_counter()
    place = Path(tempfile.mkdtemp(prefix="kill-points-"))
    ranks = [fork(rank, config, place, deadly) for rank in range(config.world_size)]
    if random_after is not None:
        time.sleep(random_after)
        os.kill(random.choice(ranks), signal.SIGKILL)
    codes = until_ended(ranks)
    reports, said = [], ""
    for rank in range(config.world_size):
        path = place / f"report.{rank}"
        reports.append(json.loads(path.read_text()) if path.exists() else None)
        said += (place / f"said.{rank}").read_text()
    shutil.rmtree(place)
    return Ended(codes, reports, said, time.perf_counter() - begun)


def until_ended(ranks: list[int]) -> list[int | None]:
    """Return exit codes; None: SIGKILL was needed.

    When one has died, the others are to end. Those that wait for its first connection can't
    see it; after a while they get a SIGTERM, as from torchrun's agent.
    """
    codes: dict[int, int | None] = {}
    last = time.monotonic() + STUCK_S
    patience = None
    while len(codes) < len(ranks) and time.monotonic() < last:
        for pid in set(ranks) - set(codes):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                codes[pid] = os.waitstatus_to_exitcode(status)
            elif patience is not None and time.monotonic() > patience:
                os.kill(pid, signal.SIGTERM)
        if patience is None and any(codes.values()):
            patience = time.monotonic() + PATIENCE_S
        time.sleep(0.005)
    for pid in set(ranks) - set(codes):
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    return [codes.get(pid) for pid in ranks]


def fork(rank: int, config: TrainConfig, place: Path, deadly: Point | None) -> int:
    pid = os.fork()
    if pid:
        return pid
    said = os.open(place / f"said.{rank}", os.O_WRONLY | os.O_CREAT)
    os.dup2(said, 1)
    os.dup2(said, 2)
    try:
        found = train_here(rank, config, place, deadly)
        whole = place / f"whole.{rank}"
        whole.write_text(json.dumps(found))
        whole.rename(place / f"report.{rank}")
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        threading._shutdown()  # as an interpreter ends: the thread that saves is waited for
        os._exit(1)
    sys.stdout.flush()
    os._exit(0)


def train_here(rank: int, config: TrainConfig, place: Path, deadly: Point | None) -> dict:
    store = dist.FileStore(str(place / "store"), config.world_size)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=config.world_size, timeout=timedelta(seconds=90)
    )
    report.MEASURED_S = 0.001
    points = Points(rank, config.folder, deadly)
    points.install()
    trainer, done = train(config)
    points.phases["main"] = "over"
    dist.barrier()
    left = [path.name for path in Path(config.folder).glob("*.*ing")]
    dist.barrier()
    fresh = Trainer(config)
    step = saving.Checkpoints(fresh, config.folder).load()
    found = {
        "first": config.steps - len(done),
        "digest": digest(trainer),
        "saved": digest(fresh) if step == config.steps else f"of step {step}",
        "left": left,
        "points": [vars(point) for point in points.found],
    }
    dist.barrier()
    dist.destroy_process_group()
    return found


def digest(trainer: Trainer) -> str:
    """Sum up every bit of this rank's parameters and optimizer, by name."""
    found = hashlib.sha256(json.dumps(counters(trainer), sort_keys=True).encode())
    for name, piece in sorted(state_of(trainer).items()):
        for offsets, values in piece.boxes:
            found.update(f"{name} {offsets}".encode())
            found.update(values.contiguous().numpy().tobytes())
    return found.hexdigest()


# One trial


class Scenario:
    """A training on a mesh, from a folder as `prepare` leaves it, killed in some of its phases."""

    def __init__(
        self, name: str, mesh: str, place: Path, phases: set[str], prepare=None, keep: int = 1
    ):
        self.name = name
        self.mesh = mesh
        self.phases = phases
        self.folder = place / "run"  # the same name in all runs: it stands in what is compared
        self.kept = place / f"{name}-{mesh}"
        text = place / "text"
        text.write_bytes(TEXT)
        options = TINY | MESHES[mesh]
        self.config = TrainConfig(**options, keep=keep, text=str(text), folder=str(self.folder))
        self.clean()
        self.whole = run(self.config)
        assert self.whole.codes == [0, 0], self.whole.said
        assert wrong_at_the_end(self, self.whole) == [], self.whole.said
        self.losses = losses(self.folder)
        self.kept.mkdir()
        if prepare is not None:
            prepare(self)
            shutil.copytree(self.folder, self.kept, dirs_exist_ok=True)
        self.clean()
        counted = run(self.config)
        assert counted.codes == [0, 0], counted.said
        found = [Point(**point) for report in counted.reports for point in report["points"]]
        self.points = [point for point in found if point.phase in phases]

    def clean(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)
        if self.kept.exists():
            shutil.copytree(self.kept, self.folder)


def losses(folder: Path) -> list[float]:
    return [step["loss"] for step in read_log(folder)]


def published(folder: Path) -> int:
    """Return the step of the latest whole checkpoint, by looking."""
    if not folder.exists():
        return 0
    whole = [path for path in saving.checkpoints(folder) if saving.damage(path) is None]
    return int(whole[0].name.removeprefix("step-")) if whole else 0


def last_step(folder: Path) -> int:
    """Return how many steps stand in the log, counted from the last line."""
    log = folder / "log.jsonl"
    lines = log.read_text().splitlines() if log.exists() else []
    with contextlib.suppress(ValueError, IndexError):
        return json.loads(lines[-1])["step"] + 1
    with contextlib.suppress(ValueError, IndexError):
        return json.loads(lines[-2])["step"] + 1  # the last one was being written
    return 0


def trial(scenario: Scenario, deadly: Point | None, random_after: float | None = None) -> dict:
    """Kill, start again, and say what is wrong; {} in "wrong" if nothing is."""
    scenario.clean()
    killed = run(scenario.config, deadly, random_after)
    wrong = []
    if deadly is not None and killed.codes[deadly.rank] != -signal.SIGKILL:
        wrong.append(f"the rank wasn't killed: exit codes {killed.codes}")
    if None in killed.codes:
        wrong.append("the other rank didn't end")
    whole = published(scenario.folder)
    reached = max(whole, last_step(scenario.folder))
    again = run(scenario.config)
    wrong += wrong_at_the_end(scenario, again)
    first = again.reports[0]["first"] if again.reports[0] else None
    if first != whole:
        wrong.append(f"went on after step {first}, where {whole} was saved")
    elif reached - first > 2 * scenario.config.save_every:  # an interval, and a save under way
        wrong.append(f"{reached - first} steps were done again")
    said = killed.said + again.said if wrong else ""
    return {
        "wrong": wrong,
        "lost": reached - whole,
        "seconds": (killed.seconds, again.seconds),
        "ended by the launcher": -signal.SIGTERM in killed.codes,
        "said": said,
    }


def wrong_at_the_end(scenario: Scenario, ended: Ended) -> list[str]:
    """Say in what a training that went to its end differs from the uninterrupted one."""
    if ended.codes != [0, 0]:
        return [f"the second run ended with {ended.codes}"]
    wrong = []
    for rank, (mine, other) in enumerate(zip(ended.reports, scenario.whole.reports, strict=True)):
        for name in ("digest", "saved"):
            if mine[name] != other["digest"]:
                wrong.append(f"rank {rank}: {name} differs from the uninterrupted run's")
        if mine["left"]:
            wrong.append(f"left behind: {mine['left']}")
    if scenario.whole is not ended and losses(scenario.folder) != scenario.losses:
        wrong.append("the losses differ")
    return wrong + audit_samples(scenario.folder, SEQUENCES)


# Scenarios


def leave_traces(scenario: Scenario) -> None:
    """Leave what two deaths in saves have left: a folder half-written and one half-deleted."""
    scenario.clean()
    point = next(
        point
        for report in scenario.whole.reports
        for point in report["points"]
        if point["phase"] == "save 4" and point["what"].startswith("rename step-00000004.writing")
    )
    run(scenario.config, Point(**point))
    assert list(scenario.folder.glob("*.writing"))
    assert published(scenario.folder) == 2
    shutil.copytree(scenario.folder / "step-00000002", scenario.folder / "step-00000001.leaving")


def damage_the_last(scenario: Scenario) -> None:
    """Flip a bit of the last checkpoint, whose step the resumed run will save again."""
    scenario.clean()
    run(scenario.config)
    flip(next((scenario.folder / "step-00000006").glob("*.distcp")))


def flip(path: Path, bit: int = 4003) -> None:
    data = bytearray(path.read_bytes())
    data[bit // 8 % len(data)] ^= 1 << bit % 8
    path.write_bytes(data)


def scenarios(place: Path, meshes: list[str]) -> Iterator[Scenario]:
    first = meshes[0]
    yield Scenario(A_SAVE, first, place, {"save 4", "step 2", "step 3"})
    yield Scenario("recovery", first, place, {"begin"}, leave_traces)
    yield Scenario("a save over a damaged one", first, place, {"save 6"}, damage_the_last, 2)
    for mesh in meshes[1:]:
        made = Scenario(A_SAVE, mesh, place, {"save 4", "step 2", "step 3"})
        made.points = without_middles(made.points)  # of a file: those of the first mesh suffice
        yield made


def without_middles(points: list[Point]) -> list[Point]:
    """Leave out writes that stand between writes."""
    kept = []
    for index, point in enumerate(points):
        around = points[max(0, index - 2) : index + 3]
        if not all("write" in other.what for other in around):
            kept.append(point)
    return kept


def spread(points: list[Point], number: int) -> list[Point]:
    """Choose points evenly, from the first to the last."""
    points = without_middles(points)
    return [points[turn * (len(points) - 1) // (number - 1)] for turn in range(number)]


# The command


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--all", action="store_true", help="every point of every scenario")
    parser.add_argument("--some", type=int, help="so many points of every scenario")
    parser.add_argument("--random", type=int, help="so many kills at random times")
    parser.add_argument("--meshes", default=",".join(MESHES), help=f"of {', '.join(MESHES)}")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    meshes = given.meshes.split(",")
    results = []
    with tempfile.TemporaryDirectory(prefix="kill-points-") as place:
        if given.all or given.some:
            for scenario in scenarios(Path(place), meshes):
                chosen = scenario.points if given.all else spread(scenario.points, given.some)
                results += [tried(scenario, point) for point in chosen]
        if given.random:
            results += soak(Path(place), meshes, given.random, given.seed)
    print(table(results), file=sys.stderr)
    return 1 if any(result["wrong"] for result in results) else 0


def tried(scenario: Scenario, point: Point | None, after: float | None = None) -> dict:
    """Make a trial and print it as a line of JSON."""
    where = {"scenario": scenario.name, "mesh": scenario.mesh}
    where |= vars(point) if point else {"phase": "any", "what": "any time", "after": after}
    result = where | trial(scenario, point, after)
    print(json.dumps(result), flush=True)
    return result


def soak(place: Path, meshes: list[str], number: int, seed: int) -> list[dict]:
    """Kill either rank at times drawn from the length of a run, on each mesh in turn."""
    found = [Scenario("soak", mesh, place, set()) for mesh in meshes]
    random.seed(seed)
    results = []
    for turn in range(number):
        scenario = found[turn % len(found)]
        results.append(tried(scenario, None, random.uniform(0, scenario.whole.seconds)))
    return results


def table(results: list[dict]) -> str:
    """Count trials and what went wrong by scenario, mesh and kind of point."""
    rows = collections.defaultdict(list)
    for result in results:
        phase = result["phase"].split()[0]
        rows[result["scenario"], result["mesh"], phase].append(result)
    head = (
        "scenario",
        "mesh",
        "killed in",
        "points",
        "wrong",
        "steps lost, at most",
        "needed SIGTERM",
    )
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    for (scenario, mesh, phase), found in rows.items():
        wrong = sum(bool(result["wrong"]) for result in found)
        lost = max(result["lost"] for result in found)
        waited = sum(result["ended by the launcher"] for result in found)
        row = scenario, mesh, phase, len(found), wrong, lost, waited
        lines.append("| " + " | ".join(map(str, row)) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
