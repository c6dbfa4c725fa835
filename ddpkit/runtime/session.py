"""A rank of any script on the wire, as `ddpkit.debug` runs it: a board, a recorder, a watcher."""

import os
import pickle
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
import torch.distributed.device_mesh
from torch.distributed import distributed_c10d as c10d

from ..tools.units import wrap
from . import hang
from .board import DISAGREES, RETURNED, RUNNING, Board
from .link import Link
from .records import Recorder, is_library
from .run import Run
from .watch import CERTAIN_S, LOST_PEER
from .wire import register_wire

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
        # The agent is the parent of all ranks of a machine; it starts them anew after a failure.
        again = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        self.folder = Path(tempfile.gettempdir(), f"ddpkit-session-{os.getppid()}-{again}")
        self.board = self._open_board()
        self.recorder = Recorder(self.rank, self.board, link, disagree=self._disagree)
        self.store: dist.Store | None = None
        self._told, self._over = threading.Lock(), threading.Event()

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

        for module in list(sys.modules.values()):  # DeviceMesh, too, has a name of its own for it
            if getattr(module, "init_process_group", None) is original:
                module.init_process_group = init_process_group

    # Watching

    def _watch(self) -> None:
        """On each rank: end when a report is out. On the first of all: look for hangs."""
        quiet_since, events = time.perf_counter(), None
        while not self._over.wait(LOOK_S):
            if self._report_is_out():
                self.end()
            if not self.leads:
                continue
            if not self.alone:
                self._exchange_pages()
            before, events = events, self.board.events()
            now = time.perf_counter()
            quiet_since = quiet_since if events == before else now
            states = map(self.board.state, range(self.world_size))
            if self.rank == 0 and (DISAGREES in states or now - quiet_since > CERTAIN_S):
                self._look()

    def _look(self) -> None:
        """Tell what will never go on; ranks that compute may still come."""
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
        """Give this machine's pages of the board to the first machine, or take the others'."""
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
                self.end()  # somebody else was first
            print(f"\nddpkit: {wrap(text)}", file=sys.stderr, flush=True)
            if not self.alone and self.store is not None:
                self.store.set("ddpkit/report", "out")
            self.end(cause=True)

    def end(self, code: int = 1, cause: bool = False) -> None:
        """Exit, the cause first: torchrun reports whoever goes first, and then ends the others."""
        self._over.set()
        sys.stdout.flush()
        if self.leads:
            time.sleep(2 * LOOK_S)  # so that all have seen that the report is out
            shutil.rmtree(self.folder, ignore_errors=True)
        until = time.perf_counter() + NEWS_S
        while self.folder.exists() and time.perf_counter() < until:
            time.sleep(0.05)
        if not cause:
            time.sleep(2 * LOOK_S)
        os._exit(code)

    def failed(self, error: BaseException) -> None:
        """The script raised: tell it first, and what became of the others after it."""
        if LOST_PEER.search(str(error)):
            until = time.perf_counter() + NEWS_S
            while time.perf_counter() < until and not self._report_is_out():
                time.sleep(0.05)
            if self._report_is_out():
                self.end()
        lines = [f"rank {self.rank} raised {type(error).__name__}: {error}"]
        for frame in traceback.extract_tb(error.__traceback__):
            if not is_library(frame.filename):
                place = frame.filename, frame.lineno, frame.name
                lines.append(f"  {hang.describe_place(place)}")
        for s in hang.situations(self.board):
            if s.rank != self.rank and s.state == "waiting":
                lines.append(f"Rank {s.rank} was in {s.call.call}, {hang.describe_place(s.place)}")
        self.tell("\n".join(lines))

    def exited(self, code: int) -> None:
        """The script called sys.exit with a code that isn't 0: torchrun will end the others."""
        (self.folder / "report").touch()
        self.end(code, cause=True)

    def done(self, trace: str | None, flight_recorder: str | None) -> None:
        """The script ended well. Whoever watches stays until the last has ended, too."""
        records = self.folder / f"records.{self.rank}"
        records.write_bytes(pickle.dumps(self.recorder.records))
        self.board.set_state(self.rank, RETURNED)
        if self.leads:
            everybody = self.rank == 0 and self.store is not None
            awaited = range(self.world_size) if everybody else self.here
            while any(self.board.state(rank) != RETURNED for rank in awaited):
                time.sleep(0.05)
            if self.store is not None and not self.alone:
                self._exchange_pages()
        self._over.set()
        if self.rank == 0 and (trace or flight_recorder):
            self._save(trace, flight_recorder)
        if self.leads:
            shutil.rmtree(self.folder, ignore_errors=True)

    def _save(self, trace: str | None, flight_recorder: str | None) -> None:
        """What the ranks of this machine said."""
        wire = [[] for _ in range(self.world_size)]
        for rank in self.here:
            wire[rank] = pickle.loads((self.folder / f"records.{rank}").read_bytes())
        run = Run([None] * len(wire), [""] * len(wire), wire, 0.0, "")
        if trace:
            run.trace(trace)
        if flight_recorder:
            run.flight_recorder(flight_recorder)
