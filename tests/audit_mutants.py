"""Mutants of the library's own subjects, and the instrument of the audit that catches each.

    python tests/audit_mutants.py       # all of them, and the table

A mutant is one statement changed: a collective dropped, doubled, made by all but the last rank, or
given another operation; a division dropped or done twice; a sum overwritten. It is tried in a real
training on ranks, with the twin (`same_training`), agreement of ranks and the budget of the wire.
"""

import ast
import contextlib
import importlib
import inspect
import sys
import textwrap
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from ddpkit import HangError, RankError, launch
from ddpkit.audit import agree, compare
from ddpkit.audit.budget import traffic
from ddpkit.audit.training import record
from ddpkit.data_parallel import NaiveDDP
from ddpkit.ddp import BucketedDDP, FlatDDP, OverlapDDP
from ddpkit.models import GPT, mean_loss
from ddpkit.tensor_parallel import ParallelGPT, clip_grad_norm
from ddpkit.tensor_parallel.split import count_copies
from ddpkit.zero import ZeroOptimizer

COLLECTIVES = "all_reduce", "broadcast", "all_gather", "start_reduce_scatter", "start_all_gather"
STEPS = 2


@dataclass(frozen=True)
class Target:
    """A function of the library, and the training that uses it.

    where: module and qualified name. train: on ranks; serial: its twin.
    """

    where: tuple[str, str]
    train: str
    world_size: int = 3


# Trainings: on the batch's 12 rows, cut evenly; MLP has buffers, GPT a tied and a frozen weight.


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(0, 32, (12, 9), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def model() -> GPT:
    torch.manual_seed(0)
    return GPT(vocabulary=32, context=8, width=16, heads=2, layers=1)


def mine(step: int) -> list[torch.Tensor]:
    return [part.chunk(dist.get_world_size())[dist.get_rank()] for part in batch(step)]


def serial() -> None:
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.5)
    for step in range(STEPS):
        inputs, targets = batch(step)
        optimizer.zero_grad()
        mean_loss(net(inputs), targets).backward()
        optimizer.step()


def serial_clipped() -> None:
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for step in range(STEPS):
        optimizer.zero_grad()
        inputs, targets = batch(step)
        mean_loss(net(inputs), targets).backward()
        nn.utils.clip_grad_norm_(net.parameters(), 0.1)
        optimizer.step()


def data_parallel(wrap):
    def train():
        torch.manual_seed(dist.get_rank())  # the wrapper must make them equal
        net = model() if dist.get_rank() == 0 else GPT(32, 8, 16, 2, 1)
        net = wrap(net)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.5)
        for step in range(STEPS):
            inputs, targets = mine(step)
            optimizer.zero_grad()
            for part in range(2):  # accumulation: the first without sending
                x, y = inputs.chunk(2)[part], targets.chunk(2)[part]
                with net.no_sync() if part == 0 else contextlib.nullcontext():
                    (mean_loss(net(x), y) / 2).backward()
            net.synchronize()
            optimizer.step()
        return net

    return train


def zero():
    net = model() if dist.get_rank() == 0 else GPT(32, 8, 16, 2, 1)
    options = {"bucket_cap_mb": 0.002, "lr": 0.1, "momentum": 0.5}
    optimizer = ZeroOptimizer(net.parameters(), torch.optim.SGD, **options)
    for step in range(STEPS):
        inputs, targets = mine(step)
        mean_loss(net(inputs), targets).backward()
        optimizer.step()
    return net


def tensor_parallel(sequence):
    def train():
        net = ParallelGPT(model(), sequence=sequence)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for step in range(STEPS):
            optimizer.zero_grad()
            net(*batch(step)).backward()
            net.synchronize()
            clip_grad_norm(count_copies(net), 0.1)
            optimizer.step()
        return net

    return train


TRAININGS = {
    "naive": (serial, data_parallel(NaiveDDP)),
    "flat": (serial, data_parallel(FlatDDP)),
    "overlap": (serial, data_parallel(OverlapDDP)),
    "buckets": (serial, data_parallel(lambda net: BucketedDDP(net, bucket_cap_mb=0.002))),
    "zero": (serial, zero),
    "tensor": (serial_clipped, tensor_parallel(False)),
    "sequence": (serial_clipped, tensor_parallel(True)),
}
TARGETS = [
    Target(("ddpkit.data_parallel", "average_gradients"), "naive"),
    Target(("ddpkit.data_parallel", "broadcast_module"), "naive"),
    Target(("ddpkit.ddp", "FlatDDP.synchronize"), "flat"),
    Target(("ddpkit.ddp", "OverlapDDP.ready"), "overlap"),
    Target(("ddpkit.ddp", "BucketedDDP.ready"), "buckets"),
    Target(("ddpkit.ddp", "BucketedDDP.synchronize"), "buckets"),
    Target(("ddpkit.ddp", "Bucket.take"), "buckets"),
    Target(("ddpkit.zero.optimizer", "ZeroOptimizer.__init__"), "zero"),
    Target(("ddpkit.zero.optimizer", "ZeroOptimizer.send"), "zero"),
    Target(("ddpkit.zero.optimizer", "ZeroOptimizer.step"), "zero"),
    Target(("ddpkit.zero.optimizer", "Bucket.mean"), "zero"),
    Target(("ddpkit.tensor_parallel.layers", "CopyToRanks.backward"), "tensor", 2),
    Target(("ddpkit.tensor_parallel.layers", "SumOverRanks.forward"), "tensor", 2),
    Target(("ddpkit.tensor_parallel.layers", "vocabulary_cross_entropy"), "tensor", 2),
    Target(("ddpkit.tensor_parallel.layers", "clip_grad_norm"), "tensor", 2),
    Target(("ddpkit.tensor_parallel.sequence", "gather_tokens"), "sequence", 2),
    Target(("ddpkit.tensor_parallel.sequence", "scatter_tokens"), "sequence", 2),
    Target(("ddpkit.tensor_parallel.sequence", "sum_copies"), "sequence", 2),
]


# Mutants


def called(node: ast.AST) -> str:
    """Name the collective that a statement makes; "" if it makes none."""
    for each in ast.walk(node):
        if isinstance(each, ast.Call) and isinstance(each.func, ast.Attribute | ast.Name):
            name = each.func.attr if isinstance(each.func, ast.Attribute) else each.func.id
            if name in COLLECTIVES:
                return name
    return ""


def changes(statement: ast.stmt) -> Iterator[tuple[str, list[ast.stmt]]]:
    """Yield (what is changed, the statements in its place)."""
    name = called(statement)
    text = ast.unparse(statement)
    simple = isinstance(statement, ast.Expr | ast.Assign)
    if name and simple:
        if isinstance(statement, ast.Expr) and ".wait()" not in text:
            yield f"{name} dropped", [ast.Pass()]
            yield f"{name} twice", [statement, statement]
        if ".wait()" not in text and "all_reduce" in text and "ReduceOp" not in text:
            yield f"{name} takes the maximum", parsed(with_maximum(text))
        last = "dist.get_rank() < dist.get_world_size() - 1"
        if isinstance(statement, ast.Expr):
            yield f"{name} without the last rank", parsed(f"if {last}:\n    {text}")
    if isinstance(statement, ast.AugAssign):
        if isinstance(statement.op, ast.Div):
            yield "division dropped", [ast.Pass()]
            yield "division twice", [statement, statement]
        if isinstance(statement.op, ast.Mult):
            yield "factor dropped", [ast.Pass()]
    if isinstance(statement, ast.Assign) and " / " in text and "share" in text:
        yield "division dropped", parsed(text.replace("1 / ", "1 + 0 * "))


def with_maximum(text: str) -> str:
    """Give a call of all_reduce another operation."""
    return text.replace("all_reduce(", "all_reduce(op=dist.ReduceOp.MAX, tensor=", 1)


def parsed(text: str) -> list[ast.stmt]:
    return ast.parse(text).body


def mutants(target: Target) -> list[tuple[str, str]]:
    """List (what is changed, the whole function's source) of all mutants of a function."""
    function = resolved(target.where)
    source = textwrap.dedent(inspect.getsource(function))
    found = []
    for place, statement in enumerate(statements(ast.parse(source))):
        for what, instead in changes(statement):
            tree = ast.parse(source)
            original = statements(tree)[place]
            replace(tree, original, instead)
            said = ast.unparse(original).splitlines()[0]
            found.append((f"{what}: {said}", ast.unparse(ast.fix_missing_locations(tree))))
    return found


def statements(tree: ast.AST) -> list[ast.stmt]:
    return [node for node in ast.walk(tree) if isinstance(node, ast.stmt)]


def replace(tree: ast.AST, old: ast.stmt, new: list[ast.stmt]) -> None:
    for node in ast.walk(tree):
        for field in ("body", "orelse"):
            block = getattr(node, field, None)
            if isinstance(block, list) and old in block:
                at = block.index(old)
                block[at : at + 1] = new


def resolved(where: tuple[str, str]):
    thing = importlib.import_module(where[0])
    for name in where[1].split("."):
        thing = getattr(thing, name)
    return thing


def put_in(where: tuple[str, str], source: str) -> None:
    """Replace a function in this rank, in every module that has it."""
    module = importlib.import_module(where[0])
    *path, name = where[1].split(".")
    namespace = dict(vars(module))
    if path:  # super() needs the class in whose body it stands
        source = source.replace("super()", f"super({path[0]}, self)")
        exec(source, namespace)
        setattr(getattr(module, path[0]), name, namespace[name])
        return
    before = getattr(module, name)
    exec(source, namespace)
    for each in list(sys.modules.values()):
        if getattr(each, "__dict__", {}).get(name) is before:
            setattr(each, name, namespace[name])


# Instruments


def mutated(target: Target, source: str | None):
    """Run the target's training in a rank, with a mutant or without; (tape, disagreements)."""
    if source is not None:
        put_in(target.where, source)
        if target.where[1] in ("vocabulary_cross_entropy", "clip_grad_norm"):
            globals()["clip_grad_norm"] = resolved(
                ("ddpkit.tensor_parallel.layers", "clip_grad_norm")
            )
            sequence = importlib.import_module("ddpkit.tensor_parallel.sequence")
            layers = importlib.import_module("ddpkit.tensor_parallel.layers")
            sequence.vocabulary_cross_entropy = layers.vocabulary_cross_entropy
    net = []
    tape = record(lambda: net.append(TRAININGS[target.train][1]()), STEPS, False)
    return tape, agree(net[0])


def caught_by(target: Target, source: str) -> list[str]:
    """List what catches a mutant: 'twin ×3', 'agreement', 'budget', 'hang', 'error'."""
    alone = launch(record, TRAININGS[target.train][0], STEPS, False, world_size=1)[0]
    right = launch(mutated, target, None, world_size=target.world_size)
    try:
        run = launch(mutated, target, source, world_size=target.world_size, hang_after=5.0)
    except HangError:
        return ["hang"]
    except RankError:
        return ["error"]
    found = []
    report = compare(alone, [tape for tape, _ in run])
    if not report.fine:
        factor = report.differences[0].factor
        found.append("twin" if factor is None else f"twin ×{factor:.3g}")
    if any(disagreements for _, disagreements in run):
        found.append("agreement")
    ranks = range(target.world_size)
    if any(traffic(run, rank) != traffic(right, rank) for rank in ranks):
        found.append("budget")
    return found


def main() -> int:
    survivors = 0
    by = Counter()
    for target in TARGETS:
        for what, source in mutants(target):
            found = caught_by(target, source)
            by.update({each.split()[0] for each in found} or {"survives"})
            survivors += not found
            print(
                f"{target.where[1]:<28} {what[:60]:<62} {', '.join(found) or 'SURVIVES'}",
                flush=True,
            )
    print(dict(by))
    return survivors


if __name__ == "__main__":
    sys.exit(main())
