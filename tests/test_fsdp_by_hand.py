"""ddpkit.fsdp.by_hand beside the library: the order of calls as words, and the wire."""

import fsdp_cases as cases
import torch
from on_ranks import on_ranks

from ddpkit.fsdp import FSDP, by_hand


def words(model, order):
    """What the rank says in a second step, as words."""

    def step():
        model(cases.batch(0, 0, 0), order).sum().backward()
        model.synchronize()

    step()
    model.module.zero_grad()
    names = []
    for unit in model.units:  # as they are asked to
        unit.start_gather = noted(names, f"AG {unit.name}", unit.start_gather)
        unit.take_gradients = noted(names, f"RS {unit.name}", unit.take_gradients)
    step()
    return names


def noted(names, word, call):
    def noting():
        names.append(word)
        call()

    return noting


@on_ranks(2)
def test_backward_calls_are_the_wires(check):
    """Also with a block that is used twice, or twice in a row; the root is kept, and fed ids."""
    for use in ((0, 1, 2), (0, 1, 0), (0, 0, 2, 1)):
        model = FSDP(cases.Odd())
        for parameter in model.module.parameters():
            parameter.requires_grad_(False)
        for each in model.module.blocks.parameters():
            each.requires_grad_(True)
        model.module.tokens.weight.requires_grad_(True)
        used = [f"blocks.{number}" for number in use]
        missing = {f"blocks.{number}" for number in range(3)} - set(used)
        for number in missing:
            model.module.get_submodule(number).requires_grad_(False)
        got = words(model, use)
        forward = ["AG the root", *[f"AG {name}" for name in used]]
        check.same(got[: len(forward)], forward, use, "forward")
        backward = got[len(forward) :]
        expected = by_hand.backward_calls([*used, "the root"], kept=["the root"])
        # The root's inputs need no gradient: it is reduced at the very end.
        expected.remove("RS the root")
        ends = ["RS the root", *[f"RS {name}" for name in sorted(missing)]]
        check.same(backward[: len(expected) + 1], [*expected, ends[0]], use, "backward")


@on_ranks(1, 2, 3)
def test_rows_there_and_back(check, rank, world_size):
    for length in (1, 3, 4, 7):
        whole = torch.arange(2.0 * length).view(length, 2)
        mine = cases.mine("", whole)
        check.same(by_hand.gather_rows(mine, length), whole, length, "gathered")
        mean = sum(whole * (r + 1) for r in range(world_size)) / world_size
        got = by_hand.reduce_rows(whole * (rank + 1))
        check.same(got, cases.mine("", mean), length, "reduced")
