"""Compare a run that was killed and started again with the uninterrupted one, update by update."""

import json
import re
from collections import Counter
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

LINES = 12  # last lines of the output of a script that failed
ERROR = re.compile(r"(\[rank\d+\]: )?(?!.*ChildFailedError)[\w.]+(Error|Exception)\b")


class CannotTell(Exception):
    """A reason why there is nothing to compare, for the user; the command prints it."""


@dataclass
class Attempt:
    """A start of the script, until its end or a kill.

    ranks: for each rank, a list with one record for each of its updates, {"losses", "samples",
        "before", ...}, as `Witness` writes them.
    saves: the saves of all ranks: {"save": path, "updates": the rank's in this start before it,
        "number": among the rank's saves, "whole": False if the kill cut it short, "rank"}.
    code: its exit code; negative if a signal ended it.
    output: what it printed.
    start: the index of its first update in the training; 0 until `judge` has found it.
    """

    ranks: list[list[dict]]
    saves: list[dict]
    code: int = 0
    output: str = ""
    start: int = 0

    @property
    def updates(self) -> int:
        """Return the number of updates that every rank has made in this start."""
        return min(map(len, self.ranks), default=0)

    def at(self, update: int) -> list[dict]:
        """Return each rank's record of one update. update: its index in the training, from 0."""
        return [records[update - self.start] for records in self.ranks]

    def made(self) -> range:
        """Return the indices, in the whole training, of the updates that every rank has made."""
        return range(self.start, self.start + self.updates)


@dataclass
class Verdict:
    """The outcome of one kill, which prints as lines.

    kill: when it was, in words.
    lost: sentences, each a thing that was lost; none if the script goes on exactly.
    says: further sentences, which blame nothing.
    """

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
    """Return what the ranks of a start have written into `folder`, as an `Attempt`.

    There is one file for each rank, 0.jsonl, 1.jsonl, ...

    code, output: the start's exit code, and what it printed.
    """
    ranks, saves = [], []
    for path in sorted(folder.glob("*.jsonl"), key=lambda path: int(path.stem)):
        lines = path.read_text().splitlines()
        events = [json.loads(line) for line in lines]
        ranks.append([event for event in events if "before" in event])
        saves += [event | {"rank": int(path.stem)} for event in events if "save" in event]
    return Attempt(ranks, saves, code, output)


def judge(kill: str, whole: Attempt, attempts: list[Attempt]) -> Verdict:
    """Compare the `attempts` of one killed training with the `whole` one; return the verdict.

    kill: when it was killed, in words.
    whole: the uninterrupted run.
    attempts: the start that was killed, and those that followed it, whose `start` is set here.
    CannotTell: the two differ before the kill, or the first start ended well before it was killed.
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
        look_at_first_update(whole, attempts[0], resumed, verdict)
    compare_rest(whole, attempts, verdict)
    keep_ledger(whole, attempts, verdict)
    return verdict


def check_alike(whole: Attempt, first: Attempt) -> None:
    """Compare the updates that both runs made before the kill, by samples, losses and parameters.

    CannotTell: they differ, so that a difference after the kill would say nothing.
    """
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
    """Return a sentence on why the resumed run ended without an update, with what it raised.

    If the kill left a save unfinished, the sentence says that the run took it for whole, a guess.
    """
    said = f"everything: started again, it ends with exit code {resumed.code}"
    torn = [save["save"] for save in killed.saves if not save["whole"]]
    if torn:
        said += (
            f". It takes the save of {Path(torn[0]).name}, which the kill cut short, for whole: "
            "write a save beside the one before, rename it when it is whole, then move `latest`"
        )
    return f"{said}\n    {what_it_raised(resumed.output)}"


def what_it_raised(output: str) -> str:
    """Return the first line of an output that begins with an exception's name, or its last `LINES`.

    The summary of torchrun, ChildFailedError, doesn't count.
    """
    errors = [line for line in output.splitlines() if ERROR.match(line)]
    return errors[0] if errors else "\n    ".join(output.splitlines()[-LINES:])


def find_start(whole: Attempt, attempts: list[Attempt], resumed: Attempt, verdict: Verdict) -> int:
    """Return the index of the update before which rank 0 has the parameters that `resumed` has.

    Of several, it is the one that leaves as many updates as the resumed run makes, or is nearest to
    that. If no update has them, but one has the same values under other names, its index is
    returned, and if none has, a guess by the number of updates. Both are added to `verdict.lost`.

    whole: the uninterrupted run.
    attempts: all starts of the killed training; those before `resumed` are searched.
    """
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
    known = {pair for state in states.values() for pair in state.items()}
    wrong = [name for name in begins if (name, begins[name]) not in known]
    names = ", ".join(wrong[:3]) or "all of them"
    verdict.lost.append(f"parameters: those it begins with are of no update ({names})")
    return max(0, whole.updates - resumed.updates)


def misplaced(saved: dict[str, str], begins: dict[str, str]) -> str:
    """Return a sentence on which parameters came back in each other's places.

    saved, begins: {parameter: digest}, as they should be and as they are.
    """
    moved = [name for name in begins if begins[name] != saved.get(name)]
    source = next(name for name in saved if saved[name] == begins[moved[0]])
    said = (
        f"parameters' places: {moved[0]} has what {source} had, {len(moved)} are in others' places"
    )
    return f"{said}; are numbers sorted as strings, 10 before 2?"


def look_at_saves(killed: Attempt, resumed: Attempt, verdict: Verdict) -> None:
    """Say where the script went on after the kill, and add progress that was lost to the verdict.

    Lost is all progress, if it begins anew though there was a save, and saved updates if an older
    save was taken because numbers were sorted as strings; another older save is only mentioned. A
    save counts as whole only if no rank's save after the same update was cut short.

    killed, resumed: the start that was killed, and the one after it.
    """
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


def look_at_first_update(
    whole: Attempt, first: Attempt, resumed: Attempt, verdict: Verdict
) -> None:
    """Add to the verdict what is missing when the first update after a resume begins.

    Nothing is added if something was found lost before. The first rank that lacks something is the
    one that is reported.

    whole: the uninterrupted run.
    first: the first start. Random generators that begin it in another state than `whole` aren't
        seeded, and aren't compared.
    """
    at = resumed.start
    if not resumed.updates or at >= whole.updates or verdict.lost:
        return
    for rank, (due, got) in enumerate(zip(whole.at(at), resumed.at(at), strict=False)):
        once, twice = whole.ranks[rank][0]["random"], first.ranks[rank][0]["random"]
        seeded = [name for name in once if once[name] == twice.get(name)]
        found = missing(due, got, whole.ranks[rank], at, seeded)
        if found:
            verdict.lost += found
            return


def missing(due: dict, got: dict, updates: list[dict], at: int, seeded: list[str]) -> list[str]:
    """Return what an update lacks of a rank's state, as a list of sentences.

    Compared are the optimizer's state, learning rates, and samples; and, if samples and parameters
    agree, random generators (where losses differ) or buffers (where they don't).

    due, got: the rank's record of this update in the uninterrupted run, and in the resumed one.
    updates: that rank's records of all updates in the uninterrupted run.
    at: the index of the update.
    seeded: the names of the random generators that begin every run in the same state.
    """
    found = []
    if got["moments"] != due["moments"]:
        which = "others than it had" if got["moments"] else "it goes on without any"
        found.append(f"the optimizer's moments: {which}")
    elif got["counters"] != due["counters"]:
        was, now = counted(due), counted(got)
        found.append(f"the step counter: {now} where it was {was}, so the bias correction is wrong")
    if got["rates"] != due["rates"]:
        found.append(schedule(due, got, at))
    other = [name for name in seeded if got["random"].get(name) != due["random"][name]]
    if got["samples"] != due["samples"]:
        found.append(place_in_data(got, updates, at, other))
    elif got["before"] == due["before"]:
        if got["losses"] != due["losses"] and other:
            found.append(f"the random state ({', '.join(other)}): dropout draws other numbers")
        elif got["losses"] == due["losses"] and got["buffers"] != due["buffers"]:
            found.append("buffers, such as a norm's running averages")
    return found


def counted(record: dict) -> str:
    """Return the step counters in a record as text: '7', '3 and 7', or 'none'."""
    return " and ".join(f"{counter:g}" for counter in record["counters"]) or "none"


def schedule(due: dict, got: dict, at: int) -> str:
    """Return a sentence on the first learning rate that differs in the update with index `at`.

    If their numbers differ, so do those of the optimizer's parameter groups, and it is on these.
    """
    groups, had = len(got["rates"]), len(due["rates"])
    if groups != had:
        return f"the parameter groups: {groups} in update {at + 1} where there were {had}"
    pairs = zip(due["rates"], got["rates"], strict=True)
    was, now = next((one, other) for one, other in pairs if one != other)
    return f"the schedule: a learning rate of {now:g} in update {at + 1} where it was {was:g}"


def place_in_data(got: dict, updates: list[dict], at: int, other: list[str]) -> str:
    """Return a sentence on the wrong samples of an update: another update's, or none's.

    got: the rank's record of the update, in the resumed run.
    updates: that rank's records of all updates in the uninterrupted run.
    at: the index of the update.
    other: the names of random generators that aren't in the state in which they were.
    """
    source = next((n for n, r in enumerate(updates) if r["samples"] == got["samples"]), None)
    if source is None and other:
        return f"the random state ({', '.join(other)}): samples come in another order"
    if source is None:
        return f"the place in the data: update {at + 1} gets samples of no update"
    again = [name for name in other if got["random"].get(name) == updates[source]["random"][name]]
    if again:
        said = f"the random state ({', '.join(again)}): it is seeded as at the start, and update"
        return f"{said} {at + 1} draws what update {source + 1} drew"
    said = f"the place in the data: update {at + 1} gets the samples of update {source + 1}"
    if source < at:
        return f"{said} again; is it the epoch's beginning?"
    return f"{said}: what lies between is skipped"


def compare_rest(whole: Attempt, attempts: list[Attempt], verdict: Verdict) -> None:
    """Add to the verdict where losses, rates or parameters differ first after the kill.

    That counts as lost only if nothing was found lost before. A number of updates other than the
    uninterrupted run's, or an exit code other than 0, is lost in any case.
    """
    if unlike := first_unlike(whole, attempts[1:]):
        update, due, got = unlike
        verdict.says.append(first_difference(due, got, update))
        if not verdict.lost and due["rates"] != got["rates"]:
            verdict.lost.append(schedule(due, got, update))
        if not verdict.lost:
            verdict.lost.append("something that is none of moments, schedule, samples")
    last = attempts[-1]
    made = last.start + last.updates
    if last.code:
        verdict.lost.append(f"its end: exit code {last.code} after {last.updates} updates")
    if made != whole.updates:
        verdict.lost.append(f"the count: {made} updates in all, {whole.updates} uninterrupted")
    elif not unlike:
        verdict.says.append(f"losses and parameters of all {made} updates are equal to the bit")


def first_unlike(whole: Attempt, resumed: list[Attempt]) -> tuple[int, dict, dict] | None:
    """Return the first update of which a rank's record differs in `KEYS`, or None if none does.

    The update is (its index, the record in the uninterrupted run, the record in the resumed one).

    resumed: the starts after the first.
    """
    for attempt in resumed:
        for update in attempt.made():
            if update >= whole.updates:
                break
            for due, got in zip(whole.at(update), attempt.at(update), strict=False):
                if any(due[key] != got[key] for key in KEYS):
                    return update, due, got
    return None


KEYS = "losses", "rates", "after"


def first_difference(due: dict, got: dict, update: int) -> str:
    """Return a sentence on what differs in an update: its loss, parameters or the rest.

    due, got: a rank's record of it in the uninterrupted run, and in the resumed one.
    update: its index.
    """
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
    """Add to the verdict whether each sample is used as often as in the uninterrupted run.

    All ranks' uses are summed. Of an update that is made again only the last time counts. A
    difference counts as lost only if nothing was found lost before.
    """
    counted = {}
    replayed = 0
    for attempt in attempts:
        replayed += sum(update in counted for update in attempt.made())
        for update in attempt.made():
            counted[update] = [name for record in attempt.at(update) for name in record["samples"]]
    due = Counter(n for u in whole.made() for record in whole.at(u) for n in record["samples"])
    got = Counter(name for names in counted.values() for name in names)
    skipped, again = (due - got).total(), (got - due).total()
    replays = f"updates replayed: {replayed}"
    if not due:
        verdict.says.append(f"ledger: no sample was seen, the model takes no tensors; {replays}")
    elif skipped or again:
        wrong = f"{skipped} uses of samples are missing and {again} are one too many"
        verdict.says.append(f"ledger: of {due.total()}, {wrong}; {replays}")
        if not verdict.lost:
            verdict.lost.append("samples: see the ledger")
    else:
        verdict.says.append(
            f"ledger: {due.total()} uses of samples, each as it should be; {replays}"
        )
