"""The learning rate of a step: a rise, then half a cosine. Notebook 15."""

import math


def learning_rate(step: int, steps: int, warmup: int, peak: float, last: float) -> float:
    """Return the learning rate of one step: a straight rise, then half a cosine.

    The rate rises to `peak` in the first `warmup` steps, and falls from `peak`, in step `warmup`,
    to `last`, in step `steps` - 1. It depends on the step alone, so a resumed run goes on with the
    same rates. Loshchilov and Hutter 2017 (the cosine); Goyal et al. 2017 (the rise).

    step: the index of the step, from 0 to `steps` - 1; beyond that the cosine would rise again.
    steps: the number of steps in all.
    """
    if step < warmup:
        return peak * (step + 1) / warmup
    done = (step - warmup) / max(1, steps - 1 - warmup)
    return last + (peak - last) * (1 + math.cos(math.pi * done)) / 2
