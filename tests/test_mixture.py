"""Several sources in fixed proportions."""

import re
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

from data.mixture import Mixture, named_sources, whole_weights
from data.order import mixture_slots
from data.tokens.memmap import TokenStream, open_token_file
from data.windows import Order, Windows

WEIGHTS = (3, 1, 2)


def sources(folder: Path, *n_windows: int, order: Order = "shuffled") -> list[Windows]:
    """One stream for each, of so many windows of 4; the first id of a window tells both."""
    made = []
    for source, count in enumerate(n_windows):
        path = folder / f"{source}.bin"
        (1000 * source + np.arange(4 * count + 1)).astype("<u2").tofile(path)
        made.append(Windows(TokenStream([open_token_file(path)]), 4, 3, order))
    return made


def seen(mixture: Mixture, samples: range) -> list[tuple[int, int]]:
    """Source and window of each sample."""
    firsts = mixture.__getitems__(samples)["input_ids"][:, 0].tolist()
    return [(first // 1000, first % 1000 // 4) for first in firsts]


# Which source


def test_every_block_holds_each_source_as_often_as_its_weight(tmp_path):
    chosen, _ = mixture_slots(np.arange(600), WEIGHTS, seed=5)
    for block in chosen.reshape(100, 6):
        assert Counter(block.tolist()) == {0: 3, 1: 1, 2: 2}


def test_blocks_have_orders_of_their_own_and_all_of_them():
    chosen, _ = mixture_slots(np.arange(6 * 2000), WEIGHTS, seed=5)
    # 6! / (3! · 1! · 2!) ways, each met some 33 times.
    ways = Counter(map(tuple, chosen.reshape(2000, 6).tolist()))
    assert len(ways) == 60
    assert max(ways.values()) < 66


def test_each_source_counts_its_own_samples_without_a_gap():
    chosen, numbers = mixture_slots(np.arange(6 * 40), WEIGHTS, seed=5)
    for source, weight in enumerate(WEIGHTS):
        assert numbers[chosen == source].tolist() == list(range(40 * weight))


def test_sample_of_a_mixture_depends_on_its_number_alone():
    whole = np.stack(mixture_slots(np.arange(600), WEIGHTS, seed=5))
    for some in (np.array([599, 0, 13]), np.array([7]), np.arange(50, 90)):
        assert (np.stack(mixture_slots(some, WEIGHTS, seed=5)) == whole[:, some]).all()


def test_seed_changes_the_order_of_sources():
    one, other = (mixture_slots(np.arange(600), WEIGHTS, seed=seed)[0] for seed in (5, 6))
    assert (one != other).any()


def test_order_of_sources_is_the_same_in_every_version():
    chosen, numbers = mixture_slots(np.arange(12), WEIGHTS, seed=5)
    assert chosen.tolist() == [0, 0, 0, 2, 1, 2, 2, 1, 2, 0, 0, 0]
    assert numbers.tolist() == [0, 1, 2, 0, 0, 1, 2, 1, 3, 3, 4, 5]


# Epochs


def test_each_source_goes_through_epochs_of_its_own(tmp_path):
    mixture = Mixture(sources(tmp_path, 6, 5), [3, 1], 3, "shuffled")
    taken = seen(mixture, range(4 * 20))
    small = [window for source, window in taken if source == 0]
    large = [window for source, window in taken if source == 1]
    assert [sorted(small[i : i + 6]) for i in range(0, 60, 6)] == [list(range(6))] * 10
    assert [sorted(large[i : i + 5]) for i in range(0, 20, 5)] == [list(range(5))] * 4


def test_batch_over_sources_equals_samples_one_by_one(tmp_path):
    mixture = Mixture(sources(tmp_path, 6, 5, 7), WEIGHTS, 3, "shuffled")
    assert seen(mixture, range(30)) == [seen(mixture, range(i, i + 1))[0] for i in range(30)]


def test_fixed_mixture_does_not_depend_on_the_seed(tmp_path):
    parts = sources(tmp_path, 6, 5, order="fixed")
    one, other = (Mixture(parts, [3, 1], seed, "fixed").__getitems__(range(12)) for seed in (1, 2))
    assert torch.equal(one["input_ids"], other["input_ids"])
    assert (one["labels"][:11] != -100).all()
    assert (one["labels"][11] == -100).all()


def test_start_lines_tell_the_share_of_each_source(tmp_path):
    lines = Mixture(sources(tmp_path, 6, 5), [3, 1], 3, "shuffled").start_lines
    assert lines == [
        f"data: {tmp_path}/0.bin (uint16): 25 tokens in 6 windows of 4; 3 of 4 samples",
        f"data: {tmp_path}/1.bin (uint16): 21 tokens in 5 windows of 4; 1 of 4 samples",
    ]


def test_sample_is_described_by_its_source(tmp_path):
    mixture = Mixture(sources(tmp_path, 6, 5), [3, 1], 3, "shuffled")
    for sample, (source, window) in enumerate(seen(mixture, range(8))):
        place = f"{tmp_path}/{source}.bin from token {4 * window:,} on"
        assert mixture.describe(sample) == place


# Weights and names


@pytest.mark.parametrize(
    ("given", "whole"),
    [
        ([3.0, 1.0], [3, 1]),
        ([0.75, 0.25], [3, 1]),
        ([0.1, 0.2], [1, 2]),
        ([70.0, 30.0], [7, 3]),
        ([0.5, 1.25, 1.0], [2, 5, 4]),
        ([2.0], [1]),
    ],
)
def test_weights_are_the_smallest_whole_numbers_of_their_proportions(given, whole):
    weights = {f"corpora/{i}": weight for i, weight in enumerate(given)}
    assert list(whole_weights(weights).values()) == whole


@pytest.mark.parametrize("weight", [0.0, -1.0, float("nan"), float("inf")])
def test_weight_not_above_zero_is_refused(weight):
    text = f"data.mixture gives corpora/b the weight {weight:g}: must be above 0; leave it out to"
    with pytest.raises(ValueError, match=re.escape(text)):
        whole_weights({"corpora/a": 1.0, "corpora/b": weight})


def test_weights_too_fine_for_a_block_are_refused():
    text = (
        "data.mixture has the weights 0.33333, 0.66667, which are exact only in blocks of "
        "100,000 samples, and 10,000 is the most; use rounder weights"
    )
    with pytest.raises(ValueError, match=re.escape(text)):
        whole_weights({"a": 0.33333, "b": 0.66667})


def test_mixture_of_nothing_is_refused():
    text = (
        "data.mixture names no source; write one folder: weight a line below it, or give data.path"
    )
    with pytest.raises(ValueError, match=re.escape(text)):
        whole_weights({})


def test_sources_are_named_by_their_last_part_unless_two_would_be_alike():
    paths, weights = named_sources(None, {"y/b": 2.0, "x/a": 3.0})
    assert (list(paths.items()), weights) == ([("a", "x/a"), ("b", "y/b")], {"a": 3, "b": 2})
    paths, _ = named_sources(None, {"y/a": 2.0, "x/a": 3.0})
    assert list(paths.items()) == [("x/a", "x/a"), ("y/a", "y/a")]
