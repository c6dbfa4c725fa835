"""`@on_ranks(2, 3, 4)`: a test that runs in every rank of worlds of these sizes."""

import functools
import inspect

import pytest
import torch.distributed as dist
import twin

from ddpkit import launch
from ddpkit.runtime.errors import LaunchError

# A test that takes `part` checks a selection for "some"; "all" is too long for `make test`.
some_or_all = pytest.mark.parametrize("part", ["some", pytest.param("all", marks=pytest.mark.wide)])


def on_ranks(*world_sizes: int, over=lambda function: function, **options):
    """Run the decorated test in each rank of worlds of these sizes, in one launch a size.

        @on_ranks(2, 3, 4)  # options are launch's: on_ranks(2, link=Link(1e-3, 1e9))
        @on_ranks(2, over=on_nccl)  # what is launched is on_nccl(test)
        def test_gradients(check, rank, tmp_path):  # check: twin.Complaints; the rest: fixtures
            check.same(w.grad, expected, "w.grad")  # many cases in one test: loop, name the case

    Fails with what all ranks complained of, `3 ranks, rank 2: w.grad got [1.] expected [2.]`, and
    with what they raise. Use `check`, not `assert`: that makes each rank import pytest, 0.3 s.
    """

    def decorate(test):
        @functools.wraps(test)
        def in_worlds(**fixtures):
            for world_size in world_sizes:
                complaints = _run(over, test, fixtures, world_size, options)
                if complaints:
                    pytest.fail("\n".join(complaints), pytrace=False)

        parameters = list(inspect.signature(test).parameters.values())
        if parameters[0].name != "check":
            raise TypeError(f"{test.__name__} runs on ranks: expected `check` as first parameter")
        fixtures = [each for each in parameters[1:] if each.name not in ("rank", "world_size")]
        in_worlds.__signature__ = inspect.Signature(fixtures)
        return in_worlds

    return decorate


def _run(over, test, fixtures: dict, world_size: int, options: dict) -> list[str]:
    """What all ranks of one world complained of."""
    try:
        run = launch(over(_complaints), test, fixtures, world_size=world_size, **options)
    except LaunchError as error:
        return [f"{world_size} ranks: {error}"]
    return [f"{world_size} ranks, {one}" for its in run for one in its]


def call_on_rank(test, check, fixtures) -> None:
    """With this rank's number and how many there are, if the test wants to know."""
    here = {"rank": dist.get_rank(), "world_size": dist.get_world_size()}
    wanted = {name: here[name] for name in here if name in inspect.signature(test).parameters}
    test(check, **fixtures, **wanted)


def _complaints(test, fixtures: dict) -> list[str]:
    """Run the test in this rank; what it complained of."""
    check = twin.Complaints()
    try:
        call_on_rank(test, check, fixtures)
    except BaseException:
        print("".join(f"{one}\n" for one in check), end="")  # the report quotes the last lines
        raise
    return list(check)


def into_torchs_own_world(folder) -> None:
    """From now on this rank is in a world of plain Gloo, which knows nothing of ours."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    store = dist.FileStore(f"{folder}/store", world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
