"""Programs in the shape of other people's (tests/foreign), and what can go wrong in them.

A sabotage replaces one line of a program. What a report must say of it are regular expressions, to
be found in the report with all white space squeezed; wording beyond that is free.
"""

import re
from dataclasses import dataclass
from pathlib import Path

FOREIGN = Path(__file__).parent / "foreign"
PROGRAMS = {  # program: (ranks, arguments)
    "ddp_trainer": (2, ("3", "1")),
    "fsdp_transformer": (2, ()),
    "tensor_and_data": (4, ()),
    "gpt_loop": (2, ()),
    "accelerate_loop": (2, ()),
    "pipeline_1f1b": (4, ()),
    "checkpoint_thread": (2, ()),
    "parameter_server": (3, ()),
    "validation": (3, ()),
}
# A rank left without the call: it has returned, or destroyed its group, at a line that is named.
LEFT = (
    r"rank {0}, which has returned|"
    r"rank {0}(, which)?( has)? destroyed its group.*\.py:\d+( in \S+)?: .*(destroy|end_training)"
)
SKIPPED = r"under an `if`|end early|skipped a call"
MISLEADS = r"GLHF|🏖"  # nowhere in a report
FIRST_MISLEADS = r"closed by peer|Connection reset"  # not in its first sentence
MOMENT = (
    '__import__("pathlib").Path("moment." + __import__("os").environ["RANK"])'
    '.write_text(str(__import__("time").monotonic()))'
)


@dataclass(frozen=True)
class Sabotage:
    """One line of a program replaced, and what the report must say."""

    program: str
    name: str
    line: str  # the line that is replaced, which stands once in the program
    by: str  # the lines in its place, indented as if it stood at the margin
    says: str  # what happened, with the ranks
    places: tuple[str, ...]  # lines of the script that must be named, each with its number
    advice: str = ""
    never: str = MISLEADS
    certain: str = ""  # the line before which it is certain, where not the replaced one
    arguments: tuple[str, ...] | None = None  # otherwise the program's
    quick: bool = False  # tried by `make test`, too

    def __str__(self) -> str:
        return f"{self.program}: {self.name}"

    def source(self) -> str:
        """The program with the line replaced; each rank notes when it last came there."""
        lines = (FOREIGN / f"{self.program}.py").read_text(encoding="utf-8").splitlines()
        (number,) = (n for n, line in enumerate(lines) if line.strip() == self.line)
        indent = lines[number].removesuffix(self.line)
        lines[number : number + 1] = [indent + line for line in self.by.splitlines()]
        if self.certain:
            (number,) = (n for n, line in enumerate(lines) if line.strip() == self.certain)
        indent = lines[number][: -len(lines[number].lstrip())]
        return "\n".join([*lines[:number], indent + MOMENT, *lines[number:], ""])

    def problems(self, report: str) -> list[str]:
        """What is missing in a report, or misleads; [] where it is right."""
        report = " ".join(report.split())
        if not report:
            return ["there is no report"]
        found = []
        for what, pattern in (("what happened", self.says), ("advice", self.advice)):
            if not re.search(pattern, report):
                found.append(f"{what}: expected {pattern!r}")
        lines = [line.strip() for line in self.source().splitlines()]
        for place in self.places:
            numbers = [str(n) for n, line in enumerate(lines, 1) if line == place]
            assert numbers, f"{self}: {place!r} isn't a line of the script"
            where = rf"{self.program}\.py:({'|'.join(numbers)})( in \S+)?: "
            if not re.search(where + re.escape(" ".join(place.split())), report):
                found.append(f"line: expected {self.program}.py:{' or '.join(numbers)}: {place}")
        if self.never and (misleading := re.search(self.never, report)):
            found.append(f"misleads: {misleading.group()!r}")
        if misleading := re.search(FIRST_MISLEADS, re.split(r"\. |$", report)[0]):
            found.append(f"begins with {misleading.group()!r}")
        return found


SABOTAGES = [
    # PyTorch's DDP tutorial
    Sabotage(
        "ddp_trainer",
        "one batch less on rank 1",
        "for source, targets in self.train_data:",
        "for source, targets in list(self.train_data)[self.rank :]:",
        LEFT.format(1),
        ("loss.backward()",),
        SKIPPED,
        certain="destroy_process_group()",
        quick=True,
    ),
    Sabotage(
        "ddp_trainer",
        "one epoch less on rank 1",
        "for epoch in range(self.epochs_run, max_epochs):",
        "for epoch in range(self.epochs_run, max_epochs - self.rank):",
        LEFT.format(1),
        ("loss.backward()",),
        SKIPPED,
        certain="destroy_process_group()",
    ),
    Sabotage(
        "ddp_trainer",
        "rank 1 raises",
        "loss.backward()",
        'if self.rank == 1:\n    raise ValueError("no targets")\nloss.backward()',
        "rank 1 raised ValueError: no targets",
        ('raise ValueError("no targets")', "losses.append(self.run_batch(source, targets))"),
        quick=True,
    ),
    Sabotage(
        "ddp_trainer",
        "a layer that rank 1 leaves out",
        "x = torch.relu(self.second(x))",
        'if os.environ["RANK"] == "0":\n    x = torch.relu(self.second(x))',
        "rank 1 raised RuntimeError: Expected to have finished reduction in the prior iteration",
        ("output = self.model(source)",),
    ),
    Sabotage(
        "ddp_trainer",
        "rank 1 is killed",
        "loss.backward()",
        # Rank 0 is in its backward by then: torchrun ends it as soon as rank 1 is gone.
        'if self.rank == 1:\n    __import__("time").sleep(1)\n    os.kill(os.getpid(), 9)\n'
        "loss.backward()",
        r"rank 1 (died|was killed|was ended|is gone)",
        ("loss.backward()",),
        quick=True,
    ),
    Sabotage(
        "ddp_trainer",
        "rank 1 destroys its group and works on",
        "self.run_epoch(epoch)",
        "self.run_epoch(epoch)\nif self.rank == 1:\n    destroy_process_group()",
        r"rank 1 (has )?destroyed its group|rank 1 raised",
        ("destroy_process_group()",),
    ),
    Sabotage(
        "ddp_trainer",
        "another dtype on rank 1",
        "model = Classifier()",
        'model = Classifier()\nif os.environ["RANK"] == "1":\n    model.double()\n'
        "    dataset.tensors = (dataset.tensors[0].double(), dataset.tensors[1])",
        "mismatch: rank 0 called .*, but rank 1 called",
        ("self.model = DistributedDataParallel(self.model)",),
        "dtype",
        certain="self.model = DistributedDataParallel(self.model)",
    ),
    # nanoGPT
    Sabotage(
        "gpt_loop",
        "rank 1 sleeps while it loads",
        "x = torch.stack([data[split][i : i + block_size] for i in starts])",
        "if ddp_rank == 1 and iter_num == 3:\n    time.sleep(60)\n"
        "x = torch.stack([data[split][i : i + block_size] for i in starts])",
        r"no progress.* rank 0 .*waits in all_reduce for rank 1",
        ("loss.backward()", "time.sleep(60)"),
        arguments=("--timeout_s=6",),
    ),
    Sabotage(
        "gpt_loop",
        "rank 1 synchronises each micro-step",
        "model.require_backward_grad_sync = micro_step == gradient_accumulation_steps - 1",
        "last = micro_step == gradient_accumulation_steps - 1\n"
        "model.require_backward_grad_sync = ddp_rank == 1 or last",
        rf"{LEFT.format(0)}|mismatch: rank 0 .* rank 1 ",
        ("loss.backward()",),
        SKIPPED,
        certain="dist.destroy_process_group()",
    ),
    Sabotage(
        "gpt_loop",
        "each rank stops by its own loss",
        "lossf = loss.item() * gradient_accumulation_steps",
        "lossf = loss.item() * gradient_accumulation_steps\nif lossf < 27:\n    break",
        LEFT.format(0),
        ("loss.backward()",),
        SKIPPED,
        certain="dist.destroy_process_group()",
        quick=True,
    ),
    Sabotage(
        "gpt_loop",
        "a barrier under `if master_process`",
        'torch.save(checkpoint, "ckpt.pt")',
        'torch.save(checkpoint, "ckpt.pt")\ndist.barrier()',
        r"mismatch: rank 0 called barrier\(\), but rank 1 called all_reduce\(",
        ("dist.barrier()", "loss.backward()"),
        SKIPPED,
        quick=True,
    ),
    Sabotage(
        "gpt_loop",
        "rank 1 ends by os._exit(0)",
        "loss.backward()",
        "if ddp_rank == 1 and iter_num == 3:\n    os._exit(0)\nloss.backward()",
        r"rank 1 .*(exit|ended|gone|died)",
        ("loss.backward()",),
        never=rf"{MISLEADS}|torchrun says how",
        quick=True,
    ),
    Sabotage(
        "gpt_loop",
        "rank 1 calls sys.exit(3)",
        "loss.backward()",
        "if ddp_rank == 1 and iter_num == 3:\n    sys.exit(3)\nloss.backward()",
        r"rank 1 .*\b3\b",
        ("sys.exit(3)",),
        quick=True,
    ),
    # PyTorch's FSDP2 example
    Sabotage(
        "fsdp_transformer",
        "rank 0 saves alone",
        "checkpointer.save(model)",
        "if rank == 0:\n    checkpointer.save(model)",
        LEFT.format(1),
        ("full = shard.full_tensor()",),
        SKIPPED,
        certain="dist.destroy_process_group()",
        quick=True,
    ),
    Sabotage(
        "fsdp_transformer",
        "rank 0 alone clips",
        "norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)",
        "norm = torch.zeros(())\nif rank == 0:\n"
        "    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)",
        r"mismatch: rank 0 called all_reduce\(.*, but rank 1 called all_gather",
        (
            "norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)",
            "logits = model(tokens[:, :-1])",
        ),
        SKIPPED,
    ),
    Sabotage(
        "fsdp_transformer",
        "rank 1 drops a layer",
        "h = layer(h)",
        'if os.environ["RANK"] == "0" or layer is not self.layers[1]:\n    h = layer(h)',
        r"(mismatch: rank 0 called .*, but rank 1 called|rank \d waits .* for rank \d)",
        ("loss.backward()",),
        SKIPPED,
    ),
    Sabotage(
        "fsdp_transformer",
        "rank 1 ends by os._exit(3)",
        "loss.backward()",
        "if rank == 1 and step == 1:\n    os._exit(3)\nloss.backward()",
        r"rank 1 .*(exit|ended|gone|died)",
        ("os._exit(3)",),  # torchrun ends rank 0 at once, wherever it is
    ),
    Sabotage(
        "fsdp_transformer",
        "rank 1 gets SIGTERM",
        "loss.backward()",
        "if rank == 1 and step == 1:\n    os.kill(os.getpid(), 15)\nloss.backward()",
        r"rank 1 .*SIGTERM|SIGTERM.* rank 1",
        (),  # by then it may be anywhere
    ),
    # PyTorch's tensor-parallel example
    Sabotage(
        "tensor_and_data",
        "a shorter batch on rank 3",
        "batch = torch.randn(6, 8)",
        "batch = torch.randn(6 - (rank == 3), 8)",
        r"mismatch: rank 2 called all_reduce\(48 .*, but rank 3 called all_reduce\(40 ",
        ("return x + self.w2(torch.relu(self.w1(x)))",),
        "Did the last batch shrink",
        never=rf"{MISLEADS}|same order",
    ),
    Sabotage(
        "tensor_and_data",
        "rank 3 raises",
        "loss.backward()",
        'if rank == 3 and i == 1:\n    raise FloatingPointError("loss is NaN")\nloss.backward()',
        "rank 3 raised FloatingPointError: loss is NaN",
        ('raise FloatingPointError("loss is NaN")',),
    ),
    Sabotage(
        "tensor_and_data",
        "rank 0 evaluates alone",
        "held_out = evaluate()",
        "if rank == 0:\n    held_out = evaluate()",
        r"rank 0 (waits )?(in all_gather\S* )?for rank 2",
        ("return sharded_model(torch.ones(2, 8)).square().mean().item()", "dist.barrier()"),
        rf"{SKIPPED}|same order",
    ),
    # picotron
    Sabotage(
        "pipeline_1f1b",
        "rank 3 receives from a wrong peer",
        "self.prev_rank = None if self.first else pipeline[self.pp_rank - 1]",
        "self.prev_rank = None if self.first else 0",
        "rank 3 (waits )?for rank 0 in recv|rank 3 waits in recv for rank 0",
        ("for request in dist.batch_isend_irecv([op]):",),
        "Every send needs a recv",
        certain="loss = torch.tensor([train_step(stage, batches)])",
    ),
    Sabotage(
        "pipeline_1f1b",
        "rank 1 sends no last gradient",
        'communicate("send_backward", inputs_gradient)',
        'if pgm.rank != 1:\n    communicate("send_backward", inputs_gradient)',
        "rank 0 (waits )?(for rank 1 in recv|in recv for rank 1)",
        ("for request in dist.batch_isend_irecv([op]):",),
        "Every send needs a recv",
    ),
    Sabotage(
        "pipeline_1f1b",
        "rank 0 sends a shorter micro-batch",
        "outputs = stage(x if received is None else received)",
        "outputs = stage(x[: 4 - (pgm.rank == 0)] if received is None else received)",
        r"mismatch: rank 0 called send\(24 .*, but rank 1 called recv\(32 ",
        ("for request in dist.batch_isend_irecv([op]):",),
        "same number of elements",
    ),
    Sabotage(
        "pipeline_1f1b",
        "rank 2 sends another dtype",
        "sends = dist.P2POp(dist.isend, tensor, peer)",
        "if pgm.rank == 2:\n    tensor = tensor.bfloat16()\n"
        "sends = dist.P2POp(dist.isend, tensor, peer)",
        r"mismatch: rank 2 called send\(32 bfloat16.*, but rank 3 called recv\(32 float32",
        ("for request in dist.batch_isend_irecv([sends, receives]):",),
        "same dtype",
    ),
    Sabotage(
        "pipeline_1f1b",
        "groups in opposite order",
        "average_gradients(stage)",
        "groups = [pgm.pp_group, pgm.dp_group]\n"
        "for group in reversed(groups) if pgm.rank in (0, 3) else groups:\n"
        "    dist.barrier(group)\naverage_gradients(stage)",
        r"each waits for another: rank 0 for rank 2 in barrier, rank 1 for rank 0 in barrier",
        ("dist.barrier(group)",),
        "All ranks must use their groups in the same order",
        quick=True,
    ),
    # accelerate
    Sabotage(
        "accelerate_loop",
        "the main process evaluates alone",
        "right, seen = evaluate()",
        "right = seen = 0\nif accelerator.is_main_process:\n    right, seen = evaluate()",
        r"mismatch: rank 0 called .*, but rank 1 called",
        ("predictions, references = accelerator.gather_for_metrics((predictions, labels))",),
        SKIPPED,
    ),
    Sabotage(
        "accelerate_loop",
        "a wait for everyone under `if`",
        'accelerator.save(accelerator.unwrap_model(model).state_dict(), "model.bin")',
        'if accelerator.is_main_process:\n    torch.save(model.state_dict(), "model.bin")\n'
        "    accelerator.wait_for_everyone()",
        rf"{LEFT.format(1)}|rank 0 waits in barrier for rank 1",
        ("accelerator.wait_for_everyone()",),
        SKIPPED,
        certain="accelerator.end_training()",
    ),
    # An asynchronous checkpoint
    Sabotage(
        "checkpoint_thread",
        "rank 1's writer dies",
        "step, state = job",
        'step, state = job\nif rank == 1 and step == 3:\n    raise OSError("no space left")',
        rf"{LEFT.format(1)}|rank 0 waits in .*gather.* for rank 1",
        ("dist.gather_object(state, pieces, group=self.group)",),
        SKIPPED,
        certain="dist.destroy_process_group()",
        quick=True,
    ),
    Sabotage(
        "checkpoint_thread",
        "rank 1's thread uses the training's group",
        "dist.gather_object(state, pieces, group=self.group)",
        "group = None if rank == 1 else self.group\ndist.gather_object(state, pieces, group=group)",
        r"rank 0 .* rank 1",
        ("dist.gather_object(state, pieces, group=group)",),
        rf"{SKIPPED}|same order",
    ),
    Sabotage(
        "checkpoint_thread",
        "rank 1 waits for a lock that it holds",
        "dist.all_reduce(gradient)",
        "if rank == 1 and step == 4:\n    checkpointer.lock.acquire()\ndist.all_reduce(gradient)",
        r"no progress.* rank 0 waits in .* for rank 1",
        ("with self.lock:",),
        arguments=("6",),
    ),
    # A parameter server
    Sabotage(
        "parameter_server",
        "the server stops one gradient early",
        "for _ in range(STEPS * (world_size - 1)):",
        "for _ in range(STEPS * (world_size - 1) - 1):",
        r"rank \d (waits )?(for rank 0 in send|in send for rank 0)",
        ("dist.send(gradient, dst=0, tag=GRADIENT)",),
        "Every send needs a recv",
        certain="dist.barrier()",
        quick=True,
    ),
    Sabotage(
        "parameter_server",
        "rank 2 receives with a wrong tag",
        "dist.recv(weights, src=0, tag=WEIGHTS)",
        "dist.recv(weights, src=0, tag=WEIGHTS if rank == 1 else GRADIENT)",
        r"rank 2 (waits )?(for rank 0 in recv|in recv for rank 0)",
        ("dist.recv(weights, src=0, tag=WEIGHTS if rank == 1 else GRADIENT)",),
        "tags|Every send needs a recv",
        quick=True,
    ),
    Sabotage(
        "parameter_server",
        "rank 1 waits for a key that nobody sets",
        "batch = torch.randn(4, SIZE)",
        "if rank == 1:\n    dist.distributed_c10d._get_default_store().wait(['ready'])\n"
        "batch = torch.randn(4, SIZE)",
        r"no progress.* for rank 1|rank 1 raised",
        ("dist.distributed_c10d._get_default_store().wait(['ready'])",),
        arguments=("6",),
    ),
    # An evaluation
    Sabotage(
        "validation",
        "rank 2 comes late to a monitored barrier",
        "dist.monitored_barrier(timeout=timedelta(seconds=seconds))",
        "if rank == 2:\n    threading.Event().wait(60)\n"
        "dist.monitored_barrier(timeout=timedelta(seconds=seconds))",
        r"for rank 2|[Rr]ank 2 ",
        ("threading.Event().wait(60)",),
        arguments=("6",),
    ),
    Sabotage(
        "validation",
        "all_to_all with other splits on rank 1",
        "dist.all_to_all_single(received, torch.cat(parts), theirs.tolist(), counts.tolist())",
        "counts = counts + torch.tensor([1, 0, -1]) * (rank == 1)\n"
        "dist.all_to_all_single(received, torch.cat(parts), theirs.tolist(), counts.tolist())",
        r"mismatch: .*rank 1",
        ("dist.all_to_all_single(received, torch.cat(parts), theirs.tolist(), counts.tolist())",),
        "Rank 1 is in all of these pairs",
    ),
    Sabotage(
        "validation",
        "the writers alone make a group of all",
        "writers = dist.new_group([0, 1])",
        "writers = dist.new_group([0, 1])\nif rank < 2:\n    everybody = dist.new_group()",
        "new_group",
        ("everybody = dist.new_group()",),
        r"Every rank must call dist\.new_group",
        quick=True,
    ),
    Sabotage(
        "validation",
        "rank 1's prefetcher dies",
        "ready.put(torch.arange(4) + 4 * number + 100 * rank)",
        'if rank == 1 and number == 2:\n    raise OSError("unreadable")\n'
        "ready.put(torch.arange(4) + 4 * number + 100 * rank)",
        r"no progress.* for rank 1",
        ("while (batch := ready.get()) is not None:",),
        arguments=("6",),
    ),
    Sabotage(
        "validation",
        "each rank loops over its own batches",
        "for _ in range(count_steps()):",
        "for _ in range(length):",
        r"mismatch: .*rank 0 called all_to_all.*, but .*rank.* 2 called all_reduce|"
        r"mismatch: rank 0 called all_to_all",
        ("dist.all_to_all_single(theirs, counts)", "dist.all_reduce(totals)"),
        SKIPPED,
        quick=True,
    ),
    Sabotage(
        "validation",
        "rank 1 destroys a subgroup without its call",
        "dist.all_reduce(total, group=writers)",
        "if rank == 1:\n    dist.destroy_process_group(writers)\nelse:\n"
        "    dist.all_reduce(total, group=writers)",
        r"rank 1 (has )?destroyed|rank 0 (waits in all_reduce )?for rank 1",
        ("dist.all_reduce(total, group=writers)",),
        rf"{SKIPPED}|same order",
        never=rf"{MISLEADS}|rank 1: computing",
    ),
]
