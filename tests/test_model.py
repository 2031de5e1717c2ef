"""The network against its references, its exact sizes and its promises."""

import math
import re
from dataclasses import replace
from typing import Any

import pytest
import references
import torch
import torch.nn.functional as F

from lm.config import ModelConfig
from lm.model import LM, KVCache, RMSNorm, attends_in_groups, plain_keys, rotary_table, rotate

TINY = ModelConfig(
    vocab_size=11,
    d_model=12,
    n_layers=3,
    n_heads=10,
    n_kv_heads=5,
    head_dim=4,
    ffn_dim=14,
    max_seq_len=8,
    init_std=0.3,  # large enough for every weight to show in the logits
)
SMALL = ModelConfig(
    vocab_size=32000,
    d_model=256,
    n_layers=4,
    n_heads=4,
    n_kv_heads=2,
    ffn_dim=688,
    max_seq_len=512,
)
BASE = ModelConfig(
    vocab_size=32000,
    d_model=1536,
    n_layers=18,
    n_heads=12,
    n_kv_heads=4,
    ffn_dim=4096,
    max_seq_len=2048,
)


def build(config: ModelConfig = TINY) -> LM:
    torch.manual_seed(0)
    return LM(config).eval()


def draw_ids(batch: int = 2, length: int = 6, vocab_size: int = 11) -> torch.Tensor:
    return torch.randint(vocab_size, (batch, length), generator=torch.Generator().manual_seed(1))


def count(model: LM) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


# Sizes and names


def test_base_has_its_published_parameter_count() -> None:
    with torch.device("meta"):
        assert count(LM(BASE)) == 502_193_664


def test_small_builds_with_its_parameter_count() -> None:
    matrices = 2 * 256 * 256 + 2 * 256 * 128 + 3 * 256 * 688
    assert count(build(SMALL)) == 32000 * 256 + 4 * (matrices + 2 * 256) + 256


def test_an_untied_head_adds_one_matrix() -> None:
    untied = build(replace(TINY, tie_embeddings=False))
    assert count(untied) - count(build()) == 11 * 12
    assert untied.head_weight is not untied.model.embed_tokens.weight


def test_names_and_shapes_are_those_of_llama() -> None:
    model = build(replace(TINY, n_layers=1, tie_embeddings=False))
    assert {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()} == {
        "model.embed_tokens.weight": (11, 12),
        "model.layers.0.input_layernorm.weight": (12,),
        "model.layers.0.self_attn.q_proj.weight": (40, 12),
        "model.layers.0.self_attn.k_proj.weight": (20, 12),
        "model.layers.0.self_attn.v_proj.weight": (20, 12),
        "model.layers.0.self_attn.o_proj.weight": (12, 40),
        "model.layers.0.post_attention_layernorm.weight": (12,),
        "model.layers.0.mlp.gate_proj.weight": (14, 12),
        "model.layers.0.mlp.up_proj.weight": (14, 12),
        "model.layers.0.mlp.down_proj.weight": (12, 14),
        "model.norm.weight": (12,),
        "lm_head.weight": (11, 12),
    }


def test_heads_are_derived_where_not_given() -> None:
    config = ModelConfig(d_model=24, n_heads=6)
    assert (config.head_size, config.kv_heads) == (4, 6)


@pytest.mark.parametrize(
    "name",
    [
        "model.norm.weight",
        "module.model.norm.weight",
        "_orig_mod.model.norm.weight",
        "model._orig_mod.norm.weight",
        "module._orig_mod.model.norm.weight",
        "_orig_mod.module.model.norm.weight",
    ],
)
def test_plain_keys_takes_wrappers_prefixes_off(name: str) -> None:
    weight = torch.ones(1)
    assert plain_keys({name: weight}) == {"model.norm.weight": weight}


# Logits


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("n_kv_heads", [1, 5, 10])
def test_logits_equal_those_of_a_decoder_written_in_loops(tied: bool, n_kv_heads: int) -> None:
    config = replace(TINY, tie_embeddings=tied, n_kv_heads=n_kv_heads)
    model = build(config).double()
    expected = references.logits(model.state_dict(), draw_ids(), config)
    torch.testing.assert_close(model(draw_ids()), expected, rtol=1e-5, atol=1e-6)


def test_future_tokens_do_not_change_past_logits() -> None:
    ids = draw_ids()
    changed = ids.clone()
    changed[:, 3] = (ids[:, 3] + 1) % 11
    before, after = build()(ids), build()(changed)
    assert torch.equal(before[:, :3], after[:, :3])
    assert (before[:, 3:] != after[:, 3:]).any(dim=2).all()


@pytest.mark.parametrize("length", [1, 4])
def test_pads_on_the_right_do_not_change_real_positions(length: int) -> None:
    model, ids = build(), draw_ids()
    torch.testing.assert_close(model(ids)[:, :length], model(ids[:, :length]))


def test_rows_of_a_batch_do_not_touch_each_other() -> None:
    model, ids = build(), draw_ids()
    torch.testing.assert_close(model(ids)[1:], model(ids[1:]))


@pytest.mark.parametrize("sizes", [[6], [1] * 6, [4, 1, 1], [2, 3, 1]])
@pytest.mark.parametrize("n_kv_heads", [5, 10])
def test_cached_logits_equal_uncached_ones(sizes: list[int], n_kv_heads: int) -> None:
    model, ids = build(replace(TINY, n_kv_heads=n_kv_heads)), draw_ids()
    cache = KVCache(model.config, 2, model.head_weight)
    with torch.inference_mode():
        cached = torch.cat([model(part, cache) for part in ids.split(sizes, dim=1)], dim=1)
        torch.testing.assert_close(cached, model(ids))
    assert cache.length == 6


def test_a_cache_is_allocated_once_for_the_whole_context() -> None:
    cache = KVCache(TINY, 2, torch.ones(1, dtype=torch.bfloat16))
    assert cache.keys.shape == cache.values.shape == (3, 2, 5, 8, 4)
    assert cache.keys.dtype == torch.bfloat16


def test_grouped_queries_equal_repeated_key_heads() -> None:
    grouped, full = build(), build(replace(TINY, n_kv_heads=10))
    weights = grouped.state_dict()
    for name in [name for name in weights if re.search("[kv]_proj", name)]:
        heads = weights[name].unflatten(0, (5, 4))
        weights[name] = heads.repeat_interleave(2, dim=0).flatten(0, 1)
    full.load_state_dict(weights)
    torch.testing.assert_close(grouped(draw_ids()), full(draw_ids()))


@pytest.mark.parametrize(
    ("device", "dtype", "able"),
    [
        ("cpu", torch.float32, True),
        ("cuda", torch.bfloat16, True),
        ("cuda", torch.float32, False),
        ("cuda", torch.float16, False),
    ],
)
def test_only_flash_attention_shares_keys_on_cuda(device: str, dtype: torch.dtype, able: bool):
    assert attends_in_groups(device, dtype) == able


def test_keys_copied_for_each_query_give_the_same(monkeypatch: pytest.MonkeyPatch):
    model, ids = build(), draw_ids()
    shared = model(ids)
    monkeypatch.setattr("lm.model.attends_in_groups", lambda *_: False)
    seen = []
    attend = F.scaled_dot_product_attention
    monkeypatch.setattr(
        F,
        "scaled_dot_product_attention",
        lambda q, k, v, **words: seen.append((k.shape[1], words)) or attend(q, k, v, **words),
    )
    torch.testing.assert_close(model(ids), shared)
    assert {heads for heads, _ in seen} == {TINY.n_heads}
    assert not any(words["enable_gqa"] for _, words in seen)


# Parts


def test_rotary_equals_a_complex_turn() -> None:
    x = torch.randn(2, 10, 8, 4, generator=torch.Generator().manual_seed(2))
    torch.testing.assert_close(rotate(x, rotary_table(TINY)), references.rotate(x, 10000.0))


@pytest.mark.parametrize("shift", [1, 3])
def test_rotated_products_depend_on_relative_position_only(shift: int) -> None:
    q, k = torch.randn(2, 1, 1, 1, 4, generator=torch.Generator().manual_seed(2))
    table = rotary_table(TINY)
    turned_q, turned_k = rotate(q.expand(1, 1, 8, 4), table), rotate(k.expand(1, 1, 8, 4), table)
    products = (turned_q @ turned_k.transpose(2, 3))[0, 0]
    torch.testing.assert_close(products[shift:, shift:], products[:-shift, :-shift])
    assert products[0].unique().numel() == 8


def test_position_zero_is_not_turned() -> None:
    x = torch.randn(2, 10, 1, 4)
    assert torch.equal(rotate(x, rotary_table(TINY)[:, :1]), x)


def test_norm_statistics_do_not_overflow_in_half_precision() -> None:
    x = torch.full((2, 12), 300.0, dtype=torch.float16)  # its square is above fp16's largest
    assert torch.equal(RMSNorm(12, 1e-5).half()(x), torch.ones_like(x))


def test_dropout_acts_in_training_only() -> None:
    model, ids = build(replace(TINY, dropout=0.5)), draw_ids()
    assert torch.equal(model(ids), build()(ids))
    assert not torch.equal(model.train()(ids), model(ids))


# Initial weights


@pytest.mark.parametrize(
    ("config", "length"),
    # The base model's head at the width that a fixed deviation would start too high at.
    [(SMALL, 64), (replace(BASE, n_layers=1, max_seq_len=16), 16)],
    ids=["small", "base head"],
)
@pytest.mark.parametrize("tied", [True, False])
def test_first_loss_is_that_of_a_uniform_guess(
    config: ModelConfig, length: int, tied: bool
) -> None:
    ids = draw_ids(4, length, 32000)
    with torch.inference_mode():
        logits = build(replace(config, tie_embeddings=tied))(ids)
    loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    assert loss.item() == pytest.approx(math.log(32000), abs=0.1)


@pytest.mark.parametrize(
    ("name", "std"),
    [
        ("model.embed_tokens.weight", math.sqrt(0.05 / 256)),
        ("model.layers.3.self_attn.q_proj.weight", 0.02),
        ("model.layers.3.mlp.up_proj.weight", 0.02),
        ("model.layers.3.self_attn.o_proj.weight", 0.02 / math.sqrt(8)),
        ("model.layers.3.mlp.down_proj.weight", 0.02 / math.sqrt(8)),
    ],
)
def test_branch_ends_and_head_start_at_their_own_scale(name: str, std: float) -> None:
    weight = build(replace(SMALL, vocab_size=997)).get_parameter(name)
    assert weight.std().item() == pytest.approx(std, rel=0.03)


def test_norms_start_at_one() -> None:
    assert all(bool((p == 1).all()) for p in build().parameters() if p.dim() == 1)


def test_equal_seeds_give_equal_weights() -> None:
    assert all(map(torch.equal, build().parameters(), build().parameters()))


# Borders


@pytest.mark.parametrize("name", ["vocab_size", "d_model", "n_layers", "n_heads", "ffn_dim"])
@pytest.mark.parametrize("value", [0, -1])
def test_a_size_below_one_is_refused(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"^model.config.{name} is {value}: must be at least 1$"):
        ModelConfig(**{name: value})


def test_context_without_positions_is_refused_under_the_key_that_sets_it() -> None:
    with pytest.raises(ValueError, match=r"^data\.seq_len is 0: must be at least 1$"):
        ModelConfig(max_seq_len=0)


def test_heads_that_do_not_divide_the_width_are_refused() -> None:
    message = (
        "model.config.d_model is 30 and n_heads is 4: d_model must be divisible by n_heads; "
        "change one of them or give model.config.head_dim"
    )
    with pytest.raises(ValueError, match=f"^{message}$"):
        ModelConfig(d_model=30, n_heads=4)


def test_a_given_head_dim_frees_the_width() -> None:
    assert ModelConfig(d_model=30, n_heads=4, head_dim=8).head_size == 8


@pytest.mark.parametrize(
    ("head_dim", "d_model", "n_heads", "shown"),
    [(None, 6, 2, 3), (5, 12, 3, 5), (0, 12, 3, 0), (-2, 12, 3, -2)],
)
def test_an_odd_or_empty_head_is_refused(
    head_dim: int | None, d_model: int, n_heads: int, shown: int
) -> None:
    message = (
        f"model.config.head_dim is {shown}: rotary embedding turns pairs of values, so it must be "
        "even; change d_model, n_heads or head_dim"
    )
    with pytest.raises(ValueError, match=f"^{message}$"):
        ModelConfig(d_model=d_model, n_heads=n_heads, head_dim=head_dim)


@pytest.mark.parametrize("n_kv_heads", [-1, 0, 3, 8])
def test_key_heads_that_do_not_divide_the_heads_are_refused(n_kv_heads: int) -> None:
    message = (
        f"model.config.n_kv_heads is {n_kv_heads} and n_heads is 4: n_kv_heads must divide n_heads"
    )
    with pytest.raises(ValueError, match=f"^{message}$"):
        ModelConfig(n_heads=4, n_kv_heads=n_kv_heads)


@pytest.mark.parametrize("dropout", [-0.1, 1.0, math.nan])
def test_dropout_outside_its_range_is_refused(dropout: float) -> None:
    message = f"model.config.dropout is {dropout}: must be at least 0 and below 1"
    with pytest.raises(ValueError, match=f"^{message}$"):
        ModelConfig(dropout=dropout)


@pytest.mark.parametrize("name", ["rope_theta", "norm_eps", "init_std"])
@pytest.mark.parametrize("value", [0.0, -1.0, math.inf, math.nan])
def test_scales_that_are_not_above_zero_are_refused(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"^model.config.{name} is {value}: must be above 0$"):
        ModelConfig(**{name: value})


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_activation_checkpointing_changes_no_bit_of_a_gradient(dropout: float) -> None:
    gradients = []
    for checkpointing in (False, True):
        config = replace(TINY, dropout=dropout, activation_checkpointing=checkpointing)
        model = build(config).train()
        torch.manual_seed(3)
        model(draw_ids()).square().sum().backward()
        gradients.append([p.grad for p in model.parameters()])
    for plain, again in zip(*gradients, strict=True):
        assert torch.equal(plain, again)
