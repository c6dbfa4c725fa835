"""The settings of a training: one dataclass, from a TOML file and flags, and what can't work."""

import argparse
import dataclasses
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

CHOICES = {
    "sharding": ("ddp", "zero1", "fsdp"),
    "schedule": ("1f1b", "gpipe", "zero_bubble"),
    "attention": ("zigzag", "ring", "gathered", "all_to_all"),
    "dtype": ("float32", "bfloat16", "float16"),
    "optimizer": ("adamw", "sgd", "sign"),
}
AXES = (
    "pipeline",
    "data",
    "context",
    "tensor",
)  # the mesh, from the outermost: neighbours share tensors
# What a checkpoint and the run that goes on from it must share: the model, its optimizer's state,
# and the samples of each step.
SAME = "layers", "width", "heads", "length", "experts", "exact", "optimizer"
SAME += "top_k", "batch", "seed", "text"


@dataclass(frozen=True)
class TrainConfig:
    """The settings of one training, unchecked; `problems` says which can't work together."""

    # The model: ddpkit.models.GPT on bytes.
    layers: int = 4
    width: int = 64
    heads: int = 4
    length: int = 64  # tokens in a sequence
    dropout: float = 0.0
    experts: int = 0  # how many replace each MLP; 0: a plain MLP
    top_k: int = 2  # experts that a token visits
    # A step: `batch` sequences over all ranks, in micro-batches.
    batch: int = 16
    micro_batches: int = 1
    steps: int = 100
    text: str = ""  # a file; empty: Python's own manual
    # The mesh: ranks along each axis. Their product is the world size.
    data: int = 1
    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    sharding: str = "ddp"  # among data and context ranks: of nothing, optimizer state, or all
    schedule: str = "1f1b"  # of the pipeline
    attention: str = "zigzag"  # across the context axis
    share_experts: bool = True  # deal them out to the data axis; False: each rank has all
    # Precision and memory.
    dtype: str = "float32"  # of activations; parameters are float32
    recompute: bool = False  # keep only each block's input; compute the block again in backward
    # The optimizer.
    optimizer: str = "adamw"
    lr: float = 3e-3
    warmup: int = 10  # steps until the rate is `lr`
    decay_to: float = 0.1  # the last rate, as a part of `lr`, along a cosine
    weight_decay: float = 0.1  # of matrices
    clip: float = 1.0  # the gradient's largest norm; 0: no limit
    seed: int = 0
    exact: bool = False  # train the exact twin: small integers, equal to the last bit on every mesh
    # Checkpoints and logs.
    folder: str = ""  # empty: nothing is saved
    save_every: int = 0  # steps; 0: only after the last one
    keep: int = 3  # checkpoints; older ones are deleted
    log_every: int = 10  # steps from one printed line to the next; 0: none

    @property
    def world_size(self) -> int:
        """Return the number of ranks, the product of the mesh's axes."""
        return self.data * self.tensor * self.pipeline * self.context

    @property
    def replicas(self) -> int:
        """Return data × context: how many ranks share the same weights, each with other tokens."""
        return self.data * self.context


def problems(config: TrainConfig, world_size: int | None = None) -> list[str]:
    """List what can't work, a sentence each, with what could; empty if all is well.

    Meant to be called before a rank starts. Values that make no sense by themselves are reported
    first, and alone. world_size: the number of ranks if they run already, as under torchrun; None
    if not.
    """
    found = []
    c = config
    counts = "layers width heads length batch micro_batches steps data tensor pipeline context keep"
    for name in counts.split():
        value = getattr(c, name)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            found.append(f"{name} = {value!r}: give a whole number from 1.")
    for name, choices in CHOICES.items():
        if getattr(c, name) not in choices:
            found.append(f"{name} = {getattr(c, name)!r}: choose one of {', '.join(choices)}.")
    for name in ("lr",):
        if not getattr(c, name) > 0:
            found.append(f"{name} = {getattr(c, name)!r}: give a number above 0.")
    more = "clip weight_decay warmup decay_to save_every log_every experts dropout"
    for name in more.split():
        if not getattr(c, name) >= 0:
            found.append(f"{name} = {getattr(c, name)!r}: give 0 or more.")
    if found:
        return found  # the others would divide by what makes no sense
    if world_size is not None and world_size != c.world_size:
        axes = " × ".join(f"{name} {getattr(c, name)}" for name in AXES)
        found.append(
            f"{axes} = {c.world_size} ranks, but {world_size} were started: start {c.world_size}, "
            f"or choose {fitting_data(c, world_size)}."
        )
    found += problems_of_the_model(c) + problems_of_the_mesh(c)
    if c.text and not Path(c.text).is_file():
        found.append(f"text = {c.text!r}: there is no such file. Leave it out for Python's manual.")
    return found


def fitting_data(c: TrainConfig, world_size: int) -> str:
    """Suggest settings of the mesh that need `world_size` ranks, as "data = 2" or in words."""
    rest = c.tensor * c.pipeline * c.context
    if world_size % rest == 0:
        return f"data = {world_size // rest}"
    return f"axes whose product is {world_size}"


def problems_of_the_model(c: TrainConfig) -> list[str]:
    """List, as sentences, what can't work in the settings of the model; empty if all can."""
    found = []
    if c.width % c.heads:
        found.append(f"width {c.width} can't be shared by {c.heads} heads: make it a multiple.")
    if c.heads % c.tensor:
        few = f"{c.heads} heads can't be dealt to {c.tensor} tensor ranks"
        found.append(f"{few}: choose a multiple of {c.tensor} heads.")
    if c.layers + 2 < c.pipeline:
        few = f"{c.layers} blocks, embedding and head can't make {c.pipeline} stages"
        found.append(f"{few}: choose at most {c.layers + 2} pipeline ranks, or more layers.")
    if c.context > 1 and c.attention == "all_to_all" and (c.heads // c.tensor) % c.context:
        few = f"{c.heads // c.tensor} heads a rank can't be dealt to {c.context} context ranks"
        found.append(f"{few}: choose attention = 'zigzag', or heads that are a multiple.")
    if c.experts and not 1 <= c.top_k <= c.experts:
        found.append(f"top_k = {c.top_k} of {c.experts} experts: choose from 1 to {c.experts}.")
    if not 0 <= c.dropout < 1:
        found.append(f"dropout = {c.dropout}: give a share from 0 to below 1.")
    if c.dropout and c.context > 1:
        found.append("dropout on a shared sequence: context ranks would draw alike. Leave one out.")
    return found


def problems_of_the_mesh(c: TrainConfig) -> list[str]:
    """List, as sentences, what can't work together on a mesh of ranks; empty if all can."""
    found = []
    if c.batch < c.data * c.micro_batches:
        few = f"a batch of {c.batch} sequences leaves some of {c.data} data ranks × "
        enough = f"make it {c.data * c.micro_batches} at least"
        found.append(f"{few}{c.micro_batches} micro-batches without any: {enough}.")
    elif c.pipeline > 1 and c.batch % (c.data * c.micro_batches):
        whole = f"a batch of {c.batch} isn't a multiple of {c.data} data ranks × "
        found.append(
            f"{whole}{c.micro_batches} micro-batches, and a pipeline's must be equally long: "
            f"choose {-(-c.batch // (c.data * c.micro_batches)) * c.data * c.micro_batches}."
        )
    if c.pipeline > 1 and c.sharding == "fsdp":
        found.append(
            "sharding = 'fsdp' with a pipeline: each micro-batch would gather every weight anew. "
            "Choose zero1 or ddp with the pipeline, or fsdp with tensor ranks."
        )
    if c.pipeline > 1 and c.recompute and c.schedule == "zero_bubble":
        found.append(
            "recompute with zero_bubble: its backward in two parts can't cross a recomputed block. "
            "Choose 1f1b, or leave recompute out."
        )
    if c.dtype == "float16" and c.sharding != "ddp":
        found.append(
            "float16 needs its gradients unscaled where they are whole: choose sharding = 'ddp', "
            "or dtype = 'bfloat16', which needs no scale."
        )
    if c.experts and (c.tensor > 1 or c.pipeline > 1 or c.context > 1 or c.sharding != "ddp"):
        found.append(
            "experts share the data axis with data parallelism alone: choose sharding = 'ddp' and "
            "1 rank along tensor, pipeline and context."
        )
    if c.experts and c.share_experts and c.experts % c.data:
        few = f"{c.experts} experts can't be dealt to {c.data} data ranks"
        found.append(f"{few}: choose a multiple, or share_experts = false.")
    if c.exact and (c.dtype != "float32" or c.dropout or c.context > 1 or c.experts or c.clip):
        found.append(
            "the exact twin adds integers in float64: choose clip = 0, dropout = 0, dtype = "
            "'float32', context = 1, experts = 0. (Softmax across ranks, roots and rounded numbers "
            "have no exact twin.)"
        )
    if c.exact != (c.optimizer == "sign"):
        found.append("optimizer = 'sign' and exact = true go together: integers stay integers so.")
    return found


# From a file and flags


def parse(arguments: Sequence[str]) -> TrainConfig:
    """Return the config that a command line gives, `[file.toml] --name value ...`.

    Flags override the file, and the file overrides the defaults. `problems` isn't asked.
    SystemExit: an unknown name, or a value of another type. For a flag, a sentence is printed, and
    the code is 2; for the file, the sentence is the code.
    """
    parser = argparse.ArgumentParser(
        prog="python -m ddpkit.train", description=__doc__, allow_abbrev=False
    )
    parser.add_argument("file", nargs="?", help="a TOML file of the same names")
    for entry in dataclasses.fields(TrainConfig):
        flag = f"--{entry.name.replace('_', '-')}"
        if entry.type is bool:
            action = argparse.BooleanOptionalAction
            parser.add_argument(flag, action=action, default=None)
        else:
            shown = f"default: {entry.default!r}"
            choices = CHOICES.get(entry.name)
            parser.add_argument(flag, type=entry.type, choices=choices, help=shown)
    given = vars(parser.parse_args(arguments))
    file = given.pop("file")
    values = read_toml(file) if file else {}
    values |= {name: value for name, value in given.items() if value is not None}
    return TrainConfig(**values)


def read_toml(path: str) -> dict:
    """Return the settings in a TOML file, {name: value}; a float may be written as a whole number.

    SystemExit with a sentence: the file can't be read, isn't TOML, or has an unknown name or a
    value of another type.
    """
    try:
        values = tomllib.loads(Path(path).read_text())
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise SystemExit(f"{path} can't be read as TOML: {error}") from None
    types = {entry.name: entry.type for entry in dataclasses.fields(TrainConfig)}
    for name, value in values.items():
        if name not in types:
            raise SystemExit(f"{path}: {name!r} is no setting. There are: {', '.join(types)}.")
        if types[name] is float and type(value) is int:
            values[name] = float(value)
        elif type(value) is not types[name]:
            expected = types[name].__name__
            raise SystemExit(f"{path}: {name} = {value!r}, expected a value of type {expected}.")
    return values
