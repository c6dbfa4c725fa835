"""The learning rate of a step: a rise, then half a cosine. Notebook 15."""

import math


def learning_rate(step: int, steps: int, warmup: int, peak: float, last: float) -> float:
    """Return the rate of a step, counted from 0: a straight rise to `peak` in `warmup` steps, then
    half a cosine from `peak`, in step `warmup`, to `last` in step `steps` - 1.

    It depends on the step alone: a resumed run goes on with the same rates.
    Loshchilov and Hutter 2017 (the cosine); Goyal et al. 2017 (the rise).
    """
    if step < warmup:
        return peak * (step + 1) / warmup
    done = (step - warmup) / max(1, steps - 1 - warmup)
    return last + (peak - last) * (1 + math.cos(math.pi * done)) / 2
