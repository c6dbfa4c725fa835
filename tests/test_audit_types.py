"""Types of tensor- and sequence-parallel blocks, right and wrong, without processes."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from ddpkit import launch
from ddpkit.audit import types
from ddpkit.audit.kinds import OPEN, PARTIAL, REPLICATED, VARYING, Untyped, result, sharded
from ddpkit.models import GPT, Block, torch_attention
from ddpkit.tensor_parallel import (
    ColumnParallelLinear,
    CopyToRanks,
    GatherTokens,
    ParallelGPT,
    RowParallelLinear,
    ScatterTokens,
    SumOverRanks,
    split_block,
)

X = torch.ones(2, 6, 16)
TOKENS = torch.zeros(2, 6, dtype=torch.int64)
PARTS = {"given": sharded(-2), "sums_copies": True}  # of sequence parallelism


class Nothing(torch.autograd.Function):
    """In the place of f or g: no call at all."""

    @staticmethod
    def forward(ctx, x, group=None):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


class ByPyTorch(torch.autograd.Function):
    """A g whose backward sums as well: `torch.distributed.nn.functional.all_reduce`."""

    @staticmethod
    def forward(ctx, x, group=None):
        return SumOverRanks.forward(ctx, x, group)

    @staticmethod
    def backward(ctx, gradient):
        return SumOverRanks.forward(ctx, gradient), None


def block(enter=CopyToRanks, leave=SumOverRanks, change=None):
    """Return what makes a split block; change: what is done to it, to make it wrong."""

    def make():
        made = split_block(Block(16, 4, 0.0, torch_attention), None, enter, leave)
        if change:
            change(made)
        return made

    return make


def gpt(sequence):
    return lambda: ParallelGPT(GPT(32, 8, 16, 4, 1), sequence=sequence)


# Right ones


def test_kinds_of_a_block():
    report = types(block(), X)
    assert report.fine
    assert report.kinds == {
        "attention_norm": REPLICATED,
        "qkv": sharded(-1),
        "out": REPLICATED,
        "dropout": REPLICATED,
        "mlp_norm": REPLICATED,
        "mlp.0": sharded(-1),
        "mlp.1": sharded(-1),
        "mlp.2": REPLICATED,
        "mlp": REPLICATED,
        "": REPLICATED,
    }
    assert str(report).splitlines()[1] == f"{'qkv':<28} sharded along -1"
    assert str(report).endswith("all kinds fit")
    assert not dist.is_initialized()


@pytest.mark.parametrize("world_size", [2, 4])
def test_right_models(world_size):
    assert types(gpt(False), TOKENS, TOKENS, world_size=world_size).fine
    length = torch.zeros(3, 8, dtype=torch.int64)
    report = types(gpt(True), length, length, world_size=world_size, sums_copies=True)
    assert report.fine
    assert report.kinds["blocks.0.attention_norm"] == sharded(-2)
    assert report.kinds[""] == REPLICATED


def test_a_block_of_parts_of_tokens():
    report = types(block(GatherTokens, ScatterTokens), X[:, :3], **PARTS)
    assert report.fine
    assert report.kinds[""] == sharded(-2)


def test_input_that_wants_no_gradient_needs_no_f():
    assert types(block(enter=Nothing), X).wrong.startswith("qkv (ColumnParallelLinear)")
    make = lambda: ColumnParallelLinear(nn.Linear(16, 8), enter=Nothing)  # noqa: E731
    assert types(make, X, given=None).fine


def of_a_rank():
    return types(block(), X).fine, dist.get_world_size()


def test_among_real_ranks():
    assert list(launch(of_a_rank, world_size=2)) == [(True, 2)] * 2


# Wrong ones


def without_bias(made):
    made.mlp[2].bias = None


def bias_in_the_sum(made):
    made.mlp[2] = BiasInside(nn.Linear(64, 16))


def shared_bias(made):
    made.mlp[2] = SharedBias(nn.Linear(64, 16))


def norm_of_parts(made):
    made.mlp.insert(1, nn.RMSNorm(32))


def norm_before_the_sum(made):
    made.out = nn.Sequential(RowParallelLinear(nn.Linear(16, 16, bias=False), leave=Nothing))
    made.out.append(nn.LayerNorm(16))


def summed_again(made):
    made.mlp.append(Sum())


class Sum(nn.Module):
    def forward(self, x):
        total = x.clone()
        dist.all_reduce(total)
        return total


class BiasInside(RowParallelLinear):
    def forward(self, x):
        return self.leave.apply(nn.functional.linear(x, self.weight, self.bias), self.group)


class SharedBias(RowParallelLinear):
    def forward(self, x):
        share = self.bias / dist.get_world_size()
        return self.leave.apply(nn.functional.linear(x, self.weight) + share, self.group)


NO_KIND = "partial + replicated is of no kind"
WRONG = {
    "f forgotten": (block(enter=Nothing), {}, "qkv (ColumnParallelLinear)", "f is missing"),
    "g forgotten": (block(leave=Nothing), {}, "out (RowParallelLinear)", "summands"),
    "a raw sum of what is summed": (block(change=summed_again), {}, "mlp.3 (Sum)", "all_reduce"),
    "bias in the sum": (block(change=bias_in_the_sum), {}, "mlp.2 (BiasInside)", NO_KIND),
    "a share of the bias": (block(change=shared_bias), {}, "mlp.2 (SharedBias)", NO_KIND),
    "partial into a norm": (block(change=norm_before_the_sum), {}, "out.0", "Nothing of summands"),
    "norm over hidden parts": (block(change=norm_of_parts), {}, "mlp.1 (RMSNorm)", "a norm over"),
    "g that sums backward": (block(leave=ByPyTorch), {}, "out (RowParallelLinear)", "W times"),
    "f for g": (block(leave=CopyToRanks), {}, "out", "needs what is replicated, got what is par"),
    "g for f": (block(enter=SumOverRanks), {}, "qkv", "needs what is partial, got what is repl"),
    "copies never summed": (
        block(GatherTokens, ScatterTokens),
        {"given": sharded(-2)},
        "attention_norm (LayerNorm)",
        "no one adds them up",
    ),
    "copies summed in vain": (block(), {"sums_copies": True}, "attention_norm", "W times"),
    "tokens not gathered": (block(Nothing, ScatterTokens), PARTS, "qkv", "sharded along -2"),
    "tokens whole after the sum": (
        block(GatherTokens, SumOverRanks),
        PARTS,
        "out (RowParallelLinear)",
        "W times too large",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_the_first_wrong_module_is_named(name):
    make, options, where, why = WRONG[name]
    x = X[:, :3] if "given" in options else X
    report = types(make, x, **options)
    assert report.wrong.startswith(where), report
    assert why in report.wrong


def test_sum_that_never_comes():
    make = lambda: RowParallelLinear(nn.Linear(16, 8, bias=False), leave=CopyToRanks)  # noqa: E731
    report = types(make, X[..., :8], given=sharded(-1))
    assert "CopyToRanks needs what is replicated" in report.wrong
    report = types(Raw, X[..., :8], given=sharded(-1))
    assert report.wrong == "the module (Raw): its output is partial, and no sum follows"


class Raw(RowParallelLinear):
    def __init__(self):
        super().__init__(nn.Linear(16, 8, bias=False))

    def forward(self, x):
        return nn.functional.linear(x, self.weight)


class WithExperts(nn.Module):
    """An expert on each rank, and one that all have; sglang#26845 sums the second as well."""

    def __init__(self, inside):
        super().__init__()
        self.inside = inside
        self.shared = nn.Linear(4, 4)
        self.mine = nn.Linear(4, 4)

    def forward(self, x):
        routed = self.mine(x)
        if self.inside:
            return SumOverRanks.apply(self.shared(x) + routed, None)
        return self.shared(x) + SumOverRanks.apply(routed, None)


def test_a_shared_expert_in_the_sum_of_experts():
    x = torch.ones(3, 4)
    options = {"given": None, "of": {"mine": VARYING}}
    assert types(lambda: WithExperts(False), x, **options).fine
    report = types(lambda: WithExperts(True), x, **options)
    assert report.kinds == {"mine": VARYING, "shared": REPLICATED}
    assert report.wrong.startswith("the module (WithExperts): add of one that is replicated and")


MUTANTS = {
    "f": (CopyToRanks, "backward", lambda ctx, g: (g, None), "f is missing"),
    "g": (SumOverRanks, "forward", lambda ctx, x, group=None: x.clone(), "SumOverRanks of summ"),
    "gather": (GatherTokens, "backward", lambda ctx, g: (g[:, :3], None), "blocks"),
    "scatter": (ScatterTokens, "backward", lambda ctx, g: (torch.cat([g, g], 1), None), "no pair"),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_pair_that_lost_a_call(name, monkeypatch):
    function, method, mutant, why = MUTANTS[name]
    monkeypatch.setattr(function, method, staticmethod(mutant))
    sequence = name in ("gather", "scatter")
    report = types(gpt(sequence), TOKENS, TOKENS, sums_copies=sequence)
    assert why in report.wrong


# Rules


def kind_of(name, *kinds, shape=(2, 3, 4), args=(), **kwargs):
    tensors = [torch.ones(shape) for _ in kinds]
    of = {id(x): kind for x, kind in zip(tensors, kinds, strict=True)}
    return result(name, (*tensors, *args), kwargs, lambda x: of.get(id(x)))


@pytest.mark.parametrize(
    ("expected", "name", "kinds", "args"),
    [
        (PARTIAL, "add", [PARTIAL, PARTIAL], ()),
        (PARTIAL, "mul", [PARTIAL], (3,)),
        (PARTIAL, "sum", [sharded(-1)], (-1,)),
        (PARTIAL, "sum", [sharded(-1)], ()),
        (sharded(-1), "sum", [sharded(-2)], (-1,)),
        (sharded(-2), "sum", [sharded(-2)], (0,)),
        (sharded(-2), "sum", [sharded(-2)], (-1, True)),
        (PARTIAL, "sum", [sharded(-2)], (1, True)),
        (sharded(-1), "softmax", [sharded(-1)], (-2,)),
        (sharded(-1), "add", [sharded(-1), OPEN], ()),
        (sharded(-1), "add", [sharded(-1), None], ()),
        (VARYING, "add", [sharded(-1), VARYING], ()),
        (sharded(-2), "transpose", [sharded(-1)], (1, 2)),
        (sharded(-3), "transpose", [sharded(-3)], (1, 2)),
        (sharded(-2), "unflatten", [sharded(-1)], (-1, (2, 2))),
        (sharded(-3), "unflatten", [sharded(-2)], (-1, (2, 2))),
        (sharded(-1), "unflatten", [sharded(-1)], (1, (3, 1))),
        (sharded(-1), "flatten", [sharded(-2)], (1,)),
        (VARYING, "flatten", [sharded(-1)], (1,)),
        (sharded(-1), "flatten", [sharded(-1)], (0, 1)),
        (sharded(-2), "flatten", [sharded(-3)], (1, 2)),
        (PARTIAL, "gather", [sharded(-1)], (-1,)),
        (None, "add", [None, None], ()),
        (PARTIAL, "dropout", [PARTIAL], (0.0, True)),
        (PARTIAL, "dropout", [PARTIAL], (0.5, False)),
    ],
)
def test_rules(expected, name, kinds, args):
    assert kind_of(name, *kinds, args=args) == expected


@pytest.mark.parametrize(
    ("name", "kinds", "args"),
    [
        ("gelu", [PARTIAL], ()),
        ("mul", [PARTIAL, PARTIAL], ()),
        ("add", [PARTIAL], (1.0,)),
        ("add", [PARTIAL, None], ()),
        ("add", [REPLICATED, OPEN], ()),
        ("add", [REPLICATED, sharded(-1)], ()),
        ("add", [sharded(-1), sharded(-2)], ()),
        ("softmax", [sharded(-1)], (-1,)),
        ("log_softmax", [sharded(-1)], (None,)),
        ("softmax", [sharded(-2)], (1,)),
        ("softmax", [PARTIAL], (-1,)),
        ("layer_norm", [sharded(-1)], ((4,),)),
        ("dropout", [PARTIAL], (0.5, True)),
    ],
)
def test_what_is_of_no_kind(name, kinds, args):
    with pytest.raises(Untyped):
        kind_of(name, *kinds, args=args)


def test_a_tensor_that_is_given_by_name_counts():
    x, given = torch.ones(2, 3), {"other": torch.ones(2, 3)}
    assert result("add", (x,), given, {x: None, given["other"]: sharded(-1)}.get) == sharded(-1)
    with pytest.raises(Untyped, match=r"partial \+ a constant is of no kind"):
        result("add", (x,), given, {x: None, given["other"]: PARTIAL}.get)
