"""Learning-rate schedule: optimizer step to multiplier."""

import math


def warmup_steps(warmup: int | float, max_steps: int) -> int:
    """Return the warm-up steps: an int as given, a share of the run rounded down.

    Raises:
        ValueError: the run has no length, or the warm-up is not shorter.
    """
    if max_steps < 1:
        raise ValueError(f"max_steps is {max_steps}: the schedule needs the length of the run")
    # Rounded to 9 decimals first: 0.29 * 100 is 28.999999999999996 in binary.
    steps = warmup if isinstance(warmup, int) else math.floor(round(warmup * max_steps, 9))
    if steps >= max_steps:
        raise ValueError(
            f"model.optim.warmup is {warmup} ({steps} steps) and max_steps is {max_steps}: warmup "
            "must be smaller than max_steps; shorten it or lengthen the run"
        )
    return steps


def warmup_cosine(step: int, warmup: int, max_steps: int, min_ratio: float) -> float:
    """Return the multiplier of the peak learning rate at a 0-based step.

    Rises as (step + 1) / warmup, so that the first update is not zero. Then falls along half a
    cosine from 1 at step `warmup` to `min_ratio` at `max_steps`, and stays there.

    Source: SGDR, arXiv:1608.03983, without restarts.
    """
    if step < warmup:
        return (step + 1) / warmup
    if step >= max_steps:
        return min_ratio
    progress = (step - warmup) / (max_steps - warmup)
    return min_ratio + (1 - min_ratio) * 0.5 * (1 + math.cos(math.pi * progress))
