"""The limits of the house, and that each can be broken: scripts/house.py has the figures."""

import house
import pytest
from house import HELD, RATCHET


@pytest.mark.parametrize("part", RATCHET)
def test_the_house_does_not_grow(part):
    assert house.lines_by_part()[part] <= RATCHET[part]


def test_every_subject_is_one_idea():
    assert house.too_long() == []


@pytest.mark.wide
def test_what_is_read_does_not_get_worse():
    """On its way to LIMITS: put a better figure into HELD."""
    assert house.worse(house.figures()) == []


def test_exercises_do_not_grow():
    assert house.worse(house.exercise_figures(), house.HELD_EXERCISES) == []


def test_what_stands_outside_keeps_its_limits():
    assert house.worse(house.outside_figures(), house.LIMITS_OUTSIDE) == []


def test_no_private_name_crosses_a_module():
    assert house.private_names_across() == []


def test_the_runtime_names_nothing_above_it():
    assert house.names_above_the_runtime() == []


def test_nothing_replaces_another_class_s_methods():
    assert house.replaced_methods() == []


@pytest.mark.wide
def test_no_algorithm_is_spelled_twice():
    assert house.spelled_twice() == []


def test_every_exercise_whose_subject_is_in_the_library_has_it_as_reference():
    assert house.references_beside_the_library() == []


def test_no_comprehension_inside_another():
    assert [each for path in house.sources() for each in house.nested_comprehensions(path)] == []


# One word, one thing: {word: the only module that may define it, in any case, private or not}.
# The hardened twin of a subject, in fast/, keeps its name.
WORDS = {
    "bucket": "ddpkit/ddp.py",
    "cut": "ddpkit/checkpointing.py",
    "each": "ddpkit/pipeline/schedules.py",
    "flat": "ddpkit/ring.py",
    "join": "ddpkit/data_parallel.py",
    "misuse": "ddpkit/tools/checks.py",
    "mistake": "ddpkit/exercises/checker.py",
    "ready": "ddpkit/ddp.py",
    "steps": None,
    "timeline": "ddpkit/cost.py",
}
TWICE = {  # still: take a line out with each that gets a name of its own
    "bucket": {"ddpkit/zero/optimizer.py"},
    "cut": {"ddpkit/pipeline/engine.py"},
    "flat": {"ddpkit/lesson/figures.py"},
    "join": {"ddpkit/tensor_parallel/split.py"},
    "ready": {"ddpkit/exercises/bucketed_ddp.py"},
    "timeline": {"ddpkit/lesson/figures.py", "ddpkit/memory/peak.py"},
}


@pytest.mark.parametrize("word", WORDS)
def test_a_word_of_ours_has_one_meaning(word):
    defining = {file for file in house.definitions(word) if "/fast/" not in file}
    assert defining - {WORDS[word]} == TWICE.get(word, set())


def test_docstrings_have_the_values_of_constants():
    assert [said for path in house.sources() for said in house.stale_values(path)] == []


RING = '''
"""A ring."""  # one comment in 20 lines
from .collectives import _exchange, reduce


def ring(x: list[dict[str, list[tuple[int, ...]]]], hops: int | None) -> list[dict[str, list]]:
    """One docstring."""
    total = 0
    for hop in range(hops):
        total = total + x[hop % len(x)] * hop
        x.append(total)
    return x


def table():
    return [[row * column for column in range(9)] for row in range(9)]


class Ring:
    def _turn(self): ...
'''
WIRE = '''
"""A wire for exercises."""
from ddpkit.ring import Ring

PLACE = "ddpkit/exercises"


def turned(values, count):
    """Another docstring, other names, the same loop."""
    result = 0
    for number in range(count):
        result = result + values[number % len(values)] * number
        values.append(result)
    return values


Ring.turn = turned
setattr(Ring, "other", Ring()._turn())


class Wired(Ring):
    def turn_twice(self):
        return self._turn(), self._turn()  # a base's own
'''


def test_the_limits_can_be_broken(tmp_path):
    for folder in ("ddpkit/runtime", "ddpkit/fast", "tests"):
        (tmp_path / folder).mkdir(parents=True)
    ring, wire = tmp_path / "ddpkit/ring.py", tmp_path / "ddpkit/runtime/wire.py"
    ring.write_text(RING)
    wire.write_text(WIRE)
    (tmp_path / "ddpkit/fast/ring.py").write_text(RING.replace("_", ""))
    (tmp_path / "tests/test_ring.py").write_text("\n" * 7)

    count = len(RING.splitlines()), len(WIRE.splitlines())
    by_part = {"subjects": count[0], "fast": count[0], "runtime": count[1]}
    by_part |= {"ddpkit": sum(by_part.values()), "tests": 7}
    assert house.lines_by_part(tmp_path) == by_part
    assert list(house.subjects(tmp_path)) == ["ddpkit/ring.py"]
    assert house.private_names_across(tmp_path) == [
        "ddpkit/ring.py:3 _exchange",
        "ddpkit/runtime/wire.py:18 _turn",
    ]
    assert house.names_above_the_runtime(tmp_path) == [
        "ddpkit/runtime/wire.py:3 ring",
        "ddpkit/runtime/wire.py:5 exercises",
    ]
    assert sorted(house.replaced_methods(tmp_path)) == [
        "ddpkit/runtime/wire.py:17 Ring.turn",
        "ddpkit/runtime/wire.py:18 setattr(Ring, 'other', Ring()._turn())",
    ]
    assert house.spelled_twice(tmp_path) == ["ddpkit/ring.py ring ~ ddpkit/runtime/wire.py turned"]
    assert house.nested_comprehensions(ring) == ["ring.py:16"]


PACKED = '''
"""What is read: not a docstring
that begins as it should."""

a, b = 1, 2  # one comment

# another
a, b = b, a  # a swap
c, d = pair = sorted(
    (a, b),
)


class Whose:
    """`what` is code, and code is a noun."""

    def of(self):
        """Of what?"""
        return """a string
of two lines"""
'''


def test_what_is_read_can_get_worse(tmp_path):
    subject = tmp_path / "ddpkit/packed.py"
    subject.parent.mkdir()
    subject.write_text(PACKED)

    lines = len(PACKED.splitlines())
    counted = {"lines": lines, "code": 9, "tokens": 40, "comments": 3, "packed": 1}
    assert house.density(subject) == counted
    assert house.packed(subject) == [5]
    assert [line.split(": ")[1] for line in house.askew(subject)] == ["What is read", "Of what?"]
    figures = house.figures(tmp_path)
    assert figures == {
        "tokens a code line": 40 / 9,
        "packed assignments in 1,000 lines": 1000 / lines,
        "comments in 100 lines": 300 / lines,
        "docstrings that begin askew": 2,
        "words of dialect": 0,
        "variables called each": 0,
    }
    assert house.worse(HELD) == []
    better = HELD | {"comments in 100 lines": 100, "docstrings that begin askew": -1}
    assert house.worse(better) == []
    for figure, held in HELD.items():
        off = -0.1 if figure in house.MORE_IS_BETTER else 0.1
        assert len(house.worse(HELD | {figure: held + off})) == 1

    (subject.parent / "long.py").write_text("a = 1\n" * 130 + "# free\n" * 100)
    (subject.parent / "longer.py").write_text("a = 1\n" * 131)
    assert house.too_long(tmp_path) == ["ddpkit/longer.py: 131 code lines, held at 130"]


STILTED = '''
"""Somebody

knows MOST (12), 2.5 s (`WAIT_S`), 9,000 (BYTES) and 3 MB (BYTES)."""
MOST, WAIT_S, BYTES = 11, 2.5, 3_000_000
for each in ["whoever"]:  # so many, too
    each.hears = [each for each in "nobody"]


class _Join: ...
'''


def test_words_are_found(tmp_path):
    subject = tmp_path / "ddpkit/stilted.py"
    subject.parent.mkdir()
    subject.write_text(STILTED)
    assert house.dialect(subject) == ["2: Somebody", "6: # so many, too"]
    assert house.variables("each", subject) == [6, 7]
    assert house.stale_values(subject, tmp_path) == ["BYTES: 9,000", "MOST: 12"]
    assert house.definitions("join", tmp_path) == {"ddpkit/stilted.py"}
