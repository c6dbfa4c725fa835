"""Units of FSDP: parameters that travel together, as shards of which every rank keeps one.

Each parameter is cut along its first axis into W parts of ⌈d/W⌉ rows, the last ones ragged or
empty. A message holds, rank after rank, the parts of all parameters of a unit, each padded to its
full number of rows: the layout of PyTorch's `fully_shard`, and so the same bytes.

    gather    shards of W ranks -> whole weights, in the compute dtype, which the modules use now
    drop      the memory of the whole weights is given back, and the modules have the shards
    reduce    whole gradients -> each rank's part of their mean, added to `shard.grad`

Notebook 12.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from .. import transport as torchs
from .shards import Sharded


class Unit:
    """Parameters of a module: one all-gather gathers them, one reduce-scatter their gradients.

    compute_dtype: of the whole weights; None: the parameters' own. reduce_dtype: in which gradients
    are sent; None: the compute dtype. transport: as in `ddpkit.transport`.
    ValueError: the parameters have several dtypes.

    Memory beyond shards and gradients: W padded parts while the weights are on their way or whole,
    twice that while `gather` copies them.
    """

    def __init__(
        self,
        name: str,
        module: nn.Module,
        sharded: list[Sharded],
        compute_dtype: torch.dtype | None,
        reduce_dtype: torch.dtype | None,
        group: ProcessGroup | None,
        transport,
    ):
        self.name = name
        members = [entry.name for entry in sharded]
        self.label = f"{name} ({', '.join(members[:1])}{' ...' * (len(members) > 1)})"
        self.module = module
        self.sharded = sharded
        self.group = group
        self.transport = transport
        self.world_size = dist.get_world_size(group)
        self.shard_dtype, self.device = one_dtype_of(name, sharded)
        self.dtype = compute_dtype or self.shard_dtype
        self.reduce_dtype = reduce_dtype or self.dtype
        self.numels = [entry.numel for entry in sharded]
        # The whole weights are views of one memory, which comes and goes with its size.
        self.memory = self.new_flat(self.dtype)
        self.nbytes = self.memory.nbytes
        self.padded = self.memory.split([self.world_size * numel for numel in self.numels])
        for entry, padded in zip(sharded, self.padded, strict=True):
            whole = padded[: entry.shape.numel()].view(entry.shape)
            # `.data`: a gather that writes into the memory doesn't count as changing `whole`,
            # which autograd would refuse.
            entry.whole = nn.Parameter(whole.data, requires_grad=entry.shard.requires_grad)
        self.is_whole = True
        self.versions = []
        self.gathering: tuple[Tensor, dist.Work | None] | None = None
        self.drop()
        self.uses: list[int] = []  # indices in `Conductor.order` that backward hasn't reached
        self.in_backward = False
        self.done = False  # backward has left it

    def new_flat(self, dtype: torch.dtype) -> Tensor:
        numel = self.world_size * sum(self.numels)
        return torch.empty(numel, dtype=dtype, device=self.device)

    def by_rank(self, flat: Tensor, numels: list[int]) -> tuple[Tensor, ...]:
        """View a 1-D message as a (W, numel) tensor for each parameter: row r is rank r's part."""
        return flat.view(self.world_size, -1).split(numels, dim=1)

    # Gather and drop

    @property
    def needs_gather(self) -> bool:
        """Return whether there are weights, and they are neither whole nor on their way."""
        return bool(self.sharded) and not self.is_whole and self.gathering is None

    def start_gather(self) -> None:
        """Begin to all-gather the weights; `gather` waits for them."""
        self.versions = [entry.shard._version for entry in self.sharded]
        self.gathering = self.send_shards(self.dtype)

    def send_shards(self, dtype: torch.dtype) -> tuple[Tensor, dist.Work | None]:
        """Begin to all-gather the shards, in `dtype`; return (message, handle or None)."""
        flat = self.new_flat(dtype)
        own = torchs.shard(flat, self.group).zero_()  # and the padding
        for part, entry in zip(own.split(self.numels), self.sharded, strict=True):
            shard = entry.shard.detach().flatten()
            part[: shard.numel()].copy_(shard)
        if self.world_size == 1:
            return flat, None
        return flat, self.transport.start_all_gather(flat, self.group)

    def gather(self) -> None:
        """Wait for the gather, if one has begun, and put the whole weights into the modules."""
        self.check_fresh()
        if self.gathering is None:
            return
        flat, work = self.gathering
        self.gathering = None
        if work is not None:
            work.wait()
        self.memory.untyped_storage().resize_(self.nbytes)
        for padded, parts in zip(self.padded, self.by_rank(flat, self.numels), strict=True):
            padded.view(self.world_size, -1).copy_(parts)
        flat.untyped_storage().resize_(0)  # now: a backend may let go of it later
        for entry in self.sharded:
            entry.whole.requires_grad_(entry.shard.requires_grad)
            entry.show(entry.whole)
        self.is_whole = True

    def check_fresh(self) -> None:
        """Raise RuntimeError if whole weights are old: their shards have been updated since."""
        now = [entry.shard._version for entry in self.sharded]
        if self.is_whole and self.sharded and self.versions != now:
            raise RuntimeError(
                f"rank {dist.get_rank()} updated the shards of {self.name} while the whole weights "
                "were kept, which are stale now: synchronize() before each optimizer.step()."
            )

    def drop(self) -> None:
        """Free the whole weights, also those on their way; the modules have the shards again."""
        if self.gathering is not None:  # begun, and not needed after all
            _, work = self.gathering
            self.gathering = None
            if work is not None:
                work.wait()
        if self.is_whole:
            for entry in self.sharded:
                entry.show(entry.shard)
            self.memory.untyped_storage().resize_(0)  # saved tensors keep pointing to it
            self.is_whole = False

    def full_parameters(self) -> dict[str, Tensor]:
        """All-gather the whole parameters, in the shards' dtype; return {name: a copy}."""
        if not self.sharded:
            return {}
        flat, work = self.send_shards(self.shard_dtype)
        if work is not None:
            work.wait()
        found = {}
        for entry, parts in zip(self.sharded, self.by_rank(flat, self.numels), strict=True):
            rows = parts.reshape(-1)[: entry.shape.numel()]  # a copy where parts lie apart
            found[entry.name] = rows.clone().view(entry.shape)
        return found

    # Gradients

    @property
    def trained(self) -> list[Sharded]:
        return [entry for entry in self.sharded if entry.shard.requires_grad]

    def take_gradients(self) -> None:
        for entry in self.trained:
            entry.take_gradient(self.reduce_dtype)

    @property
    def has_gradients(self) -> bool:
        return any(entry.pending is not None for entry in self.trained)


def one_dtype_of(name: str, sharded: list[Sharded]) -> tuple[torch.dtype, torch.device]:
    """Return the dtype of all parameters, and the device of the first; torch's defaults for none.

    name: of the unit, for the error. ValueError: there are several dtypes; devices aren't compared.
    """
    tensors = [entry.shard for entry in sharded] or [torch.empty(0)]
    for entry in sharded:
        if entry.shard.dtype != tensors[0].dtype:
            other = f"{entry.name} in {entry.shard.dtype}"
            got = f"{sharded[0].name} in {tensors[0].dtype} and {other}"
            remedy = "Convert one of them, or name its module in `wrap`."
            raise ValueError(f"expected one dtype in the unit {name}, got {got}. {remedy}")
    return tensors[0].dtype, tensors[0].device
