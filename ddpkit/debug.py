"""Your own script on the wire: a hang or a mismatch is explained, in seconds, not in half an hour.

    torchrun --nproc-per-node 4 -m ddpkit.debug train.py ARGS
    python -m ddpkit.debug --world-size 4 train.py ARGS         # without torchrun

The script stays as it is, with its own `init_process_group`. The ranks of a machine share a board,
on which each writes its calls; other machines' pages come through torch.distributed's store. Rank 0
prints the report, once, and all ranks exit with code 1, so that torchrun can restart them.
"""

import argparse
import os
import pickle
import runpy
import shutil
import sys
import tempfile
import threading
import time
import traceback
import zlib
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from .runtime import hang
from .runtime.board import RETURNED, RUNNING, Board
from .runtime.link import Link
from .runtime.records import Recorder, is_library
from .runtime.run import Run
from .runtime.watch import CERTAIN_S, LOST_PEER
from .runtime.wire import register_wire
from .tools.units import wrap

LOOK_S = 0.25  # how often the board is read
NEWS_S = 3.0  # how long a rank whose connection broke waits for the report of who fell first


class Session:
    """One rank of a script under the wire: its board, its recorder, the thread that watches."""

    def __init__(self, link: Link | None):
        self.rank, self.world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        local, here = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
        self.leads = local == 0  # the watcher of this machine
        self.here = range(self.rank - local, self.rank - local + here)
        self.alone = here == self.world_size
        run = "-".join(
            os.environ.get(f"TORCHELASTIC_{key}", "0") for key in ("RUN_ID", "RESTART_COUNT")
        )
        port, machine = os.environ["MASTER_PORT"], os.environ.get("GROUP_RANK", "0")
        name = f"ddpkit-debug-{os.getppid()}-{run}-{port}-{machine}"
        self.folder = Path(tempfile.gettempdir()) / name
        self.board = self._open_board()
        self.recorder = Recorder(self.rank, self.board, link, disagree=self._disagree)
        self.store: dist.Store | None = None
        self._told = threading.Lock()

    def _open_board(self) -> Board:
        path = self.folder / "board"
        if self.leads:
            self.folder.mkdir(mode=0o700, exist_ok=True)
            Board(self.folder / "new", self.world_size, create=True).close()
            os.replace(self.folder / "new", path)
        while not path.exists():
            time.sleep(0.01)
        return Board(path, self.world_size)

    # The script's own `init_process_group`

    def install(self) -> None:
        """From now on, `dist.init_process_group` joins the world over the wire."""
        original = c10d.init_process_group

        def init_process_group(backend=None, *args, **kwargs):
            wanted = str(backend or ("nccl" if torch.cuda.is_available() else "gloo"))
            inner = "nccl" if "nccl" in wanted else "gloo"
            device = torch.device("cpu")
            if inner == "nccl":
                device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
                torch.cuda.set_device(device)
            register_wire(self.recorder, inner, device, one_machine=False)
            original("ddpkit", *args, **kwargs)
            self.store = c10d._get_default_store()
            self.board.set_state(self.rank, RUNNING)
            threading.Thread(target=self._watch, daemon=True, name="ddpkit watch").start()

        dist.init_process_group = c10d.init_process_group = init_process_group

    # Watching

    def _watch(self) -> None:
        """On each rank: end when a report is out. On the first of a machine: look for hangs."""
        quiet_since, events = time.perf_counter(), None
        while True:
            time.sleep(LOOK_S)
            if self._report_is_out():
                self.end()
            if not self.leads:
                continue
            if not self.alone:
                self._exchange_pages()
            before, events = events, self.board.events()
            now = time.perf_counter()
            quiet_since = quiet_since if events == before else now
            if self.rank == 0 and now - quiet_since > CERTAIN_S:
                self._look()

    def _look(self) -> None:
        different = hang.mismatch(self.board)
        now = hang.situations(self.board)
        for hidden in hang.abandoned(now, self.board):
            now[hidden.rank] = hidden
        stuck = hang.deadlocked(now, self.board)
        if different:
            self.tell(hang.report(*hang.explain_mismatch(different), now, self.board))
        elif stuck:
            self.tell(hang.report(*hang.explain_deadlock(now, stuck), now, self.board))

    def _exchange_pages(self) -> None:
        """Give this machine's pages of the board to the first, if they changed, or take others'."""
        for rank in range(self.world_size):
            key = f"ddpkit/page/{rank}"
            if rank in self.here and self.rank != 0:
                self.store.set(key, zlib.compress(self.board.page(rank), 1))
            elif rank not in self.here and self.rank == 0 and self.store.check([key]):
                self.board.set_page(rank, zlib.decompress(self.store.get(key)))

    def _disagree(self, _by_rank) -> None:
        """Another rank said something else at the same place: rank 0 will tell."""
        threading.Event().wait()

    # The report

    def _report_is_out(self) -> bool:
        if (self.folder / "report").exists() or not self.folder.exists():
            return True
        return not self.alone and self.store is not None and self.store.check(["ddpkit/report"])

    def tell(self, text: str) -> None:
        """Print the report, unless another rank has printed one, and end this rank."""
        with self._told:
            try:
                (self.folder / "report").touch(exist_ok=False)
            except FileExistsError:
                self.end()
            print(f"\nddpkit.debug: {wrap(text)}", file=sys.stderr, flush=True)
            if not self.alone and self.store is not None:
                self.store.set("ddpkit/report", "out")
            self.end()

    def end(self) -> None:
        """Exit, the first rank of the machine first: when one is gone, torchrun ends the others."""
        sys.stdout.flush()
        if self.leads:
            time.sleep(2 * LOOK_S)  # so that all have seen that the report is out
            shutil.rmtree(self.folder, ignore_errors=True)
        until = time.perf_counter() + NEWS_S
        while self.folder.exists() and time.perf_counter() < until:
            time.sleep(0.05)
        os._exit(1)

    def failed(self, error: BaseException) -> None:
        """The script raised: tell it first, and what became of the others after it."""
        network = LOST_PEER.search(str(error)) is not None
        if network:
            until = time.perf_counter() + NEWS_S
            while time.perf_counter() < until and not self._report_is_out():
                time.sleep(0.05)
            if self._report_is_out():
                self.end()
        frames = [
            f for f in traceback.extract_tb(error.__traceback__) if not is_library(f.filename)
        ]
        lines = [f"rank {self.rank} raised {type(error).__name__}: {error}"]
        lines += [f"  {hang.describe_place((f.filename, f.lineno, f.name))}" for f in frames]
        for s in hang.situations(self.board):
            if s.rank != self.rank and s.state == "waiting":
                lines.append(f"Rank {s.rank} was in {s.call.call}, {hang.describe_place(s.place)}")
        self.tell("\n".join(lines))

    def done(self, options: argparse.Namespace) -> None:
        """The script ended well: keep what was asked for."""
        self.board.set_state(self.rank, RETURNED)
        if options.trace or options.flight_recorder:
            (self.folder / f"records.{self.rank}").write_bytes(pickle.dumps(self.recorder.records))
            if self.leads:
                self._save(options)
        if self.leads:
            shutil.rmtree(self.folder, ignore_errors=True)

    def _save(self, options: argparse.Namespace) -> None:
        """Of the ranks of this machine, once all have ended."""
        wire = []
        for rank in range(self.world_size):
            path = self.folder / f"records.{rank}"
            while rank in self.here and not path.exists():
                time.sleep(0.01)
            wire.append(pickle.loads(path.read_bytes()) if rank in self.here else [])
        run = Run([None] * len(wire), [""] * len(wire), wire, 0.0, "")
        if options.trace:
            run.trace(options.trace)
        if options.flight_recorder:
            run.flight_recorder(options.flight_recorder)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="ddpkit.debug", description=__doc__.splitlines()[0])
    parser.add_argument("--world-size", type=int, help="start so many ranks here, by torchrun")
    parser.add_argument("--trace", help="write a Chrome trace to this file at the end")
    parser.add_argument("--flight-recorder", help="write dumps to this folder at the end")
    parser.add_argument("--link", help='emulate a wire: "10 Gbit Ethernet"')
    parser.add_argument("script")
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    options = parse(arguments)
    if not Path(options.script).is_file():
        sys.exit(f"ddpkit.debug expected a script, got {options.script}: there is no such file")
    if options.world_size:
        ranks = f"--nproc-per-node={options.world_size}"
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", ranks]
        kept = arguments or sys.argv[1:]
        at = next(i for i, each in enumerate(kept) if each.startswith("--world-size"))
        rest = kept[:at] + kept[at + (1 if "=" in kept[at] else 2) :]
        os.execv(sys.executable, [*torchrun, "-m", "ddpkit.debug", *rest])
    if "RANK" not in os.environ:
        sys.exit("ddpkit.debug: start it by torchrun, or say how many ranks: --world-size 4")
    session = Session(Link.preset(options.link) if options.link else None)
    session.install()
    sys.argv = [options.script, *options.arguments]
    sys.path[0] = str(Path(options.script).resolve().parent)
    try:
        runpy.run_path(options.script, run_name="__main__")
    except SystemExit:
        raise
    except BaseException as error:
        session.failed(error)
    session.done(options)


if __name__ == "__main__":
    main()
