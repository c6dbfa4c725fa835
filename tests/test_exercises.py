"""Every exercise: the reference passes, the empty stub is "not written yet", wrong answers get the hint that fits."""

import contextlib
import re
from functools import partial

import pytest
import torch
import torch.distributed as dist
from answers import RIGHT, WRONG, bucketed_ddp, collectives, data_parallel, ranks, softmax
from answers import ring as ring_answers

from ddpkit import ddp, launch, ring
from ddpkit import exercises as check
from ddpkit.ddp import NaiveDDP
from ddpkit.exercises import bucketed_ddp as bucket_checks
from ddpkit.exercises.checker import is_stub, read_sum, who_is_in
from ddpkit.models import GPT, mean_loss
from ddpkit.tools import cost

EXERCISES = [name for name in check.__all__ if name != "is_stub"]


@pytest.fixture(autouse=True)
def _triton_for_its_exercise(request):
    """There is Triton for Linux only, and the interpreter of older ones fails with today's NumPy."""
    if "softmax_kernel" in request.node.name:
        pytest.importorskip("triton", minversion="3.7", reason="needs Triton 3.7 or newer")


@pytest.mark.parametrize("name", EXERCISES)
def test_reference_passes(name):
    exercise = getattr(check, name)
    verdict = exercise(exercise.reference)
    assert verdict.passed, verdict.text
    assert verdict.text.startswith("✓")


@pytest.mark.parametrize("name", EXERCISES)
def test_stub_is_not_written_yet(name):
    def stub(*args):
        """Docstring."""
        ...  # noqa: PIE790

    verdict = getattr(check, name)(stub)
    assert verdict.passed is None
    assert "not written yet" in verdict.text


@pytest.mark.parametrize("name", EXERCISES)
def test_at_least_four_wrong_answers(name):
    assert sum(wrong[0] == name for wrong in WRONG) >= 4


@pytest.mark.parametrize("name", EXERCISES)
def test_solution_is_the_library_source(name):
    exercise = getattr(check, name)
    assert re.search(rf"^(def|class) {name}\b", exercise.solution().text, re.MULTILINE)


def _rank():
    return dist.get_rank()


@pytest.mark.parametrize(("name", "answer", "says"), WRONG, ids=[answer.__name__ for _, answer, _ in WRONG])
def test_wrong_answer_gets_the_hint_that_fits(name, answer, says):
    verdict = getattr(check, name)(answer)
    assert verdict.passed is False
    assert says in verdict.text


@pytest.mark.parametrize(("name", "answer"), RIGHT, ids=[answer.__name__ for _, answer in RIGHT])
def test_other_right_answers_pass(name, answer):
    verdict = getattr(check, name)(answer)
    assert verdict.passed, verdict.text


# The ring of the exercises and that of the library.


def _both_halves(reduce_scatter, all_gather, lengths):
    """What each half leaves in x, as bytes, so that equal means the same bits."""
    left = []
    for numel in lengths:
        for half in (reduce_scatter, all_gather):
            x = torch.randn(numel, generator=torch.Generator().manual_seed(_rank()))
            chunk = half(x).clone()
            left.append((x.numpy().tobytes(), chunk.numpy().tobytes()))
    return left


def _sent(run):
    return [[(record.peer, record.bytes) for record in records if record.op == "send"] for records in run.wire]


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_references_and_the_library_are_one_ring(world_size):
    exercises = check.ring_reduce_scatter.reference, check.ring_all_gather.reference
    ours = launch(_both_halves, *exercises, (0, 1, 7, 8), world_size=world_size, backend="gloo")
    library = ring.ring_reduce_scatter, ring.ring_all_gather
    theirs = launch(_both_halves, *library, (0, 1, 7, 8), world_size=world_size, backend="gloo")
    assert list(ours) == list(theirs)
    assert _sent(ours) == _sent(theirs)
    assert sum(map(len, _sent(ours))) == 4 * 2 * world_size * (world_size - 1)


@pytest.mark.parametrize("name", ["ring_reduce_scatter", "ring_all_gather"])
def test_solution_of_a_ring_says_where_the_library_has_it(name):
    assert f"ddpkit.ring.{name} sends the same" in getattr(check, name).solution().text.splitlines()[0]


def ring_all_gather_one_sends_first(x):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    chunks = x.tensor_split(world_size)
    for hop in range(1, world_size):
        outgoing, arriving = chunks[(rank - hop + 1) % world_size], chunks[(rank - hop) % world_size]
        if rank == 0:
            dist.send(outgoing, 1)
        dist.recv(arriving, (rank - 1) % world_size)
        if rank != 0:
            dist.send(outgoing, (rank + 1) % world_size)
    return x


def test_messages_that_wait_for_each_other_are_right_but_not_praised():
    assert "in W-1 hops." in check.ring_all_gather(check.ring_all_gather.reference).text
    verdict = check.ring_all_gather(ring_all_gather_one_sends_first)
    assert verdict.passed
    assert "12 hops on 4 ranks instead of 3" in verdict.text


def test_ring_cost_is_compared_with_a_ring_that_can_be_replayed():
    check.ring_cost(ring_answers.ring_cost_of_all_ranks)
    trace = check.ring_cost.replay()._repr_mimebundle_()["text/plain"]
    assert trace.count(" sends ") == 6 * 10


@pytest.mark.parametrize("world_size", range(1, 9))
def test_ring_cost_is_that_of_the_cost_model(world_size):
    volume = cost.volume("ring_all_reduce", 840, world_size)
    assert check.ring_cost.reference(world_size, 840) == (volume.hops, volume.sent)


# The plain loops of notebook 03, the library, and one process.


def _gpt_gradients(wrap, average):
    """A GPT's gradients, averaged, as bytes, so that equal means the same bits; each rank has its own text."""
    torch.manual_seed(0)
    gpt = GPT(vocabulary=8, context=4, width=8, heads=2, layers=1)
    wrapped = wrap(gpt)
    text = torch.randint(8, (2, 5), generator=torch.Generator().manual_seed(_rank()))
    mean_loss(wrapped(text[:, :-1]), text[:, 1:]).backward()
    average(wrapped)
    return [parameter.grad.numpy().tobytes() for parameter in gpt.parameters() if parameter.requires_grad]


def _as_it_is(module):
    return module


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_references_average_as_naive_ddp_does(world_size):
    library = launch(_gpt_gradients, NaiveDDP, NaiveDDP.synchronize, world_size=world_size, backend="gloo")
    by_hand = check.average_gradients.reference
    loop = launch(_gpt_gradients, _as_it_is, by_hand, world_size=world_size, backend="gloo")
    hooks = launch(_gpt_gradients, check.HookedDDP.reference, _as_it_is, world_size=world_size, backend="gloo")
    assert list(loop) == list(hooks) == list(library)
    alone = launch(_gpt_gradients, _as_it_is, _as_it_is, world_size=world_size, backend="gloo")
    assert (list(alone) == list(library)) == (world_size == 1)


SPLIT = [3, 1, 2]  # rows of each rank


def _line_gradient(rows, targets, reduction):
    line = torch.nn.Linear(2, 1, dtype=torch.float64)
    torch.nn.init.ones_(line.weight)
    torch.nn.init.zeros_(line.bias)
    torch.nn.functional.mse_loss(line(rows).squeeze(1), targets, reduction=reduction).backward()
    return line


def _share_gradient(sum_or_mean, rows, targets, reduction):
    rows, targets = rows.split(SPLIT)[_rank()], targets.split(SPLIT)[_rank()]
    line = _line_gradient(rows, targets, reduction)
    sum_or_mean(line, reduction, len(rows))
    return line.weight.grad, line.bias.grad


@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_sum_or_mean_gives_the_gradients_of_one_process(reduction):
    rows, targets = torch.arange(12, dtype=torch.float64).view(6, 2), torch.arange(6, dtype=torch.float64) ** 2
    line = _line_gradient(rows, targets, reduction)
    run = launch(_share_gradient, check.sum_or_mean.reference, rows, targets, reduction, world_size=3, backend="gloo")
    for weight, bias in run:
        torch.testing.assert_close(weight, line.weight.grad)
        torch.testing.assert_close(bias, line.bias.grad)


def test_other_ways_to_average_get_a_word_of_their_own():
    assert "the tied weight too" in check.average_gradients(check.average_gradients.reference).text
    assert (
        "notebook 04 begins with that" in check.average_gradients(data_parallel.average_gradients_in_one_message).text
    )
    assert "ReduceOp.AVG divides on the way" in check.average_gradients(data_parallel.average_gradients_by_avg).text


def test_replay_of_the_hook_as_found_shows_that_parameters_travel():
    found = check.HookedDDP(data_parallel.HookedAsFound).text
    assert "gave to all_reduce is 7" in found
    assert "still empty" not in found  # synchronize is, and the reference's is, too
    steps = check.HookedDDP.replay().text.splitlines()
    assert sorted(step.partition(": ")[2] for step in steps) == [
        "[5] on every rank → [10] on every rank",
        "[7] on every rank → [14] on every rank",
    ]


# The wrappers of notebook 04, the library's, and what the checks of both rest on.

BUCKET_BYTES = 600  # a few parameters of the small GPT


def _in_buckets(wrapper, gpt):
    order = [parameter for parameter in gpt.parameters() if parameter.requires_grad][::-1]
    plan = ddp.plan_buckets([(parameter.nbytes, parameter.dtype) for parameter in order], BUCKET_BYTES)
    return wrapper(gpt, [[order[number] for number in numbers] for numbers in plan])


def _reduced_bytes(run):
    return [[record.bytes for record in records if record.op == "all_reduce"] for records in run.wire]


@pytest.mark.parametrize("world_size", [1, 2, 4])  # divided before or after, by 2 or 4: the bits are the same
def test_reference_wrappers_average_as_the_librarys_do(world_size):
    def gradients(wrap, wrapper):
        return launch(_gpt_gradients, wrap, wrapper.synchronize, world_size=world_size, backend="gloo")

    overlapped, bucketed = check.OverlapDDP.reference, check.BucketedDDP.reference
    ours, library = gradients(overlapped, overlapped), gradients(ddp.OverlapDDP, ddp.OverlapDDP)
    assert list(ours) == list(library)
    assert [sorted(sent) for sent in _reduced_bytes(ours)] == [sorted(sent) for sent in _reduced_bytes(library)]

    buckets = gradients(partial(_in_buckets, bucketed), bucketed)
    librarys = gradients(partial(ddp.BucketedDDP, bucket_cap_mb=BUCKET_BYTES / 2**20), ddp.BucketedDDP)
    assert list(buckets) == list(librarys)
    assert _reduced_bytes(buckets) == _reduced_bytes(librarys)
    assert 1 < len(_reduced_bytes(buckets)[0]) < len(_reduced_bytes(ours)[0])


def test_how_many_buckets_can_have_left_when_backward_comes_to_each_layer():
    """From the last layer to the first, and when it is over; tokens.weight is complete only then."""
    layers = ("tokens.weight", "a", "b", "head.weight")
    assert bucket_checks._sendable([["b"], ["a"], ["tokens.weight"]], layers) == [0, 0, 1, 2, 3]
    assert bucket_checks._sendable([["a"], ["b"], ["tokens.weight"]], layers) == [0, 0, 0, 2, 3]
    assert bucket_checks._sendable([["b", "a"], ["tokens.weight"]], layers) == [0, 0, 0, 1, 2]


def test_praise_of_overlap_counts_what_left_early():
    assert "4 of 5 gradients were on their way before" in check.OverlapDDP(check.OverlapDDP.reference).text
    praise = check.BucketedDDP(check.BucketedDDP.reference).text
    assert "3 all_reduces for 5 gradients, 2 of them on their way before" in praise


TO_WRITE = {  # the methods of which the notebooks give a stub
    "OverlapDDP": ["ready", "synchronize"],
    "BucketedDDP": ["add_bucket", "ready", "synchronize"],
    "LossScaler": ["scale", "unscale_", "step", "update"],
    "Checkpoint": ["forward", "backward"],
}


@pytest.mark.parametrize(("name", "methods"), TO_WRITE.items(), ids=TO_WRITE)
def test_a_class_is_not_written_yet_while_all_its_methods_are_empty(name, methods):
    def stub(*args): ...

    exercise = getattr(check, name)
    verdict = exercise(type(name, (exercise.reference,), dict.fromkeys(methods, stub)))
    assert (verdict.passed, str(verdict)) == (None, f"{name}: not written yet: {', '.join(methods)}")


def test_a_class_with_some_methods_empty_is_judged_and_they_are_named():
    verdict = check.OverlapDDP(bucketed_ddp.OverlapHasNothingToWaitFor)
    assert verdict.passed is False
    assert "\nsynchronize is still empty." in verdict.text
    assert "\nadd_bucket, ready are still empty." in check.BucketedDDP(bucketed_ddp.BucketedHalfWritten).text
    assert "still empty" not in check.OverlapDDP(bucketed_ddp.OverlapWaitsInTheHook).text


def test_a_decorated_stub_is_not_written_yet():
    @contextlib.contextmanager
    def no_sync(model):
        """Docstring."""
        ...  # noqa: PIE790

    assert str(check.no_sync(no_sync)) == "no_sync: not written yet"


def test_replay_of_buckets_in_the_order_of_arrival_shows_what_was_added_up():
    assert not check.BucketedDDP(bucketed_ddp.BucketedByArrival).passed
    assert "rank 0 [26, 26, 26], rank 1 [60, 60, 60] →" in check.BucketedDDP.replay().text


def test_an_error_that_is_not_about_none_is_left_as_it_is():
    verdict = check.average_gradients(ranks.neighbours_open)
    assert "neighbours_open() takes 0 positional arguments" in verdict.text
    assert "isn't trained" not in verdict.text


def broadcast_raises(x, src):
    raise NotImplementedError


def test_failures_without_a_cause_offer_hints_from_the_second_on_each_once():
    exercise = check.broadcast
    exercise._failures = exercise._hints_given = 0
    offered = [exercise(broadcast_raises).text.partition("Hint: ")[2] for _ in range(len(exercise.hints) + 2)]
    assert [text.partition("\n")[0] for text in offered] == ["", *exercise.hints, ""]
    assert str(exercise.hint()) == exercise.hints[-1]


def test_a_failure_whose_cause_is_named_offers_no_hint():
    exercise = check.plan_buckets
    exercise._failures, exercise._hints_given = 1, 0
    verdict = exercise(bucketed_ddp.plan_buckets_by_first)
    assert "in the order of their last gradients" in verdict.text
    assert "Hint:" not in verdict.text
    assert str(exercise.hint()) == exercise.hints[0]


def test_a_wrong_plan_is_shown_what_it_was_given():
    sizes = "sizes=[(2, torch.bfloat16), (4, torch.float32), (2, torch.bfloat16), (4, torch.float32)"
    assert sizes in check.plan_buckets(bucketed_ddp.plan_buckets_by_first).text


def test_failed_check_offers_a_replay_of_the_smallest_failing_world():
    check.broadcast(collectives.broadcast_from_0)
    replay = check.broadcast.replay()
    assert "rank 0 sends" in replay._repr_mimebundle_()["text/plain"]
    check.broadcast(check.broadcast.reference)
    assert "the last check passed, so there is nothing to replay" in check.broadcast.replay().text
    check.broadcast._last = None
    assert "nothing failed yet, so there is nothing to replay" in check.broadcast.replay().text


def test_a_replay_is_offered_of_what_was_said():
    assert ".replay()" in check.broadcast(collectives.broadcast_from_0).text
    verdict = check.plan_buckets(bucketed_ddp.plan_buckets_every_other)
    assert verdict.text.endswith("More: check.plan_buckets.hint() · .solution()")


def test_nothing_is_replayed_where_nothing_was_sent():
    check.online_softmax(softmax.online_softmax_by_torch)
    assert "the ranks sent nothing, so there is nothing to replay" in check.online_softmax.replay().text


def test_an_exercise_without_ranks_speaks_of_none():
    said = check.online_softmax(softmax.online_softmax_without_a_maximum).text
    assert said.startswith("✗ online_softmax on the row 0, 1000: it raised OverflowError: math range error, expected [")
    assert "rank" not in said


def test_not_a_function():
    assert "leave the parentheses off" in check.broadcast(None).text


def test_is_stub():
    assert is_stub(lambda: ...) is False
    assert not is_stub(collectives.broadcast_from_0)


def test_digits_tell_which_ranks_are_in_a_sum():
    assert who_is_in(1021, 4) == [1, 2, 0, 1]
    assert read_sum(1021, 4) == "rank 2 is missing from it and rank 1 is in it more than once"
    assert read_sum(1111, 4) == ""
