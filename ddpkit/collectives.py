"""Every collective of `torch.distributed`, written with nothing but send and recv.

Names, arguments and results are torch's:

- `src` and `dst` are ranks of the world, also when `group` is only a part of it; `group_src` and `group_dst` are ranks
  of the group. A rank outside `group` gets a warning and takes no part.
- Tensors may live on any device whose backend can send and receive; they need not be contiguous, and may be empty.
- Nobody checks that the ranks agree on sizes: asking would cost messages that the algorithm doesn't need.
- A `ValueError` stops only the rank that made the mistake. Its peers wait for it, as they do in torch.

Left out, since nothing here goes on in the background: `async_op`, and barrier's `device_ids` and `timeout`. Torch's
`group_src` and `group_dst` come after `async_op`; here they are keyword-only, so that no call can mean something else.

W is the number of ranks of the group, Φ the whole: the bytes of the tensor, or of all parts in the list together.

    collective          sent by all ranks    in and out of the busiest rank    hops, one after the other
    broadcast, reduce   (W-1)Φ               (W-1)Φ, the root                  W-1
    the same as trees   (W-1)Φ               ⌈log₂ W⌉Φ, the root               ⌈log₂ W⌉
    gather, scatter     (W-1)/W Φ            (W-1)/W Φ, the root               W-1
    all_reduce          2(W-1)Φ              2(W-1)Φ, rank 0                   2(W-1)
    all_gather          (W-1)Φ               2(W-1)/W Φ, all alike             1
    reduce_scatter      (W-1)Φ               2(W-1)/W Φ, all alike             1
    all_to_all          (W-1)Φ               2(W-1)/W Φ, all alike             1
    barrier             W⌈log₂ W⌉ bytes      2⌈log₂ W⌉ bytes, all alike        ⌈log₂ W⌉

Results are combined in the order of ranks: the same bits on every rank and in every run.
"""

import functools
import inspect
import warnings
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp


def _collective(function: Callable) -> Callable:
    """Do as torch does around every collective: ranks outside `group` warn and return, and autograd sees nothing."""
    place = list(inspect.signature(function).parameters).index("group")

    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        group = args[place] if place < len(args) else kwargs.get("group")
        if dist.get_rank(group) < 0:
            who = f"rank {dist.get_rank()} called {function.__name__} with a group that it isn't in"
            warnings.warn(f"{who}: nothing done. Call it on the group's ranks only.", stacklevel=2)
            return None
        with torch.no_grad():
            return function(*args, **kwargs)

    return wrapper


# One sends, one receives


@_collective
def broadcast(
    tensor: Tensor, src: int | None = None, group: ProcessGroup | None = None, *, group_src: int | None = None
) -> None:
    """Copy `tensor` from rank `src` to all others.

    tensor: any shape, the same on every rank; overwritten in place, except on `src`.
    ValueError: not exactly one of `src` and `group_src` given, or no rank of the group.

    Cost: the source sends W-1 times Φ bytes, one rank after the other; every other rank receives once. Notebook 01.
    """
    root = _group_rank("broadcast", group, src=src, group_src=group_src)
    if dist.get_rank(group) == root:
        for peer in _others(group):
            _send(tensor, peer, group)
    else:
        _recv(tensor, root, group)


@_collective
def tree_broadcast(
    tensor: Tensor, src: int | None = None, group: ProcessGroup | None = None, *, group_src: int | None = None
) -> None:
    """Copy `tensor` from rank `src` to all others; whoever has it helps, so each hop doubles the ranks that have it.

    tensor: any shape, the same on every rank; overwritten in place, except on `src`.
    ValueError: not exactly one of `src` and `group_src` given, or no rank of the group.

    Cost: ⌈log₂ W⌉ hops of Φ bytes; (W-1)Φ in total, as in `broadcast`, of which the source sends ⌈log₂ W⌉Φ.
    Binomial tree: Thakur, Rabenseifner and Gropp 2005, section 4. Notebook 01.
    """
    root = _group_rank("tree_broadcast", group, src=src, group_src=group_src)
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    position = (rank - root) % world_size  # the root is at 0
    have_it = 1
    while have_it < world_size:
        if position < have_it and position + have_it < world_size:
            _send(tensor, (rank + have_it) % world_size, group)
        elif have_it <= position < 2 * have_it:
            _recv(tensor, (rank - have_it) % world_size, group)
        have_it *= 2


@_collective
def scatter(
    tensor: Tensor,
    scatter_list: list[Tensor] | None = None,
    src: int | None = None,
    group: ProcessGroup | None = None,
    *,
    group_src: int | None = None,
) -> None:
    """Send `scatter_list[r]` of rank `src` (rank 0 if not said) to rank r of the group, into its `tensor`.

    tensor: overwritten in place. scatter_list: W tensors on `src`, None elsewhere; their sizes may differ.
    ValueError: wrong list, or a list on a rank that isn't the source; `src` not in the group.

    Cost: the source sends (W-1)/W of its list, part after part; every other rank receives once. Notebook 01.
    """
    if src is None and group_src is None:
        src = 0
    root = _group_rank("scatter", group, src=src, group_src=group_src)
    if dist.get_rank(group) == root:
        _check_list("scatter", "scatter_list", scatter_list, tensor, group)
        for peer in _others(group):
            _send(scatter_list[peer], peer, group)
        tensor.copy_(scatter_list[root])
    else:
        _check_no_list("scatter", "scatter_list", scatter_list, "source")
        _recv(tensor, root, group)


# All send, one receives


@_collective
def reduce(
    tensor: Tensor,
    dst: int | None = None,
    op: ReduceOp.RedOpType = ReduceOp.SUM,
    group: ProcessGroup | None = None,
    *,
    group_dst: int | None = None,
) -> None:
    """Combine the `tensor` of all ranks with `op` on rank `dst`.

    tensor: any shape, the same on every rank; overwritten in place on `dst`, untouched elsewhere (not so in torch).
    op: SUM, AVG, PRODUCT, MIN, MAX, BAND, BOR or BXOR, for dtypes as in torch.
    ValueError: not exactly one of `dst` and `group_dst` given, or no rank of the group; no such `op` for this dtype.

    Cost: every rank but `dst` sends Φ bytes; `dst` receives W-1 times Φ, one rank after the other. Notebook 01.
    """
    root = _group_rank("reduce", group, dst=dst, group_dst=group_dst)
    combine = _combine_function("reduce", op, tensor.dtype)
    if dist.get_rank(group) != root:
        _send(tensor, root, group)
        return
    total = None
    for peer in range(dist.get_world_size(group)):
        part = tensor if peer == root else _recv(torch.empty_like(tensor), peer, group)
        total = part if total is None else combine(total, part)
    tensor.copy_(_averaged(total, op, group))


@_collective
def tree_reduce(
    tensor: Tensor,
    dst: int | None = None,
    op: ReduceOp.RedOpType = ReduceOp.SUM,
    group: ProcessGroup | None = None,
    *,
    group_dst: int | None = None,
) -> None:
    """Combine the `tensor` of all ranks on rank `dst`: in each hop, half of those who still hold a part hand it on.

    tensor: any shape, the same on every rank; overwritten in place on `dst`, elsewhere untouched.
    op, ValueError: as in `reduce`. Floating-point sums are bracketed differently than there, the same in every run.

    Cost: ⌈log₂ W⌉ hops of Φ bytes; (W-1)Φ in total, as in `reduce`, of which `dst` receives ⌈log₂ W⌉Φ.
    Binomial tree: Thakur, Rabenseifner and Gropp 2005, section 4. Notebook 01.
    """
    root = _group_rank("tree_reduce", group, dst=dst, group_dst=group_dst)
    combine = _combine_function("tree_reduce", op, tensor.dtype)
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    position = (rank - root) % world_size  # the root is at 0
    total, distance = tensor, 1
    while distance < world_size:
        if position % (2 * distance) == distance:
            _send(total, (rank - distance) % world_size, group)
            return
        if position + distance < world_size:
            part = _recv(torch.empty_like(tensor), (rank + distance) % world_size, group)
            total = combine(total, part)
        distance *= 2
    tensor.copy_(_averaged(total, op, group))


@_collective
def gather(
    tensor: Tensor,
    gather_list: list[Tensor] | None = None,
    dst: int | None = None,
    group: ProcessGroup | None = None,
    *,
    group_dst: int | None = None,
) -> None:
    """Send the `tensor` of rank r of the group to rank `dst` (rank 0 if not said), into its `gather_list[r]`.

    gather_list: W tensors on `dst`, overwritten in place, None elsewhere; their sizes may differ.
    ValueError: wrong list, or a list on a rank that isn't the destination; `dst` not in the group.

    Cost: every rank but `dst` sends its part; `dst` receives (W-1)/W of its list, part after part. Notebook 01.
    """
    if dst is None and group_dst is None:
        dst = 0
    root = _group_rank("gather", group, dst=dst, group_dst=group_dst)
    if dist.get_rank(group) == root:
        _check_list("gather", "gather_list", gather_list, tensor, group)
        gather_list[root].copy_(tensor)
        for peer in _others(group):
            _recv(gather_list[peer], peer, group)
    else:
        _check_no_list("gather", "gather_list", gather_list, "destination")
        _send(tensor, root, group)


# All send, all receive


@_collective
def all_reduce(tensor: Tensor, op: ReduceOp.RedOpType = ReduceOp.SUM, group: ProcessGroup | None = None) -> None:
    """Combine the `tensor` of all ranks with `op` on every rank, the naive way: all to rank 0, and back.

    tensor: any shape, the same on every rank; overwritten in place, with the same bits everywhere.
    op: SUM, AVG, PRODUCT, MIN, MAX, BAND, BOR or BXOR, for dtypes as in torch; ValueError otherwise.

    Cost: 2(W-1)Φ bytes in total, all of them through rank 0, which receives W-1 times and then sends W-1 times.
    The ring of notebook 02 moves as many bytes, spread over all ranks. Notebook 01.
    """
    reduce(tensor, op=op, group=group, group_dst=0)
    broadcast(tensor, group=group, group_src=0)


@_collective
def all_gather(tensor_list: list[Tensor], tensor: Tensor, group: ProcessGroup | None = None) -> None:
    """Copy the `tensor` of rank r of the group into `tensor_list[r]` of every rank.

    tensor_list: W tensors, overwritten in place. Every rank may bring another size of `tensor`.
    ValueError: wrong list.

    Cost per rank: its part sent to each of the W-1 others, all at once. Notebook 01.
    """
    _check_list("all_gather", "tensor_list", tensor_list, tensor, group)
    rank, others = dist.get_rank(group), _others(group)
    tensor_list[rank].copy_(tensor)
    outgoing = dict.fromkeys(others, tensor)
    incoming = {peer: tensor_list[peer] for peer in others}
    _exchange(outgoing, incoming, group)


@_collective
def reduce_scatter(
    output: Tensor,
    input_list: list[Tensor],
    op: ReduceOp.RedOpType = ReduceOp.SUM,
    group: ProcessGroup | None = None,
) -> None:
    """Combine `input_list[r]` of all ranks with `op` on rank r of the group, into its `output`.

    output: overwritten in place. input_list: W tensors, untouched; the chunks may differ in size.
    op: SUM, AVG, PRODUCT, MIN, MAX, BAND, BOR or BXOR, for dtypes as in torch.
    ValueError: wrong list; no such `op` for this dtype.

    Cost per rank: (W-1)/W of `input_list` sent, every chunk straight to the rank that combines it, all at once.
    Notebook 01.
    """
    _check_list("reduce_scatter", "input_list", input_list, output, group)
    combine = _combine_function("reduce_scatter", op, output.dtype)
    rank, others = dist.get_rank(group), _others(group)
    parts = [torch.empty_like(output) for _ in input_list]
    parts[rank] = input_list[rank]
    outgoing = {peer: input_list[peer] for peer in others}
    incoming = {peer: parts[peer] for peer in others}
    _exchange(outgoing, incoming, group)
    output.copy_(_averaged(functools.reduce(combine, parts), op, group))


@_collective
def all_to_all(
    output_tensor_list: list[Tensor], input_tensor_list: list[Tensor], group: ProcessGroup | None = None
) -> None:
    """Send `input_tensor_list[r]` to rank r of the group, into its `output_tensor_list[s]`, where s is this rank.

    output_tensor_list: W tensors, overwritten in place. input_tensor_list: W tensors, untouched. Sizes may differ.
    ValueError: wrong lists.

    Cost per rank: (W-1)/W of `input_tensor_list` sent, all at once. Notebook 01.
    """
    rank, others = dist.get_rank(group), _others(group)
    _check_list("all_to_all", "input_tensor_list", input_tensor_list, None, group)
    _check_list("all_to_all", "output_tensor_list", output_tensor_list, input_tensor_list[rank], group)
    output_tensor_list[rank].copy_(input_tensor_list[rank])
    outgoing = {peer: input_tensor_list[peer] for peer in others}
    incoming = {peer: output_tensor_list[peer] for peer in others}
    _exchange(outgoing, incoming, group)


@_collective
def barrier(group: ProcessGroup | None = None) -> None:
    """Return when every rank of the group has called it.

    Cost per rank: ⌈log₂ W⌉ hops of one byte. After the hop over distance d a rank has heard, at first hand or by
    hearsay, of the 2d-1 ranks before it. Dissemination barrier: Hensgen, Finkel and Manber 1988. Notebook 01.
    """
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    token, heard = torch.zeros(2, dtype=torch.uint8, device=_device(group)).split(1)
    distance = 1
    while distance < world_size:
        _exchange({(rank + distance) % world_size: token}, {(rank - distance) % world_size: heard}, group)
        distance *= 2
    heard.item()  # on a GPU, work.wait() only puts kernels in order; reading the byte makes this process wait


# The same, on one tensor instead of a list


@_collective
def all_gather_into_tensor(output_tensor: Tensor, input_tensor: Tensor, group: ProcessGroup | None = None) -> None:
    """`all_gather` into one tensor: the parts one after the other.

    output_tensor: contiguous, W times the elements of `input_tensor`, (W·n, ...) or (W, n, ...); overwritten in place.
    ValueError: another number of elements.

    Cost per rank: its part sent to each of the W-1 others, all at once. Notebook 01.
    """
    parts = _rows("all_gather_into_tensor", "output_tensor", output_tensor, input_tensor, group)
    all_gather(parts, input_tensor, group)


@_collective
def reduce_scatter_tensor(
    output: Tensor, input: Tensor, op: ReduceOp.RedOpType = ReduceOp.SUM, group: ProcessGroup | None = None
) -> None:
    """`reduce_scatter` of one tensor, cut into W equal chunks.

    input: contiguous, W times the elements of `output`, (W·n, ...) or (W, n, ...), untouched.
    output: overwritten in place.
    ValueError: another number of elements (pad to a multiple of W, or give `reduce_scatter` a list of uneven chunks).

    Cost per rank: (W-1)/W of `input` sent, all at once. Notebook 01.
    """
    chunks = _rows("reduce_scatter_tensor", "input", input, output, group)
    reduce_scatter(output, chunks, op, group)


@_collective
def all_to_all_single(
    output: Tensor,
    input: Tensor,
    output_split_sizes: list[int] | None = None,
    input_split_sizes: list[int] | None = None,
    group: ProcessGroup | None = None,
) -> None:
    """`all_to_all` of one tensor, cut along its first axis: into equal parts, or as the split sizes say.

    output: overwritten in place. input: untouched.
    ValueError: split sizes that aren't W numbers whose sum is the length; without them, a length that W doesn't divide.

    Cost per rank: what it has for the others, all at once. Notebook 01.
    """
    outputs = _split("all_to_all_single", "output", output, output_split_sizes, group)
    inputs = _split("all_to_all_single", "input", input, input_split_sizes, group)
    all_to_all(outputs, inputs, group)


# Messages


def _others(group: ProcessGroup | None) -> list[int]:
    """All ranks of the group but this one."""
    return [peer for peer in range(dist.get_world_size(group)) if peer != dist.get_rank(group)]


def _send(tensor: Tensor, peer: int, group: ProcessGroup | None) -> None:
    """`dist.send`, also of a tensor with gaps."""
    dist.send(tensor.contiguous(), group=group, group_dst=peer)


def _recv(tensor: Tensor, peer: int, group: ProcessGroup | None) -> Tensor:
    """`dist.recv`, also into a tensor with gaps; returns it."""
    buffer = tensor.contiguous()  # the tensor itself, unless it has gaps
    dist.recv(buffer, group=group, group_src=peer)
    return tensor.copy_(buffer)


def _exchange(outgoing: dict[int, Tensor], incoming: dict[int, Tensor], group: ProcessGroup | None) -> None:
    """Send `outgoing[peer]` to each such peer and fill `incoming[peer]` from each such peer, all at the same time.

    If all ranks sent first and received later, each could wait for ever for the others to receive. A batch has no
    first. With NCCL, what is sent in a batch must be received in a batch: all ranks of the group come here, or none.
    """
    buffers = {peer: tensor.contiguous() for peer, tensor in incoming.items()}
    sends = [dist.P2POp(dist.isend, t.contiguous(), group=group, group_peer=peer) for peer, t in outgoing.items()]
    receives = [dist.P2POp(dist.irecv, buffer, group=group, group_peer=peer) for peer, buffer in buffers.items()]
    if sends or receives:  # torch takes no empty batch
        for work in dist.batch_isend_irecv(sends + receives):
            work.wait()
    for peer, buffer in buffers.items():
        incoming[peer].copy_(buffer)


def _device(group: ProcessGroup | None) -> torch.device:
    """Where the group's backend wants its tensors; with NCCL, the current GPU."""
    devices = (group or dist.group.WORLD)._device_types  # torch tells it nowhere else
    return torch.device("cpu") if torch.device("cpu") in devices else devices[0]


# Arithmetic


def _combine_function(collective: str, op: ReduceOp.RedOpType, dtype: torch.dtype) -> Callable:
    """The function of two tensors that `op` names, where torch has it for `dtype`; for AVG, divide in the end."""
    functions = {ReduceOp.SUM: torch.add}
    if dtype.is_floating_point or dtype.is_complex:
        functions |= {ReduceOp.AVG: torch.add}
    else:
        functions |= {
            ReduceOp.BAND: torch.bitwise_and,
            ReduceOp.BOR: torch.bitwise_or,
            ReduceOp.BXOR: torch.bitwise_xor,
        }
    if not dtype.is_complex:
        functions |= {ReduceOp.PRODUCT: torch.mul, ReduceOp.MIN: torch.minimum, ReduceOp.MAX: torch.maximum}
    if op not in functions:
        expected = " or ".join(known.name for known in functions)
        raise _mistake(collective, f"op {op} for {dtype}", expected, "Convert the tensor first, on every rank.")
    return functions[op]


def _averaged(total: Tensor, op: ReduceOp.RedOpType, group: ProcessGroup | None) -> Tensor:
    return total / dist.get_world_size(group) if op == ReduceOp.AVG else total


# Arguments


def _mistake(collective: str, got: str, expected: str, remedy: str) -> ValueError:
    return ValueError(f"rank {dist.get_rank()} called {collective} with {got}, expected {expected}. {remedy}")


def _group_rank(collective: str, group: ProcessGroup | None, **given: int | None) -> int:
    """The root's rank in the group, given either as a rank of the world or as a `group_...` rank of the group."""
    (world_name, world_rank), (group_name, group_rank) = given.items()
    members = dist.get_process_group_ranks(group)
    if (world_rank is None) == (group_rank is None):
        got = f"{world_name}={world_rank} and {group_name}={group_rank}"
        raise _mistake(collective, got, "one of the two", f"Say {world_name}=<rank in the world>.")
    if group_rank is None and world_rank in members:
        return members.index(world_rank)
    if world_rank is None and group_rank in range(len(members)):
        return group_rank
    got = f"{group_name}={group_rank}" if world_rank is None else f"{world_name}={world_rank}"
    expected = f"{world_name} in {members} or {group_name} in {list(range(len(members)))}"
    raise _mistake(collective, got, expected, f"{world_name} counts in the world, {group_name} in the group.")


def _check_list(
    collective: str, name: str, tensors: list[Tensor] | None, own: Tensor | None, group: ProcessGroup | None
) -> None:
    """One tensor for each rank, one dtype, and this rank's entry shaped like `own`, with which it is exchanged."""
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    if not isinstance(tensors, list) or len(tensors) != world_size:
        got = f"{len(tensors)} tensors" if isinstance(tensors, list) else type(tensors).__name__
        expected = f"a list of {world_size} tensors"
        raise _mistake(collective, f"{got} as {name}", expected, "One for each rank of the group, this one included.")
    own = tensors[rank] if own is None else own
    dtypes = {str(tensor.dtype) for tensor in [own, *tensors]}
    if len(dtypes) > 1:
        raise _mistake(collective, f"{' and '.join(sorted(dtypes))} in {name}", "one dtype", "Convert with .to(dtype).")
    if tensors[rank].shape != own.shape:
        got = f"{name}[{rank}] of shape {tuple(tensors[rank].shape)}"
        raise _mistake(collective, got, f"{tuple(own.shape)}", "It holds this rank's own part, like the other tensor.")


def _check_no_list(collective: str, name: str, tensors: list[Tensor] | None, root: str) -> None:
    if tensors:
        raise _mistake(collective, f"a {name}", "None", f"Only the {root} rank gives the list.")


def _rows(collective: str, name: str, whole: Tensor, part: Tensor, group: ProcessGroup | None) -> list[Tensor]:
    """`whole` as W views of the shape of `part`."""
    world_size = dist.get_world_size(group)
    if whole.numel() != world_size * part.numel():
        expected = f"{world_size} × {part.numel()}"
        raise _mistake(collective, f"{whole.numel()} elements in {name}", expected, "Pad it, or use lists.")
    if not whole.is_contiguous():
        raise _mistake(collective, f"a non-contiguous {name}", "a contiguous one", "Use .contiguous(), or lists.")
    return list(whole.view(world_size, *part.shape))


def _split(
    collective: str, name: str, tensor: Tensor, sizes: list[int] | None, group: ProcessGroup | None
) -> list[Tensor]:
    """`tensor` as W views, cut along its first axis."""
    world_size, length = dist.get_world_size(group), len(tensor)
    sizes = sizes or [length // world_size] * world_size
    if len(sizes) != world_size or sum(sizes) != length:
        got, expected = f"{name} cut into {sizes}", f"{world_size} sizes with sum {length}"
        raise _mistake(collective, got, expected, f"Say {name}_split_sizes, or pad the tensor.")
    return list(tensor.split(sizes))
