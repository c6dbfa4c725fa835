"""The models and steps of notebook 12 that its page doesn't show."""

import torch
from on_ranks import on_ranks

from ddpkit.fsdp import FSDP
from ddpkit.lesson import fsdp_runs


@on_ranks(2)
def test_a_second_step_and_its_words(check):
    model = FSDP(fsdp_runs.Layers(2))
    records, most = fsdp_runs.second_step(model, torch.ones(2, 64), number=2)
    check.same([each.op for each in records].count("reduce_scatter"), 4, "two micro-batches")
    check.unless(most > 2 * model.units[1].nbytes, "bytes", most)
    quiet = {"gradients": True}
    records, _ = fsdp_runs.second_step(model, torch.ones(2, 64), number=3, quiet=quiet)
    check.same([each.op for each in records].count("reduce_scatter"), 2, "reduced at the last")
    words = fsdp_runs.calls_in_words(FSDP(fsdp_runs.Layers(1)), torch.ones(2, 64))
    check.same(words, ["AG b0", "AG b0", "RS b0"], "words")


@on_ranks(2)
def test_what_is_measured_is_a_number_of_its_kind(check):
    check.unless(fsdp_runs.flops_per_s(32, 32, rounds=2) > 1e5, "FLOP/s")
    check.unless(fsdp_runs.bytes_per_s(2**12, rounds=2) > 1, "bytes/s")
    layers = fsdp_runs.Layers(2, width=4, sleeps=0.002)
    took = fsdp_runs.seconds_of_a_step(FSDP(layers), 4, rounds=1)
    check.unless(took >= 2 * 0.002 * 3, "it sleeps in forward, and twice in backward", took)
