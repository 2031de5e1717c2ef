"""Sampling: the same ids whatever the cache, the seed's whole say, and every border."""

import re
from collections import Counter
from collections.abc import Generator
from typing import Any

import pytest
import torch

from lm.config import ModelConfig
from lm.generate import generate, pick
from lm.model import LM

GREEDY: dict[str, Any] = {
    "max_new_tokens": 9,
    "temperature": 0.0,
    "top_k": None,
    "top_p": None,
    "seed": 0,
    "eos_id": None,
    "n_tokens": 41,
}


def tiny(n_layers: int = 3) -> LM:
    torch.manual_seed(0)
    config = ModelConfig(
        vocab_size=64,
        d_model=12,
        n_layers=n_layers,
        n_heads=6,
        n_kv_heads=2,
        head_dim=4,
        ffn_dim=14,
        max_seq_len=16,
        init_std=1.0,  # large enough for the context to matter
    )
    return LM(config)


def start(model: LM, prompt: list[int], **options: Any) -> Generator[int, None, None]:
    """Ids of a greedy text, unless the options differ."""
    return generate(model, prompt, **GREEDY | options)


def text(model: LM, prompt: list[int], **options: Any) -> list[int]:
    return list(start(model, prompt, **options))


def drawn(model: LM, prompt: list[int], **options: Any) -> list[int]:
    return text(model, prompt, **{"temperature": 1.0} | options)


def draws(shares: list[float], temperature: float = 1.0, **options: Any) -> Counter[int]:
    generator = torch.Generator().manual_seed(0)
    logits = torch.tensor(shares).log()
    options = {"top_k": None, "top_p": None} | options
    return Counter(pick(logits, temperature, generator=generator, **options) for _ in range(1000))


@torch.inference_mode()
def likeliest(model: LM, ids: list[int], count: int) -> list[int]:
    """Greedy continuation without a cache, from whole contexts of at most 16 ids."""
    out: list[int] = []
    while len(out) < count:
        logits = model(torch.tensor([(ids + out)[-16:]]))[0, -1, :41]
        out.append(int(logits.argmax()))
    return out


# The same ids


@pytest.mark.parametrize("use_cache", [True, False])
@pytest.mark.parametrize("length", [1, 7, 8, 12, 16, 40])
def test_greedy_ids_are_the_likeliest_ones(length: int, use_cache: bool) -> None:
    model, prompt = tiny(), [i % 41 for i in range(3, 3 + length)]
    ids = text(model, prompt, use_cache=use_cache)
    assert ids == likeliest(model, prompt, 9)
    assert len(set(ids)) > 3


@pytest.mark.parametrize("length", [1, 12, 16, 40])
def test_drawn_ids_do_not_depend_on_the_cache(length: int) -> None:
    prompt = [i % 41 for i in range(length)]
    cached = drawn(tiny(), prompt)
    assert cached == drawn(tiny(), prompt, use_cache=False)


def test_a_prompt_beyond_the_context_gets_its_new_ids() -> None:
    ids = text(tiny(), list(range(40)), max_new_tokens=5)
    assert len(ids) == 5
    assert ids == text(tiny(), list(range(24, 40)), max_new_tokens=5)


def test_temperature_zero_is_the_same_for_every_seed() -> None:
    model = tiny()
    first, second = (text(model, [3], seed=seed) for seed in (0, 1))
    assert first == second


def test_a_seed_gives_one_text_and_another_seed_another() -> None:
    model = tiny()
    first, again, other = (drawn(model, [3], seed=s) for s in (0, 0, 1))
    assert first == again
    assert first != other


@pytest.mark.parametrize(
    "option",
    [{"top_k": 1}, {"top_p": 1e-6}, {"temperature": 1e-9}, {"top_k": 1, "top_p": 1.0}],
    ids=str,
)
def test_one_choice_left_is_the_likeliest(option: dict[str, Any]) -> None:
    model = tiny()
    assert drawn(model, [3], **option) == likeliest(model, [3], 9)


# What may be drawn


def test_rows_beyond_the_tokenizer_are_never_drawn() -> None:
    model = tiny(n_layers=1)
    model.head_weight.data.mul_(0.1)  # near-equal shares
    ids = drawn(model, [3], max_new_tokens=1000, n_tokens=30)
    assert set(ids) == set(range(30))
    assert len(ids) == 1000


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_ids_without_a_token_are_never_drawn(temperature: float):
    holes = [number for number in range(41) if number % 3]
    ids = drawn(tiny(), [3], max_new_tokens=300, holes=holes, temperature=temperature)
    assert len(ids) == 300
    assert not {*ids} & {*holes}


@pytest.mark.parametrize(
    ("option", "kept"),
    [
        ({}, {0, 1, 2, 3}),
        ({"top_k": 1}, {2}),
        ({"top_k": 3}, {0, 2, 3}),
        ({"top_k": 9}, {0, 1, 2, 3}),
        ({"top_p": 0.45}, {2}),
        ({"top_p": 0.55}, {0, 2}),
        ({"top_p": 0.85}, {0, 2, 3}),
        ({"top_p": 1.0}, {0, 1, 2, 3}),
        ({"top_k": 2, "top_p": 0.6}, {2}),  # 0.5 of the 0.8 that top_k left
        ({"top_k": 2, "top_p": 0.7}, {0, 2}),
    ],
    ids=str,
)
def test_top_k_then_top_p_keep_the_likeliest(option: dict[str, Any], kept: set[int]) -> None:
    assert set(draws([0.3, 0.05, 0.5, 0.15], **option)) == kept


def test_top_k_of_equal_logits_keeps_k() -> None:
    assert set(draws([0.25, 0.25, 0.25, 0.25], top_k=2)) == {0, 1}


@pytest.mark.parametrize(
    ("temperature", "share"), [(0.0, 1.0), (0.5, 0.8), (1.0, 2 / 3), (2.0, 0.586)]
)
def test_temperature_flattens_the_shares(temperature: float, share: float) -> None:
    assert draws([2 / 3, 1 / 3], temperature)[0] / 1000 == pytest.approx(share, abs=0.03)


def test_a_temperature_next_to_zero_overflows_nothing() -> None:
    assert pick(torch.tensor([1.0, 9.0, 8.0]), 1e-308, None, None, torch.Generator()) == 1


# Ends


def test_eos_ends_the_text_and_is_not_yielded() -> None:
    ids = text(tiny(), [3])
    eos_id = ids[4]
    ended = text(tiny(), [3], eos_id=eos_id)
    assert ended == ids[: ids.index(eos_id)]


def test_an_eos_in_the_prompt_ends_nothing() -> None:
    assert len(text(tiny(), [40, 3], eos_id=40)) == 9


def test_no_new_tokens_are_none() -> None:
    assert text(tiny(), [3], max_new_tokens=0) == []


# What stays as it was


def test_the_prompt_and_the_global_generator_stay_as_they_were() -> None:
    model, prompt, state = tiny(), [3, 4], torch.get_rng_state()
    drawn(model, prompt)
    assert prompt == [3, 4]
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("training", [True, False])
def test_the_model_leaves_in_the_mode_it_came_in(training: bool) -> None:
    model = tiny().train(training)
    ids = start(model, [3])
    next(ids)
    assert not model.model.training
    ids.close()
    assert model.model.training is training


def test_no_autograd_state_leaks_between_ids() -> None:
    ids = start(tiny(), [3])
    next(ids)
    assert torch.is_grad_enabled()
    assert not torch.is_inference_mode_enabled()


# Borders


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"max_new_tokens": -1}, "--max_new_tokens is -1: must be 0 or above"),
        ({"temperature": -1.0}, "--temperature is -1.0: must be 0 (greedy) or above"),
        ({"temperature": float("nan")}, "--temperature is nan: must be 0 (greedy) or above"),
        ({"top_k": 0}, "--top_k is 0: must be at least 1"),
        ({"top_p": 0.0}, "--top_p is 0.0: must be above 0 and at most 1"),
        ({"top_p": 1.1}, "--top_p is 1.1: must be above 0 and at most 1"),
        ({"top_p": float("nan")}, "--top_p is nan: must be above 0 and at most 1"),
    ],
)
def test_an_option_out_of_range_is_refused_at_the_call(
    option: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        start(tiny(), [3], **option)


def test_a_prompt_without_tokens_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^--prompt has no tokens: must have at least one$"):
        start(tiny(), [])
