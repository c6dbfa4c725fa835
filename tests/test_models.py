"""ddpkit.models: what a wrapper for data parallelism must be able to rely on, and that the GPT learns a real text."""

import copy
import io
import math
from itertools import islice

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from ddpkit.models import GPT, MLP, mean_loss
from ddpkit.tools.text import Batches, encode, text


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def small_gpt(seed=0, **arguments):
    torch.manual_seed(seed)
    return GPT(**{"vocabulary": 11, "context": 6, "width": 8, "heads": 2} | arguments)


def some_tokens(n=4, length=6, vocabulary=11, seed=0):
    return torch.randint(vocabulary, (n, length + 1), generator=torch.Generator().manual_seed(seed)).unfold(
        1, length, 1
    )


def batch(**arguments):
    """Inputs and targets, (4, 6) each."""
    return some_tokens(**arguments).unbind(1)


def gradients(model, inputs, targets):
    model.zero_grad()
    mean_loss(model(inputs), targets).backward()
    return {name: weight.grad.clone() for name, weight in model.named_parameters() if weight.requires_grad}


def entropy(tokens):
    """In nats: the loss of the best guess that doesn't look at other tokens."""
    shares = torch.bincount(tokens).double() / len(tokens)
    return -torch.xlogy(shares, shares).sum().item()


# The tied weight, the frozen parameter, the buffer


def test_the_tied_weight_counts_once():
    block = 8 * 3 * 8 + (8 * 8 + 8) + (8 * 32 + 32) + (32 * 8 + 8) + 2 * (8 + 8)
    expected = 11 * 8 + 6 * 8 + 2 * block + (8 + 8)
    assert sum(weight.numel() for weight in small_gpt(layers=2).parameters()) == expected


@pytest.mark.parametrize("change", [copy.deepcopy, lambda model: model.to(torch.bfloat16)], ids=["copied", "converted"])
def test_the_tied_weight_stays_tied(change):
    model = change(small_gpt())
    assert model.head.weight is model.tokens.weight
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    assert names.count("tokens.weight") == names.count("head.weight") == 1


def test_the_tied_weight_has_the_gradient_of_both_uses():
    model, (inputs, targets) = small_gpt(), batch()
    tied = gradients(model, inputs, targets)["tokens.weight"]
    model.head.weight = nn.Parameter(model.head.weight.detach().clone())
    apart = gradients(model, inputs, targets)
    torch.testing.assert_close(tied, apart["tokens.weight"] + apart["head.weight"])
    assert all(apart[name].any() for name in ("tokens.weight", "head.weight"))


def test_one_parameter_is_frozen_and_all_others_learn():
    model, (inputs, targets) = small_gpt(), batch()
    before = copy.deepcopy(model.state_dict())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.1)
    mean_loss(model(inputs), targets).backward()
    optimizer.step()
    assert [name for name, weight in model.named_parameters() if not weight.requires_grad] == ["positions"]
    assert model.positions.grad is None
    unchanged = [name for name, value in model.state_dict().items() if torch.equal(value, before[name])]
    assert unchanged == ["positions", "prior"]


def test_the_frozen_parameter_matters():
    """Without it, the same token twice is the same place twice."""
    model, same = small_gpt(), torch.full((1, 6), 3)
    with torch.no_grad():
        assert (model(same)[0, 0] - model(same)[0, 1]).abs().max() > 1e-4
        model.positions.zero_()
        torch.testing.assert_close(model(same)[0, 0], model(same)[0, 1])


def test_the_buffer_goes_where_the_model_goes():
    model = small_gpt()
    assert [name for name, _ in model.named_buffers()] == ["prior"]
    assert "prior" in model.state_dict()
    assert model.to(torch.float64).prior.dtype == torch.float64
    assert model.to("meta").prior.is_meta


def test_count():
    model = small_gpt()
    model.count(torch.tensor([3, 3, 3, 7], dtype=torch.uint8))
    expected = torch.ones(11)
    expected[3], expected[7] = 4, 2
    torch.testing.assert_close(model.prior.exp(), expected / 15)


def test_the_prior_is_added_to_the_logits():
    model, (inputs, _) = small_gpt(), batch()
    without = model(inputs)
    model.prior += torch.arange(11)
    torch.testing.assert_close(model(inputs), without + torch.arange(11))


# Attention


def test_later_tokens_never_change_earlier_logits():
    model, (inputs, _) = small_gpt(), batch()
    before = model(inputs)
    for place in range(6):
        changed = inputs.clone()
        changed[:, place:] = (changed[:, place:] + 1) % 11
        after = model(changed)
        torch.testing.assert_close(after[:, :place], before[:, :place])
        assert (after[:, place] - before[:, place]).abs().amax(-1).min() > 1e-3


def test_earlier_tokens_change_later_logits():
    model, (inputs, _) = small_gpt(), batch()
    changed = inputs.clone()
    changed[:, 0] = (changed[:, 0] + 1) % 11
    assert (model(changed) - model(inputs)).abs().amax(-1).min() > 1e-5


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


# The loss


@pytest.mark.parametrize("shape", [(5, 11), (4, 6, 11)])
def test_mean_loss_is_the_mean(shape):
    logits = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    targets = torch.arange(math.prod(shape[:-1])).view(shape[:-1]) % 11
    by_hand = -logits.log_softmax(-1).gather(-1, targets.unsqueeze(-1)).mean()
    torch.testing.assert_close(mean_loss(logits, targets), by_hand)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_mean_loss_is_float32_at_least(dtype):
    logits = torch.randn(50, 11, generator=torch.Generator().manual_seed(0)).to(dtype)
    targets = torch.arange(50) % 11
    loss = mean_loss(logits, targets)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, mean_loss(logits.double(), targets).float())


def test_nothing_to_learn_from_is_no_nan():
    model, nothing = small_gpt(), torch.zeros(0, 6, dtype=torch.int64)
    found = gradients(model, nothing, nothing)
    assert mean_loss(model(nothing), nothing) == 0
    assert len(found) == sum(weight.requires_grad for weight in model.parameters())
    assert not any(gradient.any() for gradient in found.values())


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_gradients_of_shares_average_to_those_of_the_batch(world_size):
    """5 sequences in batches of 4: from 3 ranks on, shares differ, and of the last batch some are empty."""
    model, tokens = small_gpt(), torch.arange(5 * 6 + 1) % 11
    ranks = [Batches(tokens, batch_size=4, length=6, rank=rank, world_size=world_size) for rank in range(world_size)]
    for (inputs, targets), *shares in zip(Batches(tokens, batch_size=4, length=6), *ranks, strict=True):
        found = [gradients(model, *share) for share in shares]
        for name, expected in gradients(model, inputs, targets).items():
            weighted = [rank.weight * gradient[name] for rank, gradient in zip(ranks, found, strict=True)]
            torch.testing.assert_close(sum(weighted) / world_size, expected)


# Training


def parts_of_the_text():
    tokens = encode(text())
    start = 9 * len(tokens) // 10
    return tokens[:start], tokens[start:]


def evaluate(model, tokens):
    with torch.no_grad():
        inputs, targets = next(iter(Batches(tokens, batch_size=256, length=64)))
        return mean_loss(model(inputs), targets).item()


def test_before_it_has_learnt():
    """All bytes are about equally likely, and the loss is ln 256; told their shares, it is their entropy."""
    torch.manual_seed(0)
    model = GPT()
    tokens, _ = parts_of_the_text()
    assert evaluate(model, tokens) == pytest.approx(math.log(256), abs=0.1)
    model.count(tokens)
    assert evaluate(model, tokens) == pytest.approx(entropy(tokens), abs=0.1)
    assert entropy(tokens) < math.log(256) - 1


def test_it_learns_a_text():
    """On a part of the text that it hasn't seen, it does better than any guess that doesn't look at the other bytes."""
    torch.manual_seed(0)
    model = GPT()
    tokens, unseen = parts_of_the_text()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for inputs, targets in islice(Batches(tokens, batch_size=16, length=64), 100):
        optimizer.zero_grad()
        mean_loss(model(inputs), targets).backward()
        optimizer.step()
    assert evaluate(model, unseen) < entropy(unseen)


def test_in_bf16():
    """Every number is rounded by up to 1/256; some ten roundings, one after the other, leave less than a tenth."""
    model, (inputs, targets) = small_gpt(), batch()
    expected = gradients(model, inputs, targets)
    model.to(torch.bfloat16)
    assert model(inputs).dtype == torch.bfloat16
    for name, gradient in gradients(model, inputs, targets).items():
        assert gradient.dtype == torch.bfloat16
        assert (gradient - expected[name]).norm() < 0.1 * expected[name].norm(), name


def mlp_data():
    generator = torch.Generator().manual_seed(0)
    return torch.randn(12, 16, generator=generator), torch.randint(4, (12,), generator=generator)


@pytest.mark.parametrize(("model", "data"), [(small_gpt, batch), (MLP, mlp_data)], ids=["GPT", "MLP"])
def test_no_gradient_is_rounding_error(model, data):
    """Adam makes a step of a gradient however small; of rounding errors, ranks and their serial twin would part."""
    torch.manual_seed(0)
    model, (inputs, targets) = model(), data()
    rounded = gradients(model, inputs, targets)
    model.double()
    exact = gradients(model, inputs.double() if inputs.is_floating_point() else inputs, targets)
    for name, gradient in exact.items():
        assert (rounded[name] - gradient).norm() < 1e-4 * gradient.norm(), name


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_activation_checkpointing_changes_nothing(use_reentrant):
    model, (inputs, targets) = small_gpt(dropout=0.3), batch()
    torch.manual_seed(1)
    expected = gradients(model, inputs, targets)
    for block in model.blocks:
        forward = block.forward
        block.forward = lambda x, forward=forward: checkpoint(forward, x, use_reentrant=use_reentrant)
    torch.manual_seed(1)
    found = gradients(model, inputs, targets)
    assert found.keys() == expected.keys()
    assert all(torch.equal(gradient, expected[name]) for name, gradient in found.items())


def test_dropout():
    inputs, _ = batch()
    model = small_gpt(dropout=0.5)
    assert not torch.equal(model(inputs), model(inputs))
    model.eval()
    assert torch.equal(model(inputs), model(inputs))
    assert torch.equal(model(inputs), small_gpt()(inputs))  # which has none, also while training
    assert not small_gpt(dropout=1.0)(inputs).any()


# Saved, and drawn again


def test_saved_and_loaded():
    saved, loaded, (inputs, _) = small_gpt(seed=0), small_gpt(seed=1), batch()
    saved.count(inputs.flatten())
    assert not torch.equal(loaded(inputs), saved(inputs))
    file = io.BytesIO()
    torch.save(saved.state_dict(), file)
    file.seek(0)
    loaded.load_state_dict(torch.load(file))
    assert torch.equal(loaded(inputs), saved(inputs))
    assert loaded.head.weight is loaded.tokens.weight


def test_the_seed_decides_the_weights():
    one, again, other = (dict(small_gpt(seed).named_parameters()) for seed in (0, 0, 1))
    assert all(torch.equal(weight, again[name]) for name, weight in one.items())
    matrices = [name for name, weight in one.items() if weight.dim() == 2]
    assert "positions" in matrices
    assert not any(torch.equal(one[name], other[name]) for name in matrices)


# Batch norm


def test_batch_norm_on_shares_is_not_batch_norm_on_the_batch():
    model, (x, _) = MLP(), mlp_data()
    whole = model(x)
    shares = torch.cat([model(share) for share in x.chunk(2)])
    assert (whole - shares).abs().max() > 0.01
    model.eval()
    torch.testing.assert_close(model(x), torch.cat([model(share) for share in x.chunk(2)]))


def test_batch_norm_needs_two_rows():
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        MLP()(torch.zeros(1, 16))


# Mistakes


def test_mistakes_are_named():
    with pytest.raises(ValueError, match="width 8 can't be shared among 3 heads: make it a multiple"):
        GPT(width=8, heads=3)
    with pytest.raises(ValueError, match=r"sequences of 7 tokens, expected at most 6: cut them, or .*context=7"):
        small_gpt()(torch.zeros(1, 7, dtype=torch.int64))
