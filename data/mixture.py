"""Several sources in fixed proportions."""

import math
from collections.abc import Mapping, Sequence
from fractions import Fraction
from pathlib import Path

import numpy as np
from jaxtyping import Int

from data.order import mixture_slots
from data.windows import Order, Samples

# A block's order is made anew for each batch, which takes longer the larger it is.
LARGEST_BLOCK = 10_000


class Mixture(Samples):
    """Samples of several sources, in every block each as often as its weight says.

    Each source goes through epochs of its own, so a small one with a large weight comes round more
    often.
    """

    def __init__(
        self, sources: Sequence[Samples], weights: Sequence[int], seed: int, order: Order
    ) -> None:
        size = sum(source.epoch_size for source in sources)
        super().__init__(size, sources[0].seq_len, seed, order)
        self.sources, self.weights = tuple(sources), tuple(weights)

    def read(
        self, samples: Int[np.ndarray, " B"]
    ) -> tuple[Int[np.ndarray, "B L"], Int[np.ndarray, "B L"]]:
        ids = np.empty((len(samples), self.seq_len + 1), dtype=np.int64)
        labels = np.empty_like(ids)
        chosen, numbers = self._slots(samples)
        for i, source in enumerate(self.sources):
            if (mine := chosen == i).any():
                ids[mine], labels[mine] = source.read(numbers[mine])
        return ids, labels

    def _slots(
        self, samples: Int[np.ndarray, " B"]
    ) -> tuple[Int[np.ndarray, " B"], Int[np.ndarray, " B"]]:
        # What is fixed does not depend on the seed.
        seed = 0 if self.order == "fixed" else self.seed
        return mixture_slots(samples, self.weights, seed)

    @property
    def start_lines(self) -> list[str]:
        size = sum(self.weights)
        lines = []
        for source, weight in zip(self.sources, self.weights, strict=True):
            first, *more = source.start_lines
            lines += [f"{first}; {weight} of {size} samples", *more]
        return lines

    def describe(self, sample: int) -> str:
        [source], [number] = self._slots(np.array([sample]))
        return self.sources[source].describe(int(number))


def named_sources(
    path: str | None, mixture: Mapping[str, float] | None
) -> tuple[dict[str, str], dict[str, int]]:
    """The path and the weight of each source, by name: what a run trains on.

    A name is a path's last part, or all of it where two would be alike. Sorted by name, so that
    the order in a file decides nothing.

    Raises:
        ValueError: both or neither are given, or the weights are none.
    """
    if (path is None) == (mixture is None):
        given = "neither is given" if path is None else f"both are given (data.path {path})"
        file = ", or a file that does, by --config" if path is None else ""
        raise ValueError(f"data.path or data.mixture names the data, and {given}: give one{file}")
    weights = {str(path): 1} if mixture is None else whole_weights(mixture)
    short = [Path(each).name for each in weights]
    names = short if len(set(short)) == len(short) else [*weights]
    paths = dict(sorted(zip(names, weights, strict=True)))
    return paths, {name: weights[each] for name, each in paths.items()}


def whole_weights(weights: Mapping[str, float]) -> dict[str, int]:
    """The smallest whole numbers in the proportions of the weights.

    Raises:
        ValueError: for no source, a weight that is not above 0, or proportions so fine that a
            block would be very large.
    """
    if not weights:
        raise ValueError(
            "data.mixture names no source; write one folder: weight a line below it, or give "
            "data.path"
        )
    for path, weight in weights.items():
        if not 0 < weight < math.inf:
            raise ValueError(
                f"data.mixture gives {path} the weight {weight:g}: must be above 0; leave it out "
                "to train without it"
            )
    # By their decimals: 0.1 is a tenth, not the binary number next to it.
    exact = [Fraction(str(weight)) for weight in weights.values()]
    scale = math.lcm(*(share.denominator for share in exact))
    whole = [int(share * scale) for share in exact]
    whole = [weight // math.gcd(*whole) for weight in whole]
    if sum(whole) > LARGEST_BLOCK:
        raise ValueError(
            f"data.mixture has the weights {', '.join(f'{w:g}' for w in weights.values())}, which "
            f"are exact only in blocks of {sum(whole):,} samples, and {LARGEST_BLOCK:,} is the "
            "most; use rounder weights"
        )
    return dict(zip(weights, whole, strict=True))
