"""The report of two trainings: what differs, in which step, on which ranks, by which factor."""

from dataclasses import dataclass, field

from .ratios import LOOSEST, near

SHOWN = 4  # names in a line
LINES = 8  # of differences


@dataclass
class Difference:
    """Tensors that differ in the same way.

    step: from 0; -1 is the start. what: 'gradient', 'update', 'parameter'. names: in the model's
    order. ranks: where; all: on every rank. factor: the ratio to the serial run, None if it isn't
    one number. error: what is left without the factor, as a share of the serial tensor. own: each
    rank has a gradient of its own, and their mean is `factor` times the serial one. part: if there
    is no factor, the rows that differ, where others are right ("rows 2 to 7 of 8: ×0"), or how long
    the tensors are and how far they are turned.
    """

    step: int
    what: str
    names: list[str]
    ranks: tuple[int, ...]
    all: bool
    factor: float | None
    error: float
    own: bool = False
    of: int = 0  # tensors that there are
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
    """The differences between a serial and a parallel training; `fine` if there are none.

    steps: that were compared. tensors: in each. tolerance: of a gradient in the first step.
    undecided: ranks used samples that the serial run didn't, or hold parts that can't be put
    together, or all gradients are 0.
    """

    steps: int
    tensors: int
    tolerance: float
    differences: list[Difference] = field(default_factory=list)
    causes: list[str] = field(default_factory=list)
    optimizer: str = ""
    undecided: bool = False

    @property
    def fine(self) -> bool:
        return not self.differences and not self.causes and self.steps > 0

    def __str__(self) -> str:
        if self.steps == 0:
            return "nothing to compare: no optimizer stepped after a backward"
        if self.fine:
            within = "to the last bit" if self.tolerance == 0 else f"within {self.tolerance:.1e}"
            compared = f"{self.steps} steps, {self.tensors} gradients and parameters in each"
            coarse = " (float32 would show more)" if self.tolerance == LOOSEST else ""
            return f"the same training: {compared}, equal {within}{coarse}"
        with_it = f" (with {self.optimizer})" if self.optimizer else ""
        begins = f"not the same training{with_it}; it begins here:"
        lines = [f"whether it is the same training can't be told{with_it}:"]
        lines = lines if self.undecided else [begins]
        lines += [f"  {difference}" for difference in self.differences[:LINES]]
        more = sum(len(difference.names) for difference in self.differences[LINES:])
        lines += [f"  and {more} more tensors, which differ in other ways"] if more else []
        return "\n".join(lines + [f"  {cause}" for cause in self.causes])
