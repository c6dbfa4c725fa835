"""Answers to the exercises of notebook 11 that are right in another way than the reference."""

from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F

from ddpkit.tensor_parallel import ColumnParallelLinear, RowParallelLinear


class CopyAsItIs(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group=None):
        ctx.all_reduce = partial(dist.all_reduce, group=group)
        return x

    @staticmethod
    def backward(ctx, gradient):
        total = gradient + 0
        ctx.all_reduce(total)
        return total, None


class SumsInTheBackground(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group=None):
        total = x.clone()
        work = dist.all_reduce(total, group=group, async_op=True)
        work.wait()
        return total

    @staticmethod
    def backward(ctx, gradient):
        return gradient.clone(), None


class RowWithABiasOfItsOwn(RowParallelLinear):
    def forward(self, x):
        out = SumsInTheBackground.apply(x @ self.weight.T, self.group)
        out += self.bias
        return out


class MLPOfTheLibrary(torch.nn.Module):
    """Its layers broadcast their weights, which isn't of any step."""

    def __init__(self, up, down):
        super().__init__()
        self.up, self.down = ColumnParallelLinear(up), RowParallelLinear(down)
        self.down_bias = self.down.bias

    def forward(self, x):
        return self.down(F.gelu(self.up(x)))


def share_by_counting(batch, mesh):
    """From the rank in the world, as in Megatron: ranks of one model are neighbours."""
    row = dist.get_rank() // mesh.size(1)
    return batch.view(mesh.size(0), -1)[row], 100 + row


RIGHT = [
    ("CopyToRanks", CopyAsItIs),
    ("SumOverRanks", SumsInTheBackground),
    ("RowParallelLinear", RowWithABiasOfItsOwn),
    ("ParallelMLP", MLPOfTheLibrary),
    ("rows_and_seed", share_by_counting),
]


def share_of_a_mesh_with_two_rows(batch, mesh):
    row = mesh.get_local_rank("data") % 2
    return batch.chunk(min(2, mesh["data"].size()))[row], mesh.get_local_rank("data")


class SumsInFloat64(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group=None):
        total = x.double()
        dist.all_reduce(total, group=group)
        return total.to(x.dtype)

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


class SumsInFloat32(SumsInFloat64):
    @staticmethod
    def forward(ctx, x, group=None):
        return SumsInTheBackground.forward(ctx, x.float(), group).to(x.dtype)


class RowOfMatrices(RowParallelLinear):
    def forward(self, x):
        return SumsInTheBackground.apply(x.mm(self.weight.T), self.group) + self.bias


WRONG = [
    ("SumOverRanks", SumsInFloat64, "bytes of its call"),
    ("SumOverRanks", SumsInFloat32, "bytes of its call"),
    ("RowParallelLinear", RowOfMatrices, "self must be a matrix"),
    ("rows_and_seed", share_of_a_mesh_with_two_rows, "a mesh of 4 × 1"),
]
