import math
from collections import Counter

import numpy as np
import pytest

from data.order import (
    fixed_places,
    mix,
    permute,
    random_starts,
    sample_places,
    step_samples,
)

LAYOUTS = [(12, 1, 1), (6, 2, 1), (3, 2, 2), (2, 1, 6), (1, 4, 3)]
"""Micro-batch size, accumulation and ranks of equal global batches."""


def _step(step, layout):
    size, accumulate, world = layout
    return [
        step_samples(
            step, m, r, micro_batch_size=size, accumulate=accumulate, world_size=world
        ).tolist()
        for m in range(accumulate)
        for r in range(world)
    ]


@pytest.mark.parametrize("n", [1, 2, 3, 5, 8, 16, 17, 1000, 4097])
def test_permutation_visits_every_place_once(n):
    assert sorted(permute(np.arange(n), n, 7)) == list(range(n))


def test_permutation_of_a_part_equals_the_part_of_the_permutation():
    places = np.array([40, 3, 3, 0])
    assert (permute(places, 41, 9) == permute(np.arange(41), 41, 9)[places]).all()


@pytest.mark.parametrize("n", [2, 3, 4, 5])
def test_every_order_of_few_places_is_equally_likely(n):
    orders = math.factorial(n)
    drawn = Counter(tuple(permute(np.arange(n), n, mix(1, key))) for key in range(50 * orders))
    deviation = sum((count - 50) ** 2 / 50 for count in drawn.values())
    assert len(drawn) == orders
    # Chi-squared, six standard deviations above its mean.
    assert deviation < orders + 6 * math.sqrt(2 * orders)


def test_neighbours_of_a_huge_domain_land_far_apart():
    n = 10**12
    shuffled = permute(np.arange(20_000), n, 5)
    assert len(set(shuffled.tolist())) == 20_000
    assert abs(np.corrcoef(shuffled[1:], shuffled[:-1])[0, 1]) < 0.03
    assert np.histogram(shuffled, bins=8, range=(0, n))[0] == pytest.approx(2500, rel=0.1)


def test_order_is_the_same_in_every_version():
    assert permute(np.arange(10), 10, 42).tolist() == [0, 9, 6, 3, 1, 2, 8, 5, 4, 7]


def test_fixed_order_is_the_same_in_every_version_and_epoch():
    assert fixed_places(np.arange(12), 10).tolist() == [8, 7, 2, 1, 0, 5, 6, 3, 4, 9, 8, 7]


def test_key_depends_on_every_value_and_their_order():
    assert len({mix(1, 2), mix(2, 1), mix(1), mix(1, 2, 0), mix(-1, 2)}) == 5


def test_each_epoch_visits_every_place_in_a_new_order():
    places = sample_places(np.arange(3 * 29), 29, seed=4).reshape(3, 29)
    assert (np.sort(places) == np.arange(29)).all()
    assert len(set(map(tuple, places.tolist()))) == 3


def test_call_over_an_epoch_border_equals_calls_one_by_one():
    whole = sample_places(np.arange(20, 40), 29, seed=4)
    assert whole.tolist() == [sample_places(np.array([i]), 29, seed=4)[0] for i in range(20, 40)]


def test_seed_changes_the_order():
    samples = np.arange(29)
    assert (sample_places(samples, 29, seed=4) != sample_places(samples, 29, seed=5)).any()
    assert (random_starts(samples, 999, seed=4) != random_starts(samples, 999, seed=5)).any()


def test_random_starts_are_uniform_and_reach_both_ends():
    counts = np.bincount(random_starts(np.arange(17_000), 17, seed=3), minlength=17)
    assert counts == pytest.approx(1000, rel=0.15)
    assert counts.size == 17


def test_random_starts_of_a_sample_do_not_depend_on_the_call():
    assert random_starts(np.arange(9), 50, seed=3)[4] == random_starts(np.array([4]), 50, seed=3)[0]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_split_of_a_batch_takes_the_same_samples_in_a_step(layout):
    assert np.concatenate(_step(5, layout)).tolist() == list(range(60, 72))


def test_micro_batch_of_a_rank_is_a_run_of_the_steps_samples():
    assert _step(1, (2, 2, 3)) == [[12, 13], [14, 15], [16, 17], [18, 19], [20, 21], [22, 23]]


def test_steps_count_on_from_the_first_sample():
    taken = step_samples(2, 0, 1, first_sample=100, micro_batch_size=3, accumulate=1, world_size=2)
    assert taken.tolist() == [115, 116, 117]
