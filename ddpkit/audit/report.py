"""The report of two trainings: what differs, in which step, on which ranks, by which factor."""

from dataclasses import dataclass, field

from .ratios import LOOSEST, near

SHOWN = 4  # names in a line
LINES = 8  # of differences
NOTHING = "nothing in the serial run"


@dataclass
class Difference:
    """Tensors of a parallel training that differ from the serial one's alike, in one step.

    step: from 0; -1: before the first. what: 'gradient', 'parameter' or 'update' (what a step adds
    to a parameter). names: of the tensors, in the model's order. ranks: where they differ; all: on
    every rank that has them. factor: the number by which the serial tensor is multiplied; None: no
    number fits. error: the length of the rest, as a share of the serial tensor's, for the first of
    them. own: ranks differ from one another as well, and `factor` is that of their mean. part: in
    words, without a factor: the rows that differ ("rows 2 to 7 of 8: ×0"), how many numbers are NaN
    or infinite, or lengths and angle ("no one factor (length ×2, turned by 9°)"),
    or `NOTHING`: there the serial run has none, or zeros.
    """

    step: int
    what: str
    names: list[str]
    ranks: tuple[int, ...]
    all: bool
    factor: float | None
    error: float
    own: bool = False
    of: int = 0  # tensors that the serial run has there
    part: str = ""

    def __str__(self) -> str:
        where = "on every rank" if self.all else f"on rank {', '.join(map(str, self.ranks))} only"
        where = "each rank has its own" if self.own else where
        ratio = self.part
        if self.factor is not None:
            ratio = f"×{self.factor:.4g}"
            if near(self.factor, 1) and not self.own:
                ratio += f" but for {self.error:.0e} of its length"
        when = "at the start" if self.step < 0 else f"step {self.step}"
        of = f"{when}, {self.what} of {self.named}"
        return f"{of}: {where}; their mean: {ratio}" if self.own else f"{of}: {ratio}, {where}"

    @property
    def named(self) -> str:
        more = f" and {len(self.names) - SHOWN} more" if len(self.names) > SHOWN else ""
        listed = f"{', '.join(self.names[:SHOWN])}{more}"
        return f"all {self.of} tensors" if len(self.names) == self.of > 1 else listed


@dataclass
class Report:
    """The differences between a serial and a parallel training, and what may cause them.

    `fine`: there is neither, and at least one step. steps: the number that all runs recorded; the
    comparison ends at the first that differs. tensors: the number of parameters. tolerance: the
    error that a gradient may have in the first step, as a share of its length. causes: sentences.
    optimizer: a note on the optimizer that was used, or "". undecided: True if ranks used samples
    that the serial run didn't, or hold parts that can't be put together, or under other names, or
    draw dropout masks, or all gradients are 0. finer: what makes the tolerance smaller.
    """

    steps: int
    tensors: int
    tolerance: float
    differences: list[Difference] = field(default_factory=list)
    causes: list[str] = field(default_factory=list)
    optimizer: str = ""
    undecided: bool = False
    finer: str = "float32"

    @property
    def fine(self) -> bool:
        return not self.differences and not self.causes and self.steps > 0

    def __str__(self) -> str:
        if self.steps == 0:
            return "nothing to compare: no optimizer stepped after a backward"
        if self.fine:
            within = "to the last bit" if self.tolerance == 0 else f"within {self.tolerance:.1e}"
            compared = f"{self.steps} steps, {self.tensors} gradients and parameters in each"
            coarse = f" ({self.finer} would show more)" if self.tolerance == LOOSEST else ""
            return f"the same training: {compared}, equal {within}{coarse}"
        with_it = f" (with {self.optimizer})" if self.optimizer else ""
        begins = f"not the same training{with_it}; it begins here:"
        lines = [f"whether it is the same training can't be told{with_it}:"]
        lines = lines if self.undecided else [begins]
        lines += [f"  {difference}" for difference in self.differences[:LINES]]
        more = sum(len(difference.names) for difference in self.differences[LINES:])
        lines += [f"  and {more} more tensors, which differ in other ways"] if more else []
        return "\n".join(lines + [f"  {cause}" for cause in self.causes])
