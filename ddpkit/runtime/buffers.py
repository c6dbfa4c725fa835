"""Find calls whose tensor is changed while it is being sent: `launch(..., check_buffers=True)`.

An asynchronous collective or send may read its tensor at any time until it has been waited for. A
program that writes into the tensor before that may send a mixture of old and new numbers, without
an error, and a different one in every run. So a checksum of what a call sends is taken when it is
made. When the call's handle finds it complete, as in wait(), an error is raised if the checksum has
changed. An all_reduce or reduce, which overwrites its input, works on a copy. Only tensors on the
CPU are checked.
"""

import ctypes
import zlib
from collections.abc import Sequence

import torch
from torch._C._distributed_c10d import Work

from .board import Record
from .place import describe_place
from .uncompiled import uncompiled
from .wire import WireGroup, WireWork

IN_PLACE = "all_reduce", "reduce"  # the result overwrites the input
AS_WRITTEN = {"send": "isend"}  # as the user writes it: a send that blocks isn't at fault


@uncompiled
class CheckedGroup(WireGroup):
    """A process group whose handles check that CPU tensors weren't changed while being sent.

    If one was changed, its call's handle raises an error, see `CheckedWork`. In all else this is a
    `WireGroup`, which records each call and passes it to the real group. Collectives that block,
    and tensors on a GPU, aren't checked. An input that shares the output's storage is checked only
    where the call leaves it unchanged, that is in an all_gather or at a broadcast's root, and in an
    all_reduce or reduce. For these two Gloo gets a copy of the tensor; the handle copies the result
    into the tensor when it finds the call complete.
    """

    def _collective(self, op, method, args, sent, arriving):
        """Make a collective; return its handle, a `CheckedWork` if the tensors can be checked.

        Otherwise, or if the call blocks (`asyncOp` is False), return what `WireGroup` returns.
        op: the name that the record has, such as "all_reduce". method, args: the real group's
        method, by name, and its arguments, the options last. sent: the tensors that the call reads.
        arriving: those that it fills; the same list object as `sent` if the call works in place.
        """
        watched = sent
        if sent is arriving and not self._reads(op, args[-1]):
            watched = []
        into = {tensor.untyped_storage().data_ptr() for tensor in arriving if sent is not arriving}
        shared = any(tensor.untyped_storage().data_ptr() in into for tensor in watched)
        blocks = not getattr(args[-1], "asyncOp", True)
        # A reduce_scatter may write into its own input; an all_gather leaves it as it is.
        if blocks or not _on_cpu(watched) or (shared and op != "all_gather"):
            return super()._collective(op, method, args, sent, arriving)
        check = _Check(self.recorder.rank, watched)
        if op in IN_PLACE:  # Gloo gets a copy, so that only the script can change the tensor
            arriving = check.result = [tensor.detach().clone() for tensor in watched]
            sent = arriving
            args = (arriving, *args[1:])
        return CheckedWork(super()._collective(op, method, args, sent, arriving), check)

    def _reads(self, op: str, opts) -> bool:
        """Return whether this rank sends a tensor that is the call's input and output in one.

        It does in an all_reduce or reduce, and as the root of a broadcast; otherwise return False.
        op: torch.distributed's name, such as "all_reduce". opts: torch's options of the call.
        """
        return op in IN_PLACE or (op == "broadcast" and opts.rootRank == self.rank())

    def send(self, tensors, dst, tag):
        check = _Check(self.recorder.rank, tensors) if _on_cpu(tensors) else None
        work = super().send(tensors, dst, tag)
        return CheckedWork(work, check) if check else work


class _Check:
    """The tensors that a call sends, with their checksum at the time of the call.

    Once the call is complete, `end` compares the checksum with a new one.
    rank: this rank's number, for the error. tensors: must be on the CPU; they aren't copied.
    result: an attribute, at first []. An all_reduce or reduce overwrites its input: the caller
        lets Gloo work on copies, so that only the user's code can change the tensors themselves,
        and puts the copies here. In the end they hold the result; `end` copies it into `tensors`.
    """

    def __init__(self, rank: int, tensors: Sequence[torch.Tensor]):
        self.rank = rank
        self.tensors = tensors
        self.before = checksum(tensors)
        self.result: list[torch.Tensor] = []
        self._over = False

    def end(self, record: Record) -> None:
        """Raise ValueError if the tensors were changed; otherwise copy `result` into them, if any.

        It is called when the call has completed. A second time it does nothing.
        record: the call's record, from which the error names the operation and the user's line.
        """
        if self._over:
            return
        self._over = True
        if checksum(self.tensors) != self.before:
            call = f"{AS_WRITTEN.get(record.op, record.op)}, {describe_place(record.place)}"
            changed = f"rank {self.rank} changed what it sends before it was sent ({call})"
            raise ValueError(f"{changed}: call wait() on the handle first")
        for tensor, result in zip(self.tensors, self.result, strict=False):
            tensor.data.copy_(result)  # .data: as in Gloo, autograd doesn't count it as a change


@uncompiled
class CheckedWork(Work):
    """A call's handle, which checks the call's tensors once, when it first finds the call complete.

    If they were changed, wait() or is_completed() raises ValueError; if the future of get_future()
    finds it complete, that fails with RuntimeError, as torch's futures do.
    work: the recorded call's handle, which this one wraps. check: the tensors, with a checksum.
    """

    def __init__(self, work: WireWork, check: _Check):
        super().__init__()
        self._work = work
        self._check = check
        self.record = work.record

    def wait(self, timeout=None) -> bool:
        self._work.wait(timeout)
        self._check.end(self.record)
        return True

    synchronize = wait

    def get_future(self) -> torch.futures.Future:
        def ended(future):
            self._check.end(self.record)
            return list(self._check.tensors) if self._check.result else future.value()

        return self._work.get_future().then(ended)

    def is_completed(self) -> bool:
        completed = self._work.is_completed()
        if completed:
            self._check.end(self.record)
        return completed

    def result(self):
        return self._work.result()

    def _source_rank(self) -> int:
        return self._work._source_rank()


def _on_cpu(tensors: Sequence[torch.Tensor]) -> bool:
    """Return whether tensors can be checked: there is at least one, and none is on a GPU."""
    return bool(tensors) and not any(tensor.is_cuda for tensor in tensors)


def checksum(tensors: Sequence[torch.Tensor]) -> int:
    """Return one CRC-32 checksum of the bytes of all tensors together. They must be on the CPU."""
    total = 0
    for tensor in tensors:
        whole = tensor.detach().contiguous()
        nbytes = whole.numel() * whole.element_size()
        total = zlib.crc32((ctypes.c_char * nbytes).from_address(whole.data_ptr()), total)
    return total
