"""The museum: each piece is what it is said to be, on its own mesh, and on a few of the others."""

import dataclasses
import re
from collections import Counter

import pytest

from ddpkit.exercises import museum
from ddpkit.exercises.checker import source_of
from ddpkit.exercises.museum_case import DATA
from ddpkit.exercises.museum_piece import SOUND, Case, Piece

PIECES = museum.pieces()
NUMBERS = {  # what each asks for, by hand
    "late_flag": 2 + 2,  # both first micro-batches, and two more of its own
    "hook_averages": 1,
    "last_one_only": 3,
    "past_the_wrapper": 1 / 4,
    "seeds_of_their_own": 1,
    "mean_of_means": (1 / 3) / (1 / 6),
    "rows_of_all": 1,
    "tied_twice": 3,
    "tied_averaged_twice": 1,
    "sync_each": 1,
    "weighted_by_samples": (1 / 3) / (1 / 5),
    "phantom_scale": 2**-16,
    "zeroed_inside": 3,
    "rescaled_each_time": 3**-3 / 3**-1,
    "overflow_of_my_own": 2,
    "scaled_by_the_world": 3,
    "other_axis": 1 / 4,
    "rate_of_each_rank": 2,
    "half_weights": 0,
    "divided_first": 1,
    "replicated_bias": 3,
    "bias_shared_out": 1 / 3,
    "summed_bias": 1,
    "sum_that_sums_again": 3,
    "norm_of_my_tokens": 1,
    "f_three_times": 3,
    "optimizer_of_the_old": 0,
    "copied_counted_each": (9 + 16 + 2 * 144) ** 0.5 / 13,
    "norm_of_my_part": 5 / 185**0.5,
    "one_norm": 1,
    "undivided": 3,
    "tied_ends": 3,
    "shifted_after_the_cut": 3,
    "shifted_before_the_cut": 1,
    "zigzag_then_shifted": 3,
    "last_hops_keys": 1,
    "merged_by_powers": 89,  # e**88.7 is float32's largest number
    "expert_gradients": 3,
    "shared_expert": 3,
    "orthogonal_shards": 1,
    "same_order": 1,
    "sorted_as_words": 10,
    "half_of_the_experts": 3 / 4,
    "fresh_optimizer": 2 / 3,
    "rebound_bias": 0,
    "latest_too_early": 0,
    "dealt_by_turns": 1,
}
ANSWERS = {
    "a": """
        hook_averages seeds_of_their_own phantom_scale scaled_by_the_world half_weights
        sum_that_sums_again f_three_times tied_ends zigzag_then_shifted orthogonal_shards
        half_of_the_experts latest_too_early
    """,
    "b": """
        last_one_only mean_of_means tied_twice zeroed_inside rate_of_each_rank replicated_bias
        optimizer_of_the_old norm_of_my_part shifted_after_the_cut last_hops_keys
        expert_gradients same_order fresh_optimizer
    """,
    "c": """
        late_flag past_the_wrapper weighted_by_samples rescaled_each_time overflow_of_my_own
        other_axis bias_shared_out norm_of_my_tokens copied_counted_each undivided
        merged_by_powers shared_expert sorted_as_words rebound_bias
    """,
    "sound": """
        rows_of_all tied_averaged_twice sync_each divided_first summed_bias one_norm
        shifted_before_the_cut dealt_by_turns
    """,
}
RIGHT = {name: answer for answer, names in ANSWERS.items() for name in names.split()}
PART = list(PIECES)[::5]  # of `make test`


@pytest.fixture(
    params=[
        pytest.param(name, marks=() if name in PART else (pytest.mark.slow,)) for name in PIECES
    ]
)
def tried(request) -> Piece:
    return PIECES[request.param]


@pytest.fixture(params=PIECES)
def piece(request) -> Piece:
    return PIECES[request.param]


def test_there_are_enough():
    assert len(PIECES) >= 32
    assert list(RIGHT.values()).count(SOUND) >= 6
    assert set(RIGHT) == set(PIECES)
    assert list(NUMBERS) == list(PIECES)
    unequal = [case for case in DATA if case.ranks != case.micro_batches > 1]
    assert len(unequal) == len(DATA) == 12


def test_a_piece_is_short_and_its_source_is_named(piece):
    lines = source_of(piece.code).splitlines()
    assert len(lines) <= 30
    assert max(map(len, lines)) <= 72  # as wide as the course prints
    assert piece.case.ranks <= 4
    assert piece.source
    assert len(piece.repairs) == 3
    assert re.match("[a-z]", piece.asks)


def test_exactly_one_choice_is_right(tried):
    wrong = {name: tried.wrong_with(name) for name in (SOUND, *tried.repairs)}
    right = [name for name in wrong if not wrong[name]]
    assert right == [RIGHT[tried.name]], wrong


def test_the_number_is_what_one_finds_by_hand(tried):
    assert tried.measured() == pytest.approx(NUMBERS[tried.name], rel=1e-3, abs=1e-9)


@pytest.mark.slow
def test_all_meshes_tell_right_from_wrong(piece):
    """Two seeds here; the command takes as many as it is told."""
    found = museum.judge(piece, range(2), meshes=12)
    assert found["right", "runs"] == 2 * len(piece.meshes)
    assert found["right", "seen"] == found["right", "by the audit"] == 0
    assert found["wrong", "seen"] == found["wrong", "runs"]
    assert found["wrong", "by the audit"] == found["wrong", "audited"]
    if RIGHT[piece.name] != SOUND:
        assert found["wrong", "runs"] == found["right", "runs"]
        assert found["wrong", "audited"] in (found["wrong", "runs"], 0)


# What a reader is told: a wrong piece, and a sound one


@pytest.fixture
def tied():
    return dataclasses.replace(PIECES["tied_twice"])  # unanswered


@pytest.fixture
def sound():
    return dataclasses.replace(PIECES["tied_averaged_twice"])


def test_unanswered_it_shows_code_symptom_question_and_choices(tied):
    shown = tied()
    assert shown.passed is None
    assert source_of(tied.code).rstrip() in repr(shown)
    for part in ("blow up", "how many times too large", "  a: ", "  b: ", "  c: ", '"sound"'):
        assert part in repr(shown)
    assert tied.source not in repr(shown)
    assert max(map(len, repr(shown).splitlines())) <= 72


def test_both_answers_right(tied):
    verdict = tied(mechanism="b", number=3)
    assert verdict.passed, verdict.text
    assert tied.why in verdict.text
    assert tied.source in verdict.text
    assert tied.first == (True, True)


def test_one_answer_alone_is_not_judged(tied):
    assert "the number is missing" in tied(mechanism="b").text
    assert "the mechanism is missing" in tied(number=3).text
    assert tied.first is None


def test_a_wrong_mechanism_is_tried_and_what_is_left_is_said(tied):
    verdict = tied(mechanism="c", number=3)
    assert verdict.passed is False
    said = "repaired as c says, the run on 3 ranks, 2 micro-batches isn't that on one"
    assert said in verdict.text
    assert "has ×" in verdict.text
    assert "the number is right" in verdict.text
    tied(mechanism="b", number=3)
    assert tied.first == (False, True)  # the first answer counts


def test_a_wrong_number_is_not_given_away(tied):
    verdict = tied(mechanism="b", number=2)
    assert verdict.passed is False
    assert "the mechanism is right" in verdict.text
    assert "mechanism" not in verdict.text.partition("the number isn't 2")[0]  # wrong comes first
    assert "3" not in verdict.text.partition("number")[2]


def test_what_is_wrong_is_not_sound(tied):
    verdict = tied(mechanism="sound", number=3)
    assert "it isn't sound" in verdict.text
    assert not tied.false_alarm


def test_a_false_alarm_is_told_and_counted(sound):
    verdict = sound(mechanism="b", number=1)
    assert "a false alarm" in verdict.text
    assert sound.false_alarm
    assert sound(mechanism="sound", number=1).passed


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        ({"mechanism": "d", "number": 1}, 'expected mechanism to be "a", "b", "c" or "sound"'),
        ({"mechanism": "a", "number": "many"}, "expected a number, got 'many'"),
    ],
)
def test_what_is_no_answer_is_refused(tied, answer, told):
    verdict = tied(**answer)
    assert verdict.passed is False
    assert told in verdict.text
    assert tied.first is None


def test_the_solution_is_the_repaired_code_and_the_source(tied):
    shown = repr(tied.solution())
    assert "mechanism 'b', number 3" in shown
    assert tied.source in shown.replace("\n", " ")
    assert "for module in [model]:" in shown


def test_a_repair_that_fails_is_wrong(tied):
    tied.choices = "a: loss.backward() → raise ValueError⏎loss.backward()\n    It raises."
    assert "ValueError" in tied.wrong_with("a")


def test_the_score_counts_first_answers():
    assert re.fullmatch(
        r"\d+ mechanisms and \d+ numbers of \d+ pieces at the first attempt, \d+ false alarms\. "
        rf"There are {len(PIECES)}\.",
        museum.score().replace("\n", " "),
    )


def test_the_command_runs_what_it_is_told(capsys):
    names = ["shared_expert", "sorted_as_words", "dealt_by_turns"]
    assert museum.main([*names, "--seeds", "2", "--first", "5", "--meshes", "2"]) == 0
    told = capsys.readouterr().out.splitlines()
    # Wrong code: runs, seen; audited, by the audit. Right code: the same.
    assert told[2].split()[:-1] == ["shared_expert", *"44444040"]
    assert told[3].split()[:-1] == ["sorted_as_words", *"44004000"]  # nothing trains there
    assert told[4].split()[:-1] == ["dealt_by_turns", *"00004000"]
    assert told[5].split() == ["3", "pieces", "8", "8", "4", "4", "12", "0", "4", "0"]
    assert museum.main(["shared_expert", "--seeds", "1", "--meshes", "1", "--right-only"]) == 0
    assert capsys.readouterr().out.splitlines()[2].split()[1:-1] == [*"00001010"]


@pytest.mark.parametrize(
    "counts",
    [
        {"seen": 0, "audited": 1, "by the audit": 1},
        {"seen": 2, "audited": 1, "by the audit": 0},
    ],
)
def test_the_command_fails_where_a_wrong_piece_passes(monkeypatch, capsys, counts):
    def caught(piece, mechanism, case, seeds):
        return Counter(counts if mechanism == SOUND else {"audited": 1})

    monkeypatch.setattr(museum, "caught", caught)
    assert museum.main(["sorted_as_words", "--seeds", "2", "--meshes", "1"]) == 1


def test_the_command_fails_at_a_false_alarm(monkeypatch, capsys):
    for alarm in ("seen", "by the audit"):
        monkeypatch.setattr(museum, "caught", lambda *args, what=alarm: Counter({what: 1}))
        assert museum.main(["one_norm", "--seeds", "1", "--meshes", "1"]) == 1


def test_the_command_refuses_an_unknown_piece(capsys):
    with pytest.raises(SystemExit):
        museum.main(["mona_lisa"])
    assert "expected names of pieces, got mona_lisa" in capsys.readouterr().err


def test_a_case_says_its_sizes():
    assert str(Case(1)) == "1 rank"
    assert str(Case(6, 5, inner=3)) == "6 ranks, 2 × 3, 5 micro-batches"
