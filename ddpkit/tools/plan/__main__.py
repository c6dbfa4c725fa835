"""`python -m ddpkit.tools.plan --ranks 8 --memory 16GB ...` prints plans, and why the best is."""

import argparse
import re

from ...cost import CostModel
from ...runtime.link import PRESETS
from ..checks import check_counts
from ..units import DECIMAL, wrap
from . import Machine, Search, Shape, explain, fit, table

MODEL = {  # 7 billion parameters
    "layers": 32,
    "width": 4096,
    "heads": 32,
    "vocabulary": 32_000,
    "length": 2048,
    "batch": 64,
    "precision": "mixed",
}


def nbytes(text: str) -> float:
    """Return the bytes of a text such as '16GB' or '16e9'; a GB is 10^9 bytes.

    ValueError, AttributeError: it is neither.
    """
    number, unit = re.fullmatch(r"([\d.e+]+)\s*([TGMk]?B)?", text).groups()
    return float(number) * DECIMAL[unit or "B"]


def bytes_of(text: str) -> float:
    """Return the bytes of a text such as '16GB', for argparse.

    ArgumentTypeError: it isn't one; the message says what is expected.
    """
    try:
        return nbytes(text)
    except (AttributeError, ValueError):
        expected = "expected bytes such as 16GB or 16e9"
        raise argparse.ArgumentTypeError(f"{expected}, got {text!r}") from None


def arguments(given: list[str] | None) -> argparse.Namespace:
    """Return a command line's options. given: None for this process's. SystemExit: wrong ones."""
    parser = argparse.ArgumentParser("python -m ddpkit.tools.plan", description=__doc__)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--memory", type=bytes_of, help="of a rank, such as 16GB")
    for name, value in MODEL.items():
        parser.add_argument(f"--{name}", type=type(value), default=value, help=f"{value}")
    parser.add_argument("--tflops", type=float, default=400.0, help="that a rank reaches: 400")
    wires = ", ".join(PRESETS)
    parser.add_argument("--wire", default="NVLink 4", choices=PRESETS, help=f"in a node: {wires}")
    parser.add_argument("--between", choices=PRESETS, metavar="WIRE", help="between nodes")
    parser.add_argument("--per-node", type=int, help="ranks of a node; all")
    parser.add_argument("--fit", action="store_true", help="measure this machine instead, 20 s")
    parser.add_argument("--top", type=int, default=8, help="plans that are printed: 8")
    return parser.parse_args(given)


def machine_of(asked: argparse.Namespace, shape: Shape) -> Machine:
    """Return the machine that the options describe, or with --fit this one, measured.

    With --fit only --ranks and `shape`, the model to time, count; --memory doesn't.
    """
    if asked.fit:
        return fit(shape, asked.ranks)
    between = CostModel(*PRESETS[asked.between]) if asked.between else None
    wire = CostModel(*PRESETS[asked.wire])
    # AdamW reads and writes 28 bytes a parameter; 3.35 TB/s is an H100's memory.
    speed = asked.tflops * 1e12, wire, between, asked.per_node, 3.35e12 / 28
    return Machine(asked.ranks, asked.memory or 80e9, *speed)


def main(given: list[str] | None = None) -> None:
    """Search for the best plans and print them in a table, then the reasons for the best.

    given: the command's arguments; None: those of this process.
    SystemExit: the options can't be a model or a machine; the message says why.
    """
    asked = arguments(given)
    try:
        check_counts(**{"--top": asked.top})
        shape = Shape(**{name: getattr(asked, name) for name in MODEL})
        machine = machine_of(asked, shape)
    except ValueError as error:
        raise SystemExit(str(error)) from None
    search = Search(shape, machine)
    found = search.best(asked.top)
    if found:
        print(f"{table(found)}\n")
    print(wrap(explain(search)))


if __name__ == "__main__":
    main()
