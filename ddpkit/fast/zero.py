"""`ddpkit.zero.ZeroOptimizer` for real runs: the same name, arguments and results.

It adds
- float32 master copies of the shards of half-precision parameters;
- `clip_grad_norm_`, by the norm of all ranks' shards together;
- checkpoints that any number of ranks can load, and a plain optimizer;
- buffers in memory that all ranks see, with a transport that makes them (`ddpkit.fast.transports`);
- on CPUs a ring of segments as the transport, where none is given;
- refusals: optimizers that look at a parameter as a whole, parameter groups added late.
"""

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from .. import transport as torchs
from .. import zero
from ..fsdp import clip_grad_norm_
from .ring import RingTransport

MASTER = "master"  # its name in a state_dict, beside AdamW's exp_avg
NOT_ELEMENTWISE = torch.optim.Adafactor, torch.optim.LBFGS, torch.optim.Muon, torch.optim.SparseAdam


class Bucket(zero.Bucket):
    """`zero.Bucket` in which, with half-precision parameters, `shard` is a float32 master copy.

    Without it, an update smaller than the spacing of the half format would be lost.
    """

    def __init__(self, parameters: list[nn.Parameter], group: ProcessGroup | None, transport):
        self.transport = transport
        super().__init__(parameters, group)
        self.own = self.shard.detach()  # a view of `flat`
        self.half = self.own.dtype.itemsize < torch.float32.itemsize
        if self.half:
            self.shard = nn.Parameter(self.own.float())

    def zeros(self) -> Tensor:
        if hasattr(self.transport, "zeros"):
            return self.transport.zeros(self.numel, self.parameters[0].dtype, self.group)
        return super().zeros()

    def mean(self) -> Tensor:
        """Return the shard's mean gradient: `shard.grad` if it is set, as it may be clipped."""
        if self.shard.grad is not None:
            return self.shard.grad
        return super().mean().to(self.shard.dtype)  # itself, if the dtype is the same

    def round_master(self, *_) -> None:
        """Round the float32 master copy into this rank's part of the half-precision parameters."""
        self.own.copy_(self.shard.detach())

    # Checkpoints

    def state(self) -> dict[str, object]:
        """Return {name: value}, the optimizer's state of the shard; {} before the first step.

        With half-precision parameters the master copy is in it, as "master".
        """
        found = self.optimizer.state[self.shard]
        return {**found, MASTER: self.shard.detach()} if found and self.half else found

    def gather_state(self) -> list[dict]:
        """Return {name: value} for each parameter, its whole state; every rank must call."""
        states = [{} for _ in self.parameters]
        for name, value in self.state().items():
            values = [value] * len(states)  # kept once for all, as a counter of steps
            if value.shape == self.shard.shape:
                flat = value.new_zeros(self.numel)
                torchs.shard(flat, self.group).copy_(value)
                torchs.start_all_gather(flat, self.group).wait()
                values = self.split(flat)
            for state, part in zip(states, values, strict=True):
                state[name] = part.clone()
        return states

    def load_state(self, states: list[dict]) -> None:
        """Load this rank's part of the states of all parameters, {name: value} for each.

        ValueError: some have states and others haven't, or a value that is kept once for all, as a
        counter of steps, differs between them.
        """
        if any(state.keys() != states[0].keys() for state in states):
            got = f"that of {sum(map(bool, states))} of {len(states)}"
            expected = "expected state of all parameters that share a bucket, or of none"
            remedy = "Give the others a group of their own, in both optimizers."
            raise ValueError(f"{expected}, got {got}. {remedy}")
        loaded = {}
        for name, first in states[0].items():
            values = [state[name] for state in states]
            if name != "step" and first.shape == self.parameters[0].shape:
                flat = self.shard.detach().new_zeros(self.numel)
                for part, value in zip(self.split(flat), values, strict=True):
                    part.copy_(value)
                loaded[name] = torchs.shard(flat, self.group).clone()
            elif all(value == first for value in values):  # kept once for all
                loaded[name] = first.clone()
            else:
                got = f"{', '.join(map(str, values))}. Give them groups of their own."
                expected = f"expected the same {name!r} for parameters that share a bucket"
                raise ValueError(f"{expected}, got {got}")
        master = loaded.pop(MASTER, self.own)
        if self.half:
            self.shard.data.copy_(master)
        options = self.optimizer.state_dict()["param_groups"]
        state = {0: loaded} if loaded else {}
        self.optimizer.load_state_dict({"state": state, "param_groups": options})


class ZeroOptimizer(zero.ZeroOptimizer):
    """`zero.ZeroOptimizer` with the additions that the module's docstring lists.

    transport: None is a ring of segments on CPUs, torch's own collectives elsewhere.
    ValueError: Adafactor, LBFGS, Muon or SparseAdam, which aren't elementwise; a group added late;
    all that `zero.ZeroOptimizer` refuses.

    Gradients are sent and added up in the parameters' dtype. Cost as of `zero.ZeroOptimizer`; with
    half-precision parameters AdamW keeps 12 bytes for each, master copy included. Notebook 07.
    """

    def __init__(
        self, params, optimizer_cls, bucket_cap_mb=25.0, group=None, transport=None, **kwargs
    ):
        if issubclass(optimizer_cls, NOT_ELEMENTWISE):
            got = f"{optimizer_cls.__name__}, which looks at a parameter as a whole"
            remedy = "A shard is only a part. Take AdamW, for example."
            raise ValueError(f"expected an elementwise optimizer, got {got}. {remedy}")
        super().__init__(params, optimizer_cls, bucket_cap_mb, group, transport or torchs, **kwargs)
        if transport is None and self.buckets and self.buckets[0].flat.is_cpu:
            self.transport = RingTransport()
        for bucket in self.buckets:
            if bucket.half:
                bucket.optimizer.register_step_post_hook(bucket.round_master)

    def make_bucket(self, parameters: list[nn.Parameter]) -> Bucket:
        return Bucket(parameters, self.group, self.transport)

    def add_param_group(self, param_group: dict) -> None:
        if hasattr(self, "buckets"):
            raise ValueError("the buckets are made: give all groups to ZeroOptimizer at once")
        super().add_param_group(param_group)

    def state_bytes(self) -> int:
        """Count the bytes of this rank's optimizer state, master copies included, after a step."""
        return super().state_bytes() + sum(b.shard.nbytes for b in self.buckets if b.half)

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Scale the mean gradient to a norm of at most `max_norm`; return the norm that it had.

        Every rank must call, after backward, before `step`. Cost: one number all-reduced.
        ValueError: a parameter has no gradient. `torch.nn.utils.clip_grad_norm_` would find none.
        """
        self.synchronize()
        gradients = [bucket.shard.grad for bucket in self.buckets]
        return clip_grad_norm_(gradients, max_norm, self.group)

    def state_dict(self) -> dict:
        """Gather the state of all ranks, as `optimizer_cls` without ZeRO would save it.

        Every rank must call. Half-precision parameters also have "master". The parameters aren't in
        it: save the module as well. Cost: (W-1)/W of the state sent by each rank, which then has
        all of it in memory.
        """
        saved = super().state_dict()
        numbers = {parameter: number for number, parameter in enumerate(self.places)}
        for bucket in self.buckets:
            for parameter, state in zip(bucket.parameters, bucket.gather_state(), strict=True):
                if state:
                    saved["state"][numbers[parameter]] = state
        return saved

    def load_state_dict(self, state_dict: dict) -> None:
        """Take this rank's part of a `state_dict`, saved on any number of ranks.

        A plain optimizer's serves as well. Load the module first: master copies that `state_dict`
        lacks are made from its parameters.
        ValueError: other groups than here; counters of steps that differ within a bucket, or states
        that only some of its parameters have.
        """
        super().load_state_dict({**state_dict, "state": {}})
        states = state_dict["state"]
        numbers = {parameter: number for number, parameter in enumerate(self.places)}
        for bucket in self.buckets:
            bucket.load_state([states.get(numbers[p], {}) for p in bucket.parameters])
