"""Note each update of a training: its state before, its samples, its loss; and kill it when asked.

The witness listens at the same places as `ddpkit.audit.tape`, calls of modules, backward and steps
of optimizers, and at `torch.save`. It writes a line for each update at once, so that a kill loses
none.
"""

import contextlib
import hashlib
import io
import json
import os
import pickle
import random
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from ..audit.samples import tensors_in
from ..audit.tape import hook, plain_name


class Witness:
    """A context manager that writes to `folder` what the training inside does on this rank.

    It adds a JSON line to `folder`/RANK.jsonl for each event. An update, a step of an outermost
    optimizer, has "losses" and "rates" (learning rates), "samples" (a digest of each), "before" and
    "after" ({parameter: digest}), and "buffers" (a digest); and, as it was before the step,
    "random" ({generator: digest}), "moments" (a digest) and "counters" (of the optimizer). A save
    has "save": its path, "updates": made before it, "number": of this rank's saves, from 1, and
    "whole": False if the kill cut it short.

    kill: "step 7" kills the run after 7 updates, "save 2 of rank 0" in the middle of that rank's
        second torch.save, half of which is written; "" never.
    """

    def __init__(self, folder: Path, kill: str):
        self.folder = folder
        self.rank = os.environ.get("RANK", "0")
        when, _, rank = kill.partition(" of rank ")
        kind, _, number = when.partition(" ")
        self.kill_at = {kind: int(number)} if kill and rank in ("", self.rank) else {}
        self.updates = 0
        self.saves = 0
        self.calls = 0  # calls of modules that haven't returned, nested
        self.stepping = 0  # steps of optimizers that haven't returned, nested
        self.roots: list[nn.Module] = []
        self.losses: list[float] = []
        self.samples: list[str] = []
        self.now: dict = {}  # the update that is being made
        self.before: dict[Tensor, str] = {}  # digests of the parameters before it

    # Listening

    def __enter__(self) -> "Witness":
        (self.folder / f"pid.{self.rank}").write_text(str(os.getpid()))
        self.file = open(self.folder / f"{self.rank}.jsonl", "ab", buffering=0)
        self.listening = contextlib.ExitStack()
        self.listening.callback(self.file.close)
        hook(self, self.listening)
        self.save = torch.save
        for context in (
            patch.object(torch, "save", self.saving),
            patch.object(torch.autograd, "backward", self.hearing(torch.autograd.backward)),
        ):
            self.listening.enter_context(context)
        return self

    def __exit__(self, *error) -> None:
        self.listening.close()

    def calling(self, call: Callable) -> Callable:
        """Return a `Module.__call__` that notes outermost modules and, in training, their samples.

        A module without parameters doesn't count: it may be a loss, which is given predictions.
        """

        def called(module, *args, **kwargs):
            if torch.compiler.is_compiling():
                return call(module, *args, **kwargs)
            if self.calls == 0 and any(True for _ in module.parameters()):
                if not any(module is root for root in self.roots):
                    self.roots.append(module)
                if module.training and torch.is_grad_enabled():
                    self.samples += rows((args, kwargs))
            self.calls += 1
            try:
                return call(module, *args, **kwargs)
            finally:
                self.calls -= 1

        return called

    def hearing(self, backward: Callable) -> Callable:
        """Return a function like `backward` that notes the loss it begins from, if one number."""

        def heard(tensors, *args, **kwargs):
            first = tensors if isinstance(tensors, Tensor) else next(iter(tensors), None)
            if isinstance(first, Tensor) and first.numel() == 1:
                self.losses.append(first.item())
            self.calls += 1  # what an activation checkpoint computes again is no new sample
            try:
                return backward(tensors, *args, **kwargs)
            finally:
                self.calls -= 1

        return heard

    def on_step(self, optimizer: Optimizer, *_) -> None:
        """Note the state before an optimizer's step, unless it is inside another optimizer's."""
        self.stepping += 1
        if self.stepping == 1:
            groups = optimizer.param_groups
            self.now = {"random": random_states()}
            self.now["rates"] = [float(group["lr"]) for group in groups]
            self.before = digests(optimizer)
            self.now["moments"], self.now["counters"] = state_of(optimizer)

    def on_stepped(self, optimizer: Optimizer, *_) -> None:
        """Write the update that an optimizer has made; kill the run if that is due after it."""
        self.stepping -= 1
        if self.stepping == 0:
            self.updates += 1
            # A step that is given a closure has called the model, and found the loss, just now.
            self.now |= {"losses": self.losses, "samples": self.samples}
            buffers = [buffer for root in self.roots for buffer in root.buffers()]
            self.now["buffers"] = digest(*buffers)
            self.now["before"] = self.by_name(self.before)
            self.now["after"] = self.by_name(digests(optimizer))
            self.write(self.now)
            self.losses = []
            self.samples = []
            if self.kill_at.get("step") == self.updates:
                self.kill()

    def saving(self, obj, f, *args, **kwargs):
        """Save as torch.save does, and write the event, unless the kill is due in the middle of it.

        Then the event comes first, only the first half of the bytes is written, and the run ends.
        """
        self.saves += 1
        path = str(f if isinstance(f, str | os.PathLike) else getattr(f, "name", "a stream"))
        event = {"save": path, "updates": self.updates, "number": self.saves}
        if self.kill_at.get("save") == self.saves:
            self.write(event | {"whole": False})
            whole = io.BytesIO()
            self.save(obj, whole, *args, **kwargs)
            half = whole.getvalue()[: whole.tell() // 2]
            if isinstance(f, str | os.PathLike):
                Path(f).write_bytes(half)
            else:
                f.write(half)
                f.flush()
            self.kill()
        self.save(obj, f, *args, **kwargs)
        self.write(event | {"whole": True})

    # What is noted

    def by_name(self, digests: dict[Tensor, str]) -> dict[str, str]:
        """Return {name: digest} for {parameter: digest}.

        The name of a parameter that is in no module that was called is "parameter 3", by its index.
        Where parameters of two modules have one name, the last counts.
        """
        names = {}
        for root in self.roots:
            for path, parameter in root.named_parameters():
                names.setdefault(parameter, plain_name(path))
        found = {}
        for parameter, value in digests.items():
            found[names.get(parameter, f"parameter {len(found)}")] = value
        return found

    def write(self, event: dict) -> None:
        """Append one event to this rank's file, at once."""
        self.file.write(json.dumps(event).encode() + b"\n")

    def kill(self) -> None:
        """Kill torchrun and all ranks of this run by SIGKILL, this one last.

        Their process ids are those in the files pid.* of the witness's folder.
        """
        pids = [int(path.read_text()) for path in sorted(self.folder.glob("pid.*"), reverse=True)]
        for pid in [*(pid for pid in pids if pid != os.getpid()), os.getpid()]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def digest(*tensors: Tensor) -> str:
    """Return a short hash of the tensors' bits, in hexadecimal.

    Of a distributed tensor, only this rank's part counts.
    """
    total = hashlib.blake2b(digest_size=8)
    for tensor in tensors:
        local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        flat = local.detach().cpu().contiguous().flatten()
        total.update(flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b"")
    return total.hexdigest()


def digests(optimizer: Optimizer) -> dict[Tensor, str]:
    """Return {parameter: digest} of all that the optimizer updates."""
    return {x: digest(x) for group in optimizer.param_groups for x in group["params"]}


def rows(inputs: object) -> list[str]:
    """Return a hash for each sample of a batch: each row of its tensors, by their bits.

    inputs: a module's arguments, also in lists and dicts; tensors of another length than the first
        are left out, and so is all that is no tensor.
    """
    columns = tensors_in(tree_leaves(inputs))
    columns = [x for x in columns if len(x) == len(columns[0])]
    return [digest(*row) for row in zip(*columns, strict=True)]


def state_of(optimizer: Optimizer) -> tuple[str, list[float]]:
    """Return (digest of an optimizer's moments, its distinct step counters, sorted).

    Moments are all tensors of its state but "step". The digest is "" if there are none.
    """
    moments = []
    counters = set()
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            for name, value in optimizer.state.get(parameter, {}).items():
                if name == "step":
                    counters.add(float(value))
                elif isinstance(value, Tensor):
                    moments.append(value)
    return digest(*moments) if moments else "", sorted(counters)


def random_states() -> dict[str, str]:
    """Return {generator: digest of its state}: "torch", "python", "CUDA" and "numpy".

    The last two are there once CUDA is initialized, and numpy imported, which torch may do itself.
    """
    states = {"torch": digest(torch.get_rng_state()), "python": name_of(random.getstate())}
    if torch.cuda.is_initialized():
        states["CUDA"] = digest(torch.cuda.get_rng_state())
    if "numpy" in sys.modules:
        states["numpy"] = name_of(sys.modules["numpy"].random.get_state())
    return states


def name_of(state: object) -> str:
    """Return a short hash of an object that can be pickled."""
    return hashlib.blake2b(pickle.dumps(state), digest_size=8).hexdigest()
