"""The order of the data as arithmetic: which samples a step takes, and where each one lies.

Everything is a pure function of its arguments in constant memory, so a run can start at any
sample, and on any number of ranks, without replaying what came before.
"""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Int, UInt

# Fewer rounds leave neighbouring places visibly related in domains of a few bits.
ROUNDS = 8
MASK = (1 << 64) - 1


def permute(places: Int[np.ndarray, " N"], n: int, key: int) -> Int[np.ndarray, " N"]:
    """Where a keyed shuffle of 0 … n - 1 puts each place.

    The shuffle acts on the smallest power of two that holds n; a value that falls outside is
    shuffled again until it falls inside, which keeps it a bijection of 0 … n - 1.

    Source: cycle walking, Black and Rogaway, "Ciphers with Arbitrary Finite Domains", 2002.
    """
    bits = max(1, (n - 1).bit_length())
    constants = _splitmix64(np.uint64(mix(key)) ^ np.arange(2 * ROUNDS, dtype=np.uint64))
    constants = constants.reshape(ROUNDS, 2)
    shuffled = _shuffle(places.astype(np.uint64), bits, constants)
    while (outside := shuffled >= n).any():
        shuffled[outside] = _shuffle(shuffled[outside], bits, constants)
    return shuffled.astype(np.int64)


def mix(seed: int, *values: int) -> int:
    """A 64-bit key made of a seed and what the key is for, such as an epoch."""
    key = np.zeros(1, dtype=np.uint64)
    for value in (seed, *values):
        key = _splitmix64(key ^ np.uint64(value & MASK))
    return int(key[0])


def sample_places(samples: Int[np.ndarray, " N"], n: int, seed: int) -> Int[np.ndarray, " N"]:
    """The place, 0 … n - 1, of each sample of a run over n places, shuffled anew each epoch."""
    epochs, within = np.divmod(samples, n)
    places = np.empty_like(within)
    for epoch in np.unique(epochs):
        chosen = epochs == epoch
        places[chosen] = permute(within[chosen], n, mix(seed, int(epoch)))
    return places


def fixed_places(samples: Int[np.ndarray, " N"], n: int) -> Int[np.ndarray, " N"]:
    """The place, 0 … n - 1, of each sample in a shuffle that is the same in every run and epoch."""
    return permute(samples % n, n, mix(0x76616C))


def random_starts(
    samples: Int[np.ndarray, " N"], n_starts: int, seed: int
) -> Int[np.ndarray, " N"]:
    """An independent start, uniform in 0 … n_starts - 1, for each sample of a run."""
    return (_hashes(samples, mix(seed)) % np.uint64(n_starts)).astype(np.int64)


def mixture_slots(
    samples: Int[np.ndarray, " N"], weights: Sequence[int], seed: int
) -> tuple[Int[np.ndarray, " N"], Int[np.ndarray, " N"]]:
    """The source of each sample of a run over several, and the sample's number in that source.

    A block of sum(weights) samples holds every source as often as its weight says, in an order of
    its own, so the weights are exact in every block.
    """
    size, owners = sum(weights), np.repeat(np.arange(len(weights)), weights)
    blocks, slots = np.divmod(samples, size)
    distinct, row = np.unique(blocks, return_inverse=True)
    # Sorting by hashes shuffles many small blocks at once; `permute` takes one at a time.
    hashes = _hashes(distinct[:, None] * size + np.arange(size), mix(seed, size))
    sources = owners[hashes.argsort(axis=1, kind="stable")]
    own = np.empty_like(sources)  # which of its source's samples in this block
    for source in range(len(weights)):
        mine = sources == source
        own[mine] = (mine.cumsum(axis=1) - 1)[mine]
    chosen = sources[row, slots]
    return chosen, blocks * np.asarray(weights)[chosen] + own[row, slots]


def step_samples(
    step: int,
    micro_step: int,
    rank: int,
    *,
    first_sample: int = 0,
    micro_batch_size: int,
    accumulate: int,
    world_size: int,
) -> Int[np.ndarray, " B"]:
    """The samples of a run that one micro-batch of one rank takes.

    Args:
        step: optimizer steps since `first_sample`.
        micro_step: place of the micro-batch in its step, 0 … accumulate - 1.
        first_sample: samples taken before step 0, where the batch size changed on the way.
    """
    global_batch = micro_batch_size * accumulate * world_size
    # A rank's micro-batch is a run of the step's samples, not every world_size-th one: so any
    # split of the same global batch sees the same samples in the same step.
    first = step * global_batch + (micro_step * world_size + rank) * micro_batch_size
    return first_sample + first + np.arange(micro_batch_size, dtype=np.int64)


def _shuffle(
    values: UInt[np.ndarray, " N"], bits: int, constants: UInt[np.ndarray, "R 2"]
) -> UInt[np.ndarray, " N"]:
    # Each of the three is a bijection modulo 2^bits. Multiplying carries low bits upwards, the
    # shift brings high ones down.
    mask, shift = np.uint64((1 << bits) - 1), np.uint64(max(1, bits // 2))
    for factor, addend in constants:
        values = (values * (factor | np.uint64(1)) + addend) & mask
        values ^= values >> shift
    return values


def _hashes(samples: Int[np.ndarray, "..."], key: int) -> UInt[np.ndarray, "..."]:
    return _splitmix64(_splitmix64(samples.astype(np.uint64)) ^ np.uint64(key))


def _splitmix64(values: UInt[np.ndarray, "..."]) -> UInt[np.ndarray, "..."]:
    # Source: Steele, Lea and Flood, "Fast Splittable Pseudorandom Number Generators", 2014.
    values = values + np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
