"""The total norm of gradients at any size."""

import math

import pytest
import torch

from lm.gradients import BLOCK, total_norm


@pytest.mark.parametrize("size", [1, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 5, 30_000_001])
def test_norm_is_right_at_any_size(size: int):
    gradient = torch.full((size,), 0.7)
    exact = float(gradient[0].double()) * math.sqrt(size)
    assert total_norm([gradient]).item() == pytest.approx(exact, rel=1e-6)


def test_norm_of_several_tensors_is_that_of_all_their_elements():
    parts = [torch.randn(3, BLOCK), torch.randn(5, 7), torch.randn(2, 11).T]
    exact = torch.cat([part.reshape(-1) for part in parts]).double().norm()
    assert total_norm(parts).item() == pytest.approx(exact.item(), rel=1e-6)


def test_norm_has_the_same_bits_for_any_number_of_threads():
    gradients = [torch.randn(1_000_003), torch.randn(17, 65_537)]
    found = set()
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        found.add(total_norm(gradients).item())
    torch.set_num_threads(1)
    assert len(found) == 1


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_one_bad_element_of_many_makes_the_norm_not_finite(bad: float):
    gradient = torch.zeros(2 * BLOCK + 3)
    gradient[BLOCK + 2] = bad
    assert not total_norm([gradient, torch.ones(5)]).isfinite()


def test_no_gradient_has_norm_zero():
    assert total_norm([]).item() == 0
