"""The learning rate of every update."""

import re

import pytest

from lm.schedule import warmup_cosine, warmup_steps


def rates(warmup: int, max_steps: int, min_ratio: float = 0.1) -> list[float]:
    return [warmup_cosine(step, warmup, max_steps, min_ratio) for step in range(max_steps)]


@pytest.mark.parametrize(
    ("step", "lr"),
    [
        (0, "1.579e-06"),
        (95, "1.516e-04"),
        (189, "3.000e-04"),
        (190, "3.000e-04"),
        (2384, "2.649e-04"),
        (4768, "1.693e-04"),
        (7152, "7.110e-05"),
        (9536, "3.000e-05"),
    ],
)
def test_the_base_run_has_its_published_rates(step: int, lr: str) -> None:
    warmup = warmup_steps(0.02, 9537)
    assert f"{3e-4 * warmup_cosine(step, warmup, 9537, 0.1):.3e}" == lr


@pytest.mark.parametrize(("step", "factor"), [(0, 1.0), (1000, 0.55), (2000, 0.1)])
def test_a_pure_cosine_passes_its_start_middle_and_end(step: int, factor: float) -> None:
    assert warmup_cosine(step, 0, 2000, 0.1) == pytest.approx(factor, rel=1e-12)


def test_a_quarter_of_a_pure_cosine_has_its_published_rate() -> None:
    assert f"{5e-4 * warmup_cosine(500, 0, 2000, 0.1):.2e}" == "4.34e-04"


def test_the_first_update_moves() -> None:
    assert rates(warmup=4, max_steps=20)[:5] == [0.25, 0.5, 0.75, 1.0, 1.0]


def test_without_warmup_the_first_update_has_the_peak_rate() -> None:
    assert warmup_cosine(0, 0, 20, 0.1) == 1.0


@pytest.mark.parametrize("warmup", [0, 20, 999])
def test_the_last_update_is_within_a_percent_of_the_lowest_rate(warmup: int) -> None:
    assert 0.1 <= warmup_cosine(1000 + warmup - 1, warmup, 1000 + warmup, 0.1) < 0.101


@pytest.mark.parametrize("step", [20, 21, 1000])
@pytest.mark.parametrize("warmup", [0, 19])
def test_the_rate_stays_at_its_lowest_past_the_end(step: int, warmup: int) -> None:
    assert warmup_cosine(step, warmup, 20, 0.1) == 0.1


@pytest.mark.parametrize("min_ratio", [0.0, 0.1, 1.0])
def test_after_the_warmup_the_rate_never_rises_nor_leaves_its_range(min_ratio: float) -> None:
    decay = rates(warmup=7, max_steps=100, min_ratio=min_ratio)[7:]
    assert decay == sorted(decay, reverse=True)
    assert min_ratio <= min(decay) <= max(decay) == 1.0


@pytest.mark.parametrize(
    ("warmup", "max_steps", "steps"),
    [
        (0.02, 9537, 190),
        (0.02, 10, 0),
        (0.29, 100, 29),  # 28.999999999999996 in binary
        (0.0, 10, 0),
        (0.99, 100, 99),
        (0, 10, 0),
        (1, 10, 1),  # a step, not the whole run
        (9, 10, 9),
    ],
)
def test_a_share_is_rounded_down_and_an_int_is_steps(
    warmup: int | float, max_steps: int, steps: int
) -> None:
    assert warmup_steps(warmup, max_steps) == steps


@pytest.mark.parametrize("warmup", [10, 11])
def test_a_warmup_that_fills_the_run_is_refused(warmup: int) -> None:
    message = (
        f"model.optim.warmup is {warmup} ({warmup} steps) and max_steps is 10: warmup must be "
        "smaller than max_steps; shorten it or lengthen the run"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        warmup_steps(warmup, 10)


@pytest.mark.parametrize("max_steps", [-1, 0])
def test_run_without_length_is_refused(max_steps: int):
    with pytest.raises(ValueError, match=f"max_steps is {max_steps}: the schedule needs"):
        warmup_steps(0.02, max_steps)
