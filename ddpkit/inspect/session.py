"""Put a rank that torchrun started on the wire: with a board, a recorder and a watcher.

The wire is the process group that records every collective call and message. The board is a file
that all ranks of a machine map into memory: each rank writes its state and its calls to its own
page there. The watcher is a thread of each rank; rank 0's looks for ranks that can never go on.
`ddpkit.debug` sets all this up for any script, and `launch` does where torchrun started the ranks.
"""

import contextlib
import inspect
import os
import pickle
import shutil
import signal
import struct
import sys
import tempfile
import threading
import time
import zlib
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.device_mesh
from torch.distributed import distributed_c10d as c10d

from ..runtime import exits
from ..runtime.board import DISAGREES, RETURNED, RUNNING, Board, Record
from ..runtime.falls import (
    explain_rendezvous,
    failure,
    how_it_fell,
    lines_of,
    lost_peer,
    what_became_of,
)
from ..runtime.link import Link
from ..runtime.look import INSIDE, Look
from ..runtime.machine import FreeMemory
from ..runtime.place import describe_place, place_in
from ..runtime.processes import cpu_ticks, locked, sweep
from ..runtime.recorder import TIMED_OUT, Recorder
from ..runtime.report import (
    ends_by_itself,
    explain_deadlock,
    explain_mismatch,
    explain_silence,
    explain_standstill,
    explain_timeout,
    report,
    waited_s,
)
from ..runtime.run import Run, clock_s
from ..runtime.watch import CERTAIN_S
from ..runtime.wire import of_this_attempt, register_wire
from ..tools.units import wrap

OLD_FOLDERS = "ddpkit-session-*", "torchelastic_*/*/attempt_*/ddpkit"
LOOK_S = 0.25  # seconds between two reads of the board
SLEEPS_S = 1.0  # without CPU time, after which a rank counts as asleep
NEWS_S = 3.0  # for which a rank whose connection broke waits for the report of the cause
STANDSTILL_S = 30.0  # without a call, after which one message says who waits for whom
EXITS_S = 0.05  # to wait for the thread that catches a dead rank's exit code
TOGETHER_S = 0.3  # within which waits that time out share one message
WORDS_S = 10.0  # between two messages: what follows a timeout is mostly its consequence
WATCHER_ENDS_S = 5.0  # to wait for the watcher, which may wait for rank 0's dead machine
_ABOUT_PAGE = struct.Struct("<?d")  # sent with a page: whether its rank sleeps, its clock_s


class Session:
    """One rank of a script on the wire: its board, its recorder and its watching thread.

    Call `install` before the script runs, and then one of `done`, `failed` and `exited`, by how the
    script ended. The last two end the process. So does the watching thread, in every rank, after
    the report of a hang. Rank, world size and so on come from torchrun's environment variables.

    link: the network to emulate, or None.
    trace, flight_recorder: the file and the folder to which rank 0 writes the calls of all ranks at
        the end or, after a report, the last 256 of each; None to write nothing.
    """

    def __init__(
        self, link: Link | None, trace: str | None = None, flight_recorder: str | None = None
    ):
        self.rank, self.world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        local, here = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
        self.leads = local == 0  # whether this rank watches those of its machine
        self.here = range(self.rank - local, self.rank - local + here)
        self.alone = here == self.world_size
        # torchrun creates a new folder each time it starts the ranks of a machine.
        theirs = os.environ.get("TORCHELASTIC_ERROR_FILE")
        own = Path(tempfile.gettempdir(), f"ddpkit-session-{os.getppid()}")
        self.folder = Path(theirs).parent.parent / "ddpkit" if theirs else own
        for crashed in OLD_FOLDERS:
            sweep(crashed)
        self.board = self._open_board()
        self._lock = contextlib.ExitStack()  # keeps others from sweeping the folder of a live rank
        self._lock.enter_context(locked(self.folder, shared=True))
        (self.folder / f"pid.{self.rank}").write_text(str(os.getpid()))
        told = {"disagree": self._disagree, "timed_out": self._timed_out}
        self.recorder = Recorder(self.rank, self.board, link, **told)
        self.store: dist.Store | None = None
        self._trace = trace
        self._flight_recorder = flight_recorder
        self._told = threading.Lock()
        self._over = threading.Event()
        self._watcher = threading.Thread(target=self._watch, daemon=True, name="ddpkit watch")
        self._burned: dict[int, tuple[int | None, float]] = {}  # {rank: (CPU ticks, since when)}
        self._sleepers: set[int] = set()
        self._codes: dict[int, int] = {}  # exit codes of this machine's ranks, where caught
        self._memory = FreeMemory()
        self._clocks: dict[int, float] = {}  # clock_s of ranks on other machines
        self._silent: set[int] = set()  # ranks of other machines of which nothing is heard
        self._looked_at: list[int] | None = None  # the board's events at the last look
        self._different: dict[int, Record] | None = None  # the mismatch that it found
        self._words_at: set[tuple | None] = set()  # the lines of which `_say` has printed

    def _open_board(self) -> Board:
        """Return this machine's board: its first rank creates it, others wait until it is there."""
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
        """Replace `dist.init_process_group` by one that makes the script's world over the wire.

        It uses NCCL or, if that isn't asked for, Gloo. Modules that have imported the function by
        its own name get the new one as well. This also installs what notices SIGTERM, `os._exit`
        and the ends of this machine's ranks. The script's first world starts the watching thread.
        """
        original = c10d.init_process_group
        exits.note_exits(self.folder, self.rank)
        exits.answer_sigterm(self._terminated)
        peers = (rank for rank in self.here if rank != self.rank)
        exits.watch_exits(peers, self._pid, self._codes.__setitem__)

        def init_process_group(*args, **kwargs):
            given = inspect.signature(original).bind(*args, **kwargs).arguments
            # With a device_id, torch would connect each group twice.
            backend, device_id = given.pop("backend", None), given.pop("device_id", None)
            wanted = str(backend or ("nccl" if torch.cuda.is_available() else "gloo"))
            inner = "nccl" if "nccl" in wanted else "gloo"
            device = torch.device("cpu")
            if inner == "nccl":
                device = own_gpu(device_id)
                torch.cuda.set_device(device)
                by_default = c10d.default_pg_nccl_timeout  # torch would take Gloo's
                given["timeout"] = given.get("timeout") or by_default
            register_wire(self.recorder, inner, device, one_machine=False)
            self.recorder.joined = False  # a script may end its world and begin another
            original("ddpkit", **given)
            first = self.store is None
            self.store = of_this_attempt(c10d._get_default_store())
            self.board.set_state(self.rank, RUNNING)
            if first:
                self._watcher.start()

        init_process_group.session = self
        for module in list(sys.modules.values()):  # DeviceMesh's module has imported it by name
            if getattr(module, "init_process_group", None) is original:
                module.init_process_group = init_process_group

    # Watching

    def _watch(self) -> None:
        """Loop in the watching thread, every `LOOK_S`, until the session ends.

        A machine's first rank ends it before, if the exchange of pages finds the store gone.
        Each time, end this rank if a report is out; otherwise note on the board the line at which
        its main thread is. A machine's first rank also exchanges pages of the board with other
        machines; rank 0 looks for hangs if ranks disagree, or nothing moves for `CERTAIN_S`.
        """
        main_thread = threading.main_thread().ident
        quiet_since = time.perf_counter()
        events = None
        with contextlib.suppress(RuntimeError):  # the store went down with rank 0's machine
            while not self._over.wait(LOOK_S):
                if self._report_is_out():
                    self.end()
                self.board.set_place(self.rank, place_in(sys._current_frames()[main_thread]))
                self.recorder.count_callers(look=True)
                self.recorder.release()
                self._memory.look()
                if not self.leads:
                    continue
                self._note_sleepers()
                if not self.alone:
                    self._exchange_pages()
                before, events = events, self.board.events()
                now = time.perf_counter()
                quiet_since = quiet_since if events == before else now
                states = map(self.board.state, range(self.world_size))
                if self.rank == 0 and (DISAGREES in states or now - quiet_since > CERTAIN_S):
                    self._look(events, now - quiet_since)

    def _look(self, events: list[int], quiet_s: float = 0.0) -> None:
        """Look once, on rank 0, for ranks that can never go on, and report them.

        Two reports end all ranks. One is of a mismatch: ranks made different calls where all must
        make the same. It comes at the second look, by when other machines have sent their pages.
        The other is of a deadlock, unless a timeout of the script's own will soon end that.
        Other messages are only printed, since the ranks may still go on: on such a deadlock, on
        ranks that poll in vain, `SLEEPS_S` after the last call, and, after `STANDSTILL_S`, on which
        ranks wait for which.

        events: for each rank, the board's count of its writes.
        quiet_s: seconds since these counts last changed.
        """
        before = self._different
        look = Look(self.board, events)
        if events != self._looked_at:
            self._looked_at = events
            self._different = look.mismatch()
        look.show_abandoned(self._sleepers.__contains__)
        stuck = look.deadlocked()
        if self._different and before:
            self.tell(report(*explain_mismatch(self._different), look))
        elif stuck and not self._different and look.is_still():
            said = explain_deadlock(look, stuck)
            if ends_by_itself(look, stuck):
                self._say(*said, look)
            else:
                self.tell(report(*said, look))
        elif quiet_s > SLEEPS_S and (stuck := look.polled_in_vain()) and look.is_still():
            self._say(*explain_deadlock(look, stuck), look)
        elif quiet_s > STANDSTILL_S:
            look = Look(self.board, standstill=True)
            if stuck := look.deadlocked():
                self._say(*explain_deadlock(look, stuck), look)
            elif any(s.state == "waiting" for s in look.now):
                self._say(*explain_standstill(look, quiet_s), look)

    def _timed_out(self, record: Record, error: BaseException) -> None:
        """Print why a wait timed out, before the script gets the error: it may catch it and go on.

        This takes `TOGETHER_S`, and up to `NEWS_S` more if there are other machines.

        record: the call in which the rank waited. error: what torch raised.
        """
        seconds = waited_s(record, error)
        time.sleep(TOGETHER_S)  # this rank stays marked as waiting: others time out just now
        self._note_silence()
        self._say_why(Look(self.board), seconds)

    def _say_why(self, look: Look, seconds: float) -> None:
        """Print which ranks of other machines are silent, or otherwise why a wait timed out.

        look: the state of all ranks. seconds: how long the wait lasted.
        """
        if self._silent:
            self._say(*explain_silence(sorted(self._silent), seconds), look)
        else:
            self._say(*explain_timeout(look, seconds), look)

    def _note_silence(self) -> None:
        """Note in `_silent` the ranks of other machines that send no new page within `NEWS_S`.

        The pages that do come are put on the board. They come by `store`, the key-value store of
        torch.distributed. If the connection to that is cut, a question to it blocks for minutes:
        then `store` becomes None, so that none is asked any more.
        """
        others = set(range(self.world_size)).difference(self.here)
        silent = self._silent = set(others)

        def listen() -> None:
            before = {}
            until = time.perf_counter() + NEWS_S
            with contextlib.suppress(RuntimeError, AttributeError):
                while silent and time.perf_counter() < until:
                    self._take_pages(others)
                    before = before or dict(self._clocks)
                    silent.difference_update(
                        rank for rank in others if self._clocks.get(rank) != before.get(rank)
                    )
                    time.sleep(0.05)

        listener = threading.Thread(target=listen, daemon=True)
        listener.start()
        listener.join(NEWS_S + 1)
        if listener.is_alive():
            self.store = None

    def _say(self, headline: str, advice: str, look: Look) -> None:
        """Print a report, of `headline`, the state of all ranks and `advice`; let the ranks go on.

        Nothing is printed if this rank printed one before, with the first waiting rank at the same
        line; if a message was printed less than `WORDS_S` ago on this machine; or if a report that
        ends the ranks is out.
        """
        line = next((s.place for s in look.now if s.state in INSIDE), None)
        word = self.folder / "word"
        if line in self._words_at or self._report_is_out():
            return
        with contextlib.suppress(OSError):
            if time.time() - word.stat().st_mtime > WORDS_S:
                word.unlink()
        try:
            word.touch(exist_ok=False)
        except OSError:  # another rank has just said it
            return
        self._words_at.add(line)
        stuck = bool(look.deadlocked() or look.polled_in_vain())
        text = report(headline, advice, look, stuck)
        print(f"\nddpkit: {wrap(text)}\n", file=sys.stderr, flush=True)

    def _terminated(self) -> None:
        """Report after SIGTERM where all ranks were, or how some here had died; end by SIGTERM."""
        time.sleep(LOOK_S)  # until every rank has noted its line
        if self._report_is_out():
            self.end(-signal.SIGTERM)
        look = Look(self.board)
        lost = [rank for rank in self.here if self._dead(rank)]
        if lost:
            lines = [*map(self._how_died, lost), *self._others(look, lost)]
            text = "\n".join(lines)
        else:
            said = f"ended by SIGTERM, sent to rank {self.rank}: a time limit, or somebody's wish."
            text = report(said, "Above is where every rank was.", look, stuck=False)
        self.tell(text, -signal.SIGTERM)

    def _note_sleepers(self) -> None:
        """Note in `_sleepers` which ranks of this machine have slept for `SLEEPS_S`.

        A rank sleeps while its main thread uses no CPU, as /proc shows; without /proc none sleeps.
        Other threads don't count: the watching thread itself uses some.
        """
        now = time.perf_counter()
        for rank in self.here:
            ticks = cpu_ticks(self._pid(rank), of_main_thread=True)
            before, since = self._burned.get(rank, (None, now))
            self._burned[rank] = (ticks, since if ticks == before else now)
            sleeps = ticks is not None and now - self._burned[rank][1] > SLEEPS_S
            (self._sleepers.add if sleeps else self._sleepers.discard)(rank)

    def _pid(self, rank: int) -> int:
        """Return the process id of a rank of this machine; 0 if it hasn't come yet, or has left."""
        try:
            return int((self.folder / f"pid.{rank}").read_text() or 0)
        except OSError:  # it hasn't come, or the folder is gone
            return 0

    def _dead(self, rank: int) -> bool:
        """Return whether a rank of this machine ended before its script did, as /proc shows.

        An exit code that is found is kept in `_codes`. Return False wherever the system isn't
        Linux.
        """
        pid = self._pid(rank)
        if sys.platform != "linux" or not pid or self.board.state(rank) == RETURNED:
            return False
        try:
            code = exits.exit_code(pid)
        except OSError:
            return True
        if code is not None:
            self._codes[rank] = code
        return code is not None

    def _exchange_pages(self) -> None:
        """Send this machine's pages of the board to the store; on rank 0, take the others' from it.

        So rank 0 sees all ranks, those of other machines a little late.
        """
        if self.store is None:  # it was let go: the wire to it is cut
            return
        for rank in range(self.world_size):
            key = f"ddpkit/page/{rank}"
            if rank in self.here:
                about = _ABOUT_PAGE.pack(rank in self._sleepers, clock_s())
                self.store.set(key, about + zlib.compress(self.board.page(rank), 1))
        if self.rank == 0:
            self._take_pages(set(range(self.world_size)).difference(self.here))

    def _take_pages(self, ranks: set[int]) -> None:
        """Copy the pages of `ranks`, of other machines, from the store onto this machine's board.

        With a page comes whether its rank sleeps, for `_sleepers`, and the offset of its clock, for
        `_clocks`. Ranks that have sent no page are skipped.
        """
        for rank in ranks:
            key = f"ddpkit/page/{rank}"
            if self.store.check([key]):
                message = self.store.get(key)
                sleeps, self._clocks[rank] = _ABOUT_PAGE.unpack_from(message)
                self.board.set_page(rank, zlib.decompress(message[_ABOUT_PAGE.size :]))
                (self._sleepers.add if sleeps else self._sleepers.discard)(rank)

    def _disagree(self, _by_rank) -> None:
        """Block this thread after a mismatch of calls, until rank 0's report ends the process."""
        threading.Event().wait()

    # The report

    def _report_is_out(self) -> bool:
        """Return whether a report that ends all ranks is out, here or, by the store, elsewhere."""
        if (self.folder / "report").exists() or not self.folder.exists():
            return True
        store = self.store
        try:
            return not self.alone and store is not None and store.check(["ddpkit/report"])
        except RuntimeError:  # it went down with its machine, and isn't asked any more
            self.store = None
            return False

    def tell(self, text: str, code: int = 1) -> None:
        """Print the report, unless another rank has printed one, and end this rank's process.

        text: the report, as lines; they are wrapped.
        code: the exit status of this rank; it is 1 if another rank was first.
        """
        with self._told:
            try:
                (self.folder / "report").touch(exist_ok=False)
            except OSError:
                self.end()  # another rank was first
            print(f"\nddpkit: {wrap(text)}", file=sys.stderr, flush=True)
            if not self.alone and self.store is not None:
                with contextlib.suppress(RuntimeError):  # it went down with its machine
                    self.store.set("ddpkit/report", "out")
            self.end(code, cause=True)

    def end(self, code: int = 1, cause: bool = False) -> None:
        """End this rank's process, once the others have had time to see that a report is out.

        Before that, rank 0 writes the trace and the dumps that were asked for, and a machine's
        first rank removes the folder of the session. This never returns.

        code: the exit status; -SIGTERM ends the process by that signal.
        cause: whether this rank caused the end. If it did, it exits first, since torchrun reports
            the first exit.
        """
        self._over.set()
        sys.stdout.flush()
        if self.rank == 0:
            self._save(list(map(self.board.records, range(self.world_size))))
        if self.leads:
            time.sleep(2 * LOOK_S)  # until all have seen that the report is out
            shutil.rmtree(self.folder, ignore_errors=True)
        until = time.perf_counter() + NEWS_S
        while self.folder.exists() and time.perf_counter() < until:
            time.sleep(0.05)
        if not cause:
            time.sleep(2 * LOOK_S)
        if code == -signal.SIGTERM:
            exits.end_by_sigterm()
        exits.exit_at_once(code)

    def failed(self, error: BaseException) -> None:
        """Report that the script raised `error`, where, and where the others were; end with code 1.

        If the error is a connection that broke, the report says how ranks of this machine died, if
        any did. If it is a timeout, a message says first why the wait ended, and where the others
        were; the report then leaves them out.
        """
        how = failure(error)
        lost = self._lost_ranks() if lost_peer(how) else []
        if lost_peer(how):
            lines = [*map(self._how_died, lost)] or ["a connection broke, nobody here knows why."]
            lines.append(f"Rank {self.rank} lost it in")
        else:
            lines = [how_it_fell(self.rank, how)]
        lines += lines_of(how.frames)
        if meeting := explain_rendezvous(how.message):
            lines.append(meeting)
        look = Look(self.board)
        if TIMED_OUT.search(how.message):
            for hidden in reversed([*look.unseen()]):  # of several waits in C++, show the first
                look.now[hidden.rank] = hidden
            seconds = waited_s(look.now[self.rank].call, error)
            if not self._silent:
                self._note_silence()
            self._say_why(look, seconds)
        else:
            lines += self._others(look, [self.rank, *lost])
        self.tell("\n".join(lines))

    def _lost_ranks(self) -> list[int]:
        """Wait up to `NEWS_S` for ranks of this machine to be found dead, and return these.

        Return [] if none is. End this rank if a report comes out meanwhile.
        """
        until = time.perf_counter() + NEWS_S
        while time.perf_counter() < until:
            if self._report_is_out():
                self.end()
            lost = [rank for rank in self.here if self._dead(rank)]
            if lost:
                return lost
            time.sleep(0.02)
        return []

    def _how_died(self, rank: int) -> str:
        """Return lines, as one text: how a rank of this machine died, and where it last was."""
        noted = exits.noted_exit(self.folder, rank)
        if noted is not None:
            code, place = noted
            return f"rank {rank} called os._exit({code})\n  {describe_place(place)}"
        time.sleep(EXITS_S)
        code = self._codes.get(rank)
        if code:
            said = how_it_fell(rank, code, self._memory.shortage())
        else:
            said = f"rank {rank} died without a word; torchrun says how."
        if code == -signal.SIGKILL and not self._memory.shortage():
            said += f"\n  Memory wasn't short{self._memory.in_words()}."
        for call in self.board.records(rank)[-1:]:
            where = "in" if call.done is None else "after"
            said += f"\n  {where} {call.call}, {describe_place(call.place)}"
        return said

    def _others(self, look: Look, fallen: list[int]) -> list[str]:
        """Return lines that say where the ranks were that aren't in `fallen`; [] if all are.

        torchrun will end them because those in `fallen` raised an error, exited or died.
        """
        rest = [rank for rank in look.ranks if rank not in fallen]
        said = [what_became_of(rank, look) for rank in rest]
        return ["The others were ended:", *said] if said else []

    def exited(self, error: SystemExit) -> None:
        """Report that the script called sys.exit with a nonzero code; then end with that code.

        The process ends with 1 if the code is no integer, or if another rank has reported.
        """
        code = error.code if isinstance(error.code, int) else 1
        lines = [f"rank {self.rank} called sys.exit({error.code!r})"]
        lines += lines_of(failure(error).frames)
        self.tell("\n".join(lines + self._others(Look(self.board), [self.rank])), code)

    def done(self) -> None:
        """Wait until all ranks' scripts have ended, as this one has; write trace and dumps; leave.

        Closing a connection earlier would fail ranks that still wait for this one, and hide the
        cause. A rank that has made no world, or has lost the store, doesn't wait.
        """
        self.recorder.settle()
        if self._trace or self._flight_recorder:
            self._hand_in()
        self.board.set_state(self.rank, RETURNED)
        while self.store is not None and not self._all_have_ended():
            time.sleep(0.05 if self.alone else LOOK_S)
        self._over.set()
        if self.rank == 0 and (self._trace or self._flight_recorder):
            self._save(self._collect())
        self.leave()

    def leave(self) -> None:
        """End this rank's threads before Python shuts down; the last to leave removes the folder.

        This is necessary because Python unwinds the stack of a thread that returns from C++ during
        shutdown, and a C++ destructor on that stack would abort the process.
        """
        self._over.set()
        if self._watcher.is_alive() and self._watcher is not threading.current_thread():
            self._watcher.join(WATCHER_ENDS_S)
        if self.recorder.streams:
            self.recorder.streams.stop(WATCHER_ENDS_S)
        with contextlib.suppress(FileNotFoundError):  # removed after a report
            (self.folder / f"pid.{self.rank}").write_text("")
        if all(map(self._has_left, self.here)):
            shutil.rmtree(self.folder, ignore_errors=True)

    def _has_left(self, rank: int) -> bool:
        """Return whether a rank of this machine came, and left or died: it needs no board then."""
        came = (self.folder / f"pid.{rank}").exists()
        return came and (not self._pid(rank) or self._dead(rank))

    def _all_have_ended(self) -> bool:
        """Return whether the scripts of all ranks have ended.

        Ranks of this machine that have died are marked as RETURNED on the board. On several
        machines only rank 0 sees all: it writes the end to the store, where the others read it.
        """
        for rank in self.here:
            if self._dead(rank):  # by os._exit(0): with another code, torchrun ends all ranks
                self.board.set_state(rank, RETURNED)
        if self.alone or self.rank == 0:
            ended = all(self.board.state(rank) == RETURNED for rank in range(self.world_size))
            if ended and not self.alone:
                self.store.set("ddpkit/ended", "all")
            return ended
        try:
            return self.store.check(["ddpkit/ended"])
        except (RuntimeError, AttributeError):  # rank 0 had the store, and has ended; or let go
            return True

    # The trace and the dumps

    def _hand_in(self) -> None:
        """Send rank 0 the clock and records of this rank: by a file or, elsewhere, by the store."""
        mine = pickle.dumps((clock_s(), self.recorder.records))
        if 0 in self.here:
            (self.folder / f"records.{self.rank}").write_bytes(mine)
        elif self.store is not None:
            self.store.set(f"ddpkit/records/{self.rank}", zlib.compress(mine))

    def _collect(self) -> list[list[Record]]:
        """Return for each rank the list of its records, which the ranks have sent to this one.

        The offsets of the ranks' clocks, which come with them, are noted in `_clocks`. Of a rank
        that has sent none, the list has the calls that the board knows, at most the last 256.
        """
        wire = []
        for rank in range(self.world_size):
            said = self._handed_in(rank)
            if said is None:
                wire.append(self.board.records(rank))
                continue
            self._clocks[rank], records = pickle.loads(said)
            wire.append(records)
        return wire

    def _handed_in(self, rank: int) -> bytes | None:
        """Return what a rank has sent by `_hand_in`; None if nothing is there.

        Such a rank made no world, and may still run, or has ended by os._exit(0).
        """
        if rank in self.here:
            path = self.folder / f"records.{rank}"
            sent = self.board.state(rank) == RETURNED and path.exists()
            return path.read_bytes() if sent else None
        key = f"ddpkit/records/{rank}"
        sent = self.store is not None and self.store.check([key])
        return zlib.decompress(self.store.get(key)) if sent else None

    def _save(self, wire: list[list[Record]]) -> None:
        """Write the trace and the dumps, if they were asked for. wire: for each rank, its records.

        Times of ranks on other machines are changed, in place, to this machine's clock.
        """
        here = clock_s()
        for rank in set(self._clocks).difference(self.here):  # their clocks have another origin
            for record in wire[rank]:
                for name in ("issued", "started", "done", "waited"):
                    seconds = getattr(record, name)
                    if seconds is not None:
                        setattr(record, name, seconds + self._clocks[rank] - here)
        run = Run([None] * len(wire), [""] * len(wire), wire, 0.0, "", clock_s=here)
        if self._trace:
            run.trace(self._trace)
        if self._flight_recorder:
            run.flight_recorder(self._flight_recorder)


def own_gpu(device_id: torch.device | int | None) -> torch.device:
    """Return the GPU of this rank: the script's device_id, its current device, or by local rank.

    A current device of 0 doesn't count, since it may mean that none was set.

    device_id: as the script gave it to init_process_group; None, or a device without an index, if
        it named no GPU.
    """
    index = getattr(device_id, "index", device_id)
    if index is None and torch.cuda.is_initialized():
        index = torch.cuda.current_device() or None
    if index is None:  # Slurm may show each rank its own as 0
        index = int(os.environ["LOCAL_RANK"]) % max(1, torch.cuda.device_count())
    return torch.device("cuda", index)
