"""Compare a run that was killed and started again with the uninterrupted one, update by update."""

import json
from collections import Counter
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

LINES = 12  # of a script that failed


class CannotTell(Exception):
    """A reason why there is nothing to compare."""


@dataclass
class Attempt:
    """A start of the script, until its end or a kill.

    ranks: each rank's updates. saves: of all ranks. start: the updates that were made before it.
    """

    ranks: list[list[dict]]
    saves: list[dict]
    code: int = 0
    output: str = ""
    start: int = 0

    @property
    def updates(self) -> int:
        return min(map(len, self.ranks), default=0)

    def at(self, update: int) -> list[dict]:
        """Return each rank's record of an update, counted from the start of the training."""
        return [records[update - self.start] for records in self.ranks]

    def made(self) -> range:
        return range(self.start, self.start + self.updates)


@dataclass
class Verdict:
    """What became of one kill. lost: sentences, each a cause; none: exact."""

    kill: str
    lost: list[str] = field(default_factory=list)
    says: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        head = "goes on exactly" if not self.lost else "does not go on exactly"
        lines = [f"killed {self.kill}: {head}"]
        lines += [f"  lost: {sentence}" for sentence in self.lost]
        lines += [f"  {sentence}" for sentence in self.says]
        return "\n".join(lines)


def read_attempt(folder: Path, code: int = 0, output: str = "") -> Attempt:
    ranks, saves = [], []
    for path in sorted(folder.glob("*.jsonl"), key=lambda path: int(path.stem)):
        lines = path.read_text().splitlines()
        events = [json.loads(line) for line in lines]
        ranks.append([event for event in events if "before" in event])
        saves += [event | {"rank": int(path.stem)} for event in events if "save" in event]
    return Attempt(ranks, saves, code, output)


def judge(kill: str, whole: Attempt, attempts: list[Attempt]) -> Verdict:
    """Compare the `attempts` of one killed training with the `whole` one.

    CannotTell: the two differ before the kill.
    """
    verdict = Verdict(kill)
    check_alike(whole, attempts[0])
    if attempts[0].code == 0:
        raise CannotTell(f"it ended before it was killed {kill}: is it as long in each run?")
    for killed, resumed in pairwise(attempts):
        if resumed.code and not resumed.updates:
            verdict.lost.append(why_it_does_not_start(killed, resumed))
            return verdict
        if any("before" in record for records in resumed.ranks for record in records):
            resumed.start = find_start(whole, attempts, resumed, verdict)
        else:  # it found that all is done
            resumed.start = whole.updates
        look_at_saves(killed, resumed, verdict)
        look_at_first_update(whole, resumed, verdict)
    compare_rest(whole, attempts, verdict)
    keep_ledger(whole, attempts, verdict)
    return verdict


def check_alike(whole: Attempt, first: Attempt) -> None:
    for update in range(min(whole.updates, first.updates)):
        for one, other in zip(whole.at(update), first.at(update), strict=False):
            unlike = [key for key in ("samples", "losses", "before") if one[key] != other[key]]
            if unlike:
                what = "parameters" if unlike[0] == "before" else unlike[0]
                raise CannotTell(
                    f"two runs differ before any kill, in the {what} of update {update + 1}: seed"
                    " everything, and ask for deterministic algorithms"
                )


def why_it_does_not_start(killed: Attempt, resumed: Attempt) -> str:
    tail = "\n    ".join(resumed.output.splitlines()[-LINES:])
    said = f"everything: started again, it ends with exit code {resumed.code}"
    torn = [save["save"] for save in killed.saves if not save["whole"]]
    if torn:
        said += (
            f". It reads {Path(torn[0]).name}, which the kill cut short: a save must be written "
            "beside the one before and renamed when it is whole, and `latest` move only then"
        )
    return f"{said}\n    {tail}"


def find_start(whole: Attempt, attempts: list[Attempt], resumed: Attempt, verdict: Verdict) -> int:
    """Find the update whose parameters the resumed run begins with."""
    begins = resumed.ranks[0][0]["before"]
    states = {}
    for attempt in (whole, *attempts[: attempts.index(resumed)]):
        for number, record in enumerate(attempt.ranks[0]):
            states[attempt.start + number] = record["before"]
            states[attempt.start + number + 1] = record["after"]
    # Where updates leave the parameters as they are, the number of those that follow decides.
    likely = whole.updates - resumed.updates
    nearest = sorted(states, key=lambda update: abs(update - likely))
    for update in nearest:
        if states[update] == begins:
            return update
    for update in nearest:
        if sorted(states[update].values()) == sorted(begins.values()):
            verdict.lost.append(misplaced(states[update], begins))
            return update
    wrong = [name for name in begins if all(s.get(name) != begins[name] for s in states.values())]
    names = ", ".join(wrong[:3]) or "all of them"
    verdict.lost.append(f"parameters: those it begins with are of no update ({names})")
    return max(0, whole.updates - resumed.updates)


def misplaced(saved: dict[str, str], begins: dict[str, str]) -> str:
    """Say which parameters came back in each other's places."""
    moved = [name for name in begins if begins[name] != saved.get(name)]
    source = next(name for name in saved if saved[name] == begins[moved[0]])
    said = (
        f"parameters' places: {moved[0]} has what {source} had, {len(moved)} are in others' places"
    )
    return f"{said}; are numbers sorted as strings, 10 before 2?"


def look_at_saves(killed: Attempt, resumed: Attempt, verdict: Verdict) -> None:
    """Compare where it went on with the last save that was whole."""
    torn = [save for save in killed.saves if not save["whole"]]
    doomed = {save["updates"] for save in torn}
    saved = [s["updates"] for s in killed.saves if s["whole"] and s["updates"] not in doomed]
    newest = killed.start + max(saved, default=0)
    done = killed.start + max(map(len, killed.ranks))
    verdict.says.append(
        f"it had made {done} updates, the last whole save was after {newest}; it went on after "
        f"{resumed.start}"
    )
    if resumed.start >= newest:
        return
    if resumed.start == 0 and torn:
        verdict.lost.append(
            f"all progress: {Path(torn[0]['save']).name}, which the kill cut short, was already "
            "the one to go on from; `latest` must move only once a save is whole"
        )
    elif resumed.start == 0:
        verdict.lost.append(
            f"all progress: a save after {newest} updates was there and is not used"
        )
    elif str(newest) < str(resumed.start):
        verdict.lost.append(
            f"{newest - resumed.start} saved updates: it takes the save after {resumed.start} for "
            f"the newest, not that after {newest}: numbers are sorted as strings"
        )


def look_at_first_update(whole: Attempt, resumed: Attempt, verdict: Verdict) -> None:
    """Find what is missing when the first update after a resume begins."""
    at = resumed.start
    if not resumed.updates or at >= whole.updates or verdict.lost:
        return
    for rank, (due, got) in enumerate(zip(whole.at(at), resumed.at(at), strict=False)):
        found = missing(due, got, whole, rank, at)
        if found:
            verdict.lost += found
            return


def missing(due: dict, got: dict, whole: Attempt, rank: int, at: int) -> list[str]:
    """List what an update lacks, as sentences. due, got: a rank's record of it."""
    found = []
    if got["moments"] != due["moments"]:
        which = "others than it had" if got["moments"] else "it goes on without any"
        found.append(f"the optimizer's moments: {which}")
    if got["counters"] != due["counters"] and got["moments"] == due["moments"]:
        was, now = (" and ".join(f"{c:g}" for c in r["counters"]) or "none" for r in (due, got))
        found.append(f"the step counter: {now} where it was {was}, so the bias correction is wrong")
    if got["rates"] != due["rates"]:
        found.append(schedule(due, got, at))
    same_samples = got["samples"] == due["samples"]
    again = [n for n, r in enumerate(whole.ranks[rank]) if r["samples"] == got["samples"]]
    if not same_samples and again:
        found.append(place_in_data(again[0], at))
    other = [name for name in due["random"] if got["random"].get(name) != due["random"][name]]
    draws = got["losses"] != due["losses"] and got["before"] == due["before"]
    if other and ((same_samples and draws) or (not same_samples and not again)):
        what = "dropout draws other numbers" if same_samples else "samples come in another order"
        found.append(f"the random state ({', '.join(other)}): {what}")
    elif not same_samples and not again:
        found.append(f"the place in the data: update {at + 1} gets samples of no update")
    if same_samples and not draws and got["buffers"] != due["buffers"]:
        found.append("buffers, such as a norm's running averages")
    return found


def schedule(due: dict, got: dict, at: int) -> str:
    pairs = zip(due["rates"], got["rates"], strict=False)
    was, now = next((one, other) for one, other in pairs if one != other)
    return f"the schedule: a learning rate of {now:g} in update {at + 1} where it was {was:g}"


def place_in_data(source: int, at: int) -> str:
    if source < at:
        how = f"gets the samples of update {source + 1} again; is it the epoch's beginning?"
    else:
        how = f"gets those of update {source + 1}: what lies between is skipped"
    return f"the place in the data: update {at + 1} {how}"


def compare_rest(whole: Attempt, attempts: list[Attempt], verdict: Verdict) -> None:
    """Say where losses, rates or parameters differ first, and whether all updates were made."""
    for resumed in attempts[1:]:
        for update in resumed.made():
            if update >= whole.updates:
                break
            pairs = list(zip(whole.at(update), resumed.at(update), strict=False))
            unlike = next((p for p in pairs if any(p[0][k] != p[1][k] for k in KEYS)), None)
            if unlike:
                verdict.says.append(first_difference(*unlike, update))
                due, got = unlike
                if not verdict.lost and due["rates"] != got["rates"]:
                    verdict.lost.append(schedule(due, got, update))
                if not verdict.lost:
                    verdict.lost.append("something that is none of moments, schedule, samples")
                return
    last = attempts[-1]
    if last.code:
        verdict.lost.append(f"its end: exit code {last.code} after {last.updates} updates")
    made = last.start + last.updates
    if made != whole.updates:
        verdict.lost.append(f"the count: {made} updates in all, {whole.updates} uninterrupted")
    elif not verdict.lost:
        verdict.says.append(f"losses and parameters of all {made} updates are equal to the bit")


KEYS = "losses", "rates", "after"


def first_difference(due: dict, got: dict, update: int) -> str:
    said = f"first difference: update {update + 1}, "
    for one, other in zip(due["losses"], got["losses"], strict=False):
        if one != other:
            by = abs(other / one - 1) if one else float("inf")
            return f"{said}loss {other:.6g} where it was {one:.6g} ({by:.2g} of it)"
    wrong = [name for name in due["after"] if got["after"].get(name) != due["after"][name]]
    if wrong:
        return f"{said}parameters after it ({', '.join(wrong[:3])}{', ...' * (len(wrong) > 3)})"
    return f"{said}learning rate or number of micro-batches"


def keep_ledger(whole: Attempt, attempts: list[Attempt], verdict: Verdict) -> None:
    """Count the samples of all ranks; an update that is made again replays its samples."""
    counted = {}
    replayed = 0
    for attempt in attempts:
        replayed += sum(update in counted for update in attempt.made())
        for update in attempt.made():
            counted[update] = [name for record in attempt.at(update) for name in record["samples"]]
    due = Counter(n for u in whole.made() for record in whole.at(u) for n in record["samples"])
    got = Counter(name for names in counted.values() for name in names)
    skipped, again = (due - got).total(), (got - due).total()
    replays = f"{replayed} updates were replayed"
    if not due:
        verdict.says.append(f"ledger: no sample was seen, the model takes no tensors; {replays}")
    elif skipped or again:
        wrong = f"{skipped} uses of samples are missing and {again} are one too many"
        verdict.says.append(f"ledger: of {due.total()}, {wrong}; {replays}")
        if not verdict.lost:
            verdict.lost.append("samples: see the ledger")
    else:
        verdict.says.append(f"ledger: {due.total()} uses of samples, each as it should; {replays}")
