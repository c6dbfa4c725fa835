"""ddpkit.models: what data parallelism stumbles over is there, and the GPT learns a real text."""

import copy
import math
from itertools import islice

import pytest
import torch
from torch import nn

from ddpkit.models import GPT, MLP, mean_loss
from ddpkit.tools.text import Batches, encode, text


def small_gpt(seed=0, **arguments):
    torch.manual_seed(seed)
    return GPT(**{"vocabulary": 11, "context": 6, "width": 8, "heads": 2} | arguments)


def batch():
    """Inputs and targets, (4, 6) each."""
    tokens = torch.randint(11, (4, 7), generator=torch.Generator().manual_seed(0))
    return tokens[:, :-1], tokens[:, 1:]


def gradients(model, inputs, targets):
    model.zero_grad()
    mean_loss(model(inputs), targets).backward()
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    return {name: parameter.grad.clone() for name, parameter in trained}


# The tied weight, the frozen parameter


def test_the_tied_weight_counts_once_and_stays_tied():
    block = 8 * 3 * 8 + (8 * 8 + 8) + (8 * 32 + 32) + (32 * 8 + 8) + 2 * (8 + 8)
    expected = 11 * 8 + 6 * 8 + 2 * block + (8 + 8)
    assert sum(weight.numel() for weight in small_gpt(layers=2).parameters()) == expected
    for model in (copy.deepcopy(small_gpt()), small_gpt().to(torch.bfloat16)):
        assert model.head.weight is model.tokens.weight


def test_the_tied_weight_has_the_gradient_of_both_uses():
    model, data = small_gpt(), batch()
    tied = gradients(model, *data)["tokens.weight"]
    model.head.weight = nn.Parameter(model.head.weight.detach().clone())
    apart = gradients(model, *data)
    torch.testing.assert_close(tied, apart["tokens.weight"] + apart["head.weight"])
    assert all(apart[name].any() for name in ("tokens.weight", "head.weight"))


def test_one_parameter_is_frozen_and_all_others_learn():
    model, (inputs, targets) = small_gpt(), batch()
    before = copy.deepcopy(model.state_dict())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.1)
    mean_loss(model(inputs), targets).backward()
    optimizer.step()
    unchanged = [name for name, value in model.state_dict().items() if value.equal(before[name])]
    assert unchanged == ["positions"]


def test_the_frozen_parameter_matters():
    """Without it, the same token twice is the same place twice."""
    model, same = small_gpt(), torch.full((1, 6), 3)
    with torch.no_grad():
        assert (model(same)[0, 0] - model(same)[0, 1]).abs().max() > 1e-4
        model.positions.zero_()
        torch.testing.assert_close(model(same)[0, 0], model(same)[0, 1])


# Attention, dropout


def test_tokens_change_later_logits_and_no_earlier_ones():
    model, (inputs, _) = small_gpt(), batch()
    before = model(inputs)
    for place in range(6):
        changed = inputs.clone()
        changed[:, place] = (changed[:, place] + 1) % 11
        after = model(changed)
        torch.testing.assert_close(after[:, :place], before[:, :place])
        assert (after[:, place:] - before[:, place:]).abs().amax(-1).min() > 1e-5


def test_attention_can_be_replaced():
    shapes = []

    def by_hand(q, k, v, causal):
        shapes.append((q.shape, k.shape, v.shape))
        scores = q @ k.mT / math.sqrt(q.shape[-1])
        if causal:
            scores = scores.masked_fill(torch.ones_like(scores).triu(1).bool(), -torch.inf)
        return scores.softmax(-1) @ v

    inputs, _ = batch()
    torch.testing.assert_close(small_gpt(attention=by_hand)(inputs), small_gpt()(inputs))
    assert shapes == [((4, 2, 6, 4),) * 3] * 2


def test_dropout():
    inputs, _ = batch()
    model = small_gpt(dropout=0.5)
    assert not torch.equal(model(inputs), model(inputs))
    model.eval()
    assert torch.equal(model(inputs), small_gpt()(inputs))  # which has none, also while training


# The loss


def test_mean_loss_is_the_mean_in_float32_at_least():
    generator = torch.Generator().manual_seed(0)
    for shape, dtype in (((5, 11), torch.float64), ((4, 6, 11), torch.bfloat16)):
        logits = torch.randn(shape, generator=generator).to(dtype)
        targets = torch.arange(math.prod(shape[:-1])).view(shape[:-1]) % 11
        loss = mean_loss(logits, targets)
        chosen = logits.double().log_softmax(-1).gather(-1, targets.unsqueeze(-1))
        assert loss.dtype == torch.promote_types(dtype, torch.float32)
        torch.testing.assert_close(loss, -chosen.mean().to(loss.dtype))


def test_nothing_to_learn_from_is_no_nan():
    model, nothing = small_gpt(), torch.zeros(0, 6, dtype=torch.int64)
    found = gradients(model, nothing, nothing)
    assert mean_loss(model(nothing), nothing) == 0
    assert len(found) == sum(weight.requires_grad for weight in model.parameters())
    assert not any(gradient.any() for gradient in found.values())


# Training


def evaluate(model, tokens):
    with torch.no_grad():
        inputs, targets = next(iter(Batches(tokens, batch_size=64, length=64)))
        return mean_loss(model(inputs), targets).item()


def test_it_learns_a_text():
    """At first all bytes are about equally likely; trained, it beats on an unseen part any guess
    that doesn't look at the other bytes: the loss of those is the entropy at least."""
    torch.manual_seed(0)
    model, tokens = GPT(), encode(text())
    start = 9 * len(tokens) // 10
    tokens, unseen = tokens[:start], tokens[start:]
    assert evaluate(model, tokens) == pytest.approx(math.log(256), abs=0.1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for inputs, targets in islice(Batches(tokens, batch_size=16, length=32), 50):
        optimizer.zero_grad()
        mean_loss(model(inputs), targets).backward()
        optimizer.step()
    shares = torch.bincount(unseen).double() / len(unseen)
    assert evaluate(model, unseen) < -torch.xlogy(shares, shares).sum().item()


def mlp_data():
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(12, 16, generator=generator)
    return rows, torch.randint(4, (12,), generator=generator)


@pytest.mark.parametrize(("make", "data"), [(small_gpt, batch), (MLP, mlp_data)])
def test_no_gradient_is_rounding_error(make, data):
    """Adam steps however small a gradient is: of rounding errors, ranks would part from a twin."""
    torch.manual_seed(0)
    model, (inputs, targets) = make(), data()
    rounded = gradients(model, inputs, targets)
    inputs = inputs.double() if inputs.is_floating_point() else inputs
    for name, exact in gradients(model.double(), inputs, targets).items():
        assert (rounded[name] - exact).norm() < 1e-4 * exact.norm(), name


def test_batch_norm_on_shares_is_not_batch_norm_on_the_batch():
    model, (x, _) = MLP(), mlp_data()
    assert (model(x) - torch.cat([model(share) for share in x.chunk(2)])).abs().max() > 0.01
    model.eval()
    torch.testing.assert_close(model(x), torch.cat([model(share) for share in x.chunk(2)]))


def test_mistakes_are_named():
    with pytest.raises(ValueError, match="width 8 can't be shared among 3 heads: make it a mult"):
        GPT(width=8, heads=3)
    with pytest.raises(ValueError, match=r"sequences of 7 tokens, expected at most 6: cut them"):
        small_gpt()(torch.zeros(1, 7, dtype=torch.int64))
