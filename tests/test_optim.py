"""Settings, parameter groups and the optimizer built from them."""

import math
import re
from typing import Literal

import pytest
import torch

from lm.config import ModelConfig, OptimConfig
from lm.model import LM
from lm.optim import build_optimizer, layout, parameter_groups, use_fused


def tiny(tied: bool = True) -> LM:
    torch.manual_seed(0)
    config = ModelConfig(
        vocab_size=11,
        d_model=12,
        n_layers=3,
        n_heads=6,
        ffn_dim=14,
        max_seq_len=8,
        tie_embeddings=tied,
    )
    return LM(config)


# Groups


@pytest.mark.parametrize("tied", [True, False])
def test_every_trainable_parameter_is_in_exactly_one_group(tied: bool) -> None:
    model = tiny(tied)
    grouped = [p for group in parameter_groups(model, 0.1) for p in group["params"]]
    assert len(grouped) == len(set(map(id, grouped)))
    assert set(map(id, grouped)) == set(map(id, model.parameters()))


@pytest.mark.parametrize("tied", [True, False])
def test_groups_are_split_by_rank(tied: bool) -> None:
    decay, rest = parameter_groups(tiny(tied), 0.1)
    assert (decay["weight_decay"], rest["weight_decay"]) == (0.1, 0.0)
    assert {p.dim() for p in decay["params"]} == {2}
    assert {p.dim() for p in rest["params"]} == {1}
    assert (len(decay["params"]), len(rest["params"])) == (3 * 7 + (1 if tied else 2), 3 * 2 + 1)


def test_base_has_37_tensors_without_decay() -> None:
    config = ModelConfig(
        d_model=1536, n_layers=18, n_heads=12, n_kv_heads=4, ffn_dim=4096, max_seq_len=2048
    )
    with torch.device("meta"):
        assert len(parameter_groups(LM(config), 0.1)[1]["params"]) == 37


@pytest.mark.parametrize(
    ("kept", "fault"),
    [
        (lambda ps: ps[:-1], "model.norm.weight is missing"),
        (lambda ps: [*ps, ps[0]], "model.embed_tokens.weight is too many"),
        (lambda ps: [*ps, torch.ones(3)], "one that is not the network's is too many"),
    ],
)
@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate")
def test_optimizer_without_each_trainable_parameter_once_is_refused(kept, fault: str) -> None:
    model = tiny()
    optimizer = torch.optim.SGD(kept(list(model.parameters())), lr=0.1)
    with pytest.raises(ValueError, match="once") as refusal:
        layout(model, optimizer)
    assert str(refusal.value) == (
        f"the optimizer must hold every trainable parameter once: {fault}; change build_optimizer "
        "in lm/optim.py, and freeze by requires_grad_(False) what is not to be trained"
    )


def test_optimizer_may_hold_a_frozen_parameter_or_leave_it_out() -> None:
    model = tiny()
    model.model.norm.requires_grad_(False)
    parameters = list(model.parameters())
    for held in (parameters, parameters[:-1]):
        assert len(layout(model, torch.optim.SGD(held, lr=0.1))["groups"][0]) == len(held)


def test_frozen_parameters_are_in_no_group() -> None:
    model = tiny()
    model.model.norm.requires_grad_(False)
    model.model.embed_tokens.requires_grad_(False)
    decay, rest = parameter_groups(model, 0.1)
    assert (len(decay["params"]), len(rest["params"])) == (3 * 7, 3 * 2)


# Optimizer


@pytest.mark.parametrize("fused", [True, False])
def test_settings_reach_the_optimizer(fused: bool) -> None:
    config = OptimConfig(lr=2e-3, betas=(0.8, 0.99), eps=1e-7, weight_decay=0.3)
    decay, rest = build_optimizer(tiny(), config, fused).param_groups
    assert (decay["weight_decay"], rest["weight_decay"]) == (0.3, 0.0)
    for group in (decay, rest):
        assert (group["lr"], group["betas"], group["eps"]) == (2e-3, (0.8, 0.99), 1e-7)
        assert bool(group["fused"]) is fused


@pytest.mark.parametrize("fused", [True, False])
def test_decay_alone_shrinks_matrices_and_leaves_norms(fused: bool) -> None:
    model = tiny()
    before = [p.detach().clone() for p in model.parameters()]
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    build_optimizer(model, OptimConfig(lr=0.5, weight_decay=0.1), fused).step()
    expected = [p * (0.95 if p.dim() == 2 else 1.0) for p in before]
    torch.testing.assert_close([p.detach() for p in model.parameters()], expected)


@pytest.mark.parametrize("fused", [True, False])
def test_an_update_moves_each_weight_by_the_rate(fused: bool) -> None:
    model = tiny()
    before = model.model.norm.weight.detach().clone()
    model.model.norm.weight.grad = torch.linspace(-2, 2, 12)
    build_optimizer(model, OptimConfig(lr=0.01), fused).step()
    moved = model.model.norm.weight.detach() - before
    torch.testing.assert_close(moved, -0.01 * torch.linspace(-2, 2, 12).sign())


@pytest.mark.parametrize(
    ("fused", "device", "precision", "expected"),
    [
        ("auto", "cpu", "32-true", True),
        ("auto", "cpu", "bf16-mixed", True),
        ("auto", "cuda", "bf16-mixed", True),
        ("auto", "cuda", "16-mixed", False),
        ("auto", "mps", "32-true", False),
        (True, "cpu", "32-true", True),
        (True, "cuda", "bf16-true", True),
        (False, "cuda", "bf16-mixed", False),
        (False, "cuda", "16-mixed", False),
        (False, "mps", "32-true", False),
    ],
)
def test_the_fused_kernel_runs_where_it_is_right(
    fused: bool | Literal["auto"], device: str, precision: str, expected: bool
) -> None:
    assert use_fused(fused, device, precision) is expected


# Borders


def refused(message: str) -> "pytest.RaisesExc[ValueError]":
    return pytest.raises(ValueError, match=f"^{re.escape(message)}$")


def test_fused_with_scaled_gradients_is_refused() -> None:
    with refused(
        "model.optim.fused is true and trainer.precision is 16-mixed: the fused optimizer "
        "unscales gradients only after clipping; set model.optim.fused to auto or false"
    ):
        use_fused(True, "cuda", "16-mixed")


def test_without_the_fused_kernel_torch_chooses_for_the_device() -> None:
    # An explicit False would update one tensor after another on GPUs too.
    defaults = build_optimizer(tiny(), OptimConfig(), fused=False).defaults
    assert (defaults["fused"], defaults["foreach"]) == (None, None)


def test_fused_on_a_device_without_it_is_refused() -> None:
    with refused(
        "model.optim.fused is true on device mps: it is supported on cpu and cuda; set "
        "model.optim.fused to auto or false"
    ):
        use_fused(True, "mps", "32-true")


@pytest.mark.parametrize("lr", [0.0, -1e-3, math.inf, math.nan])
def test_a_rate_that_cannot_train_is_refused(lr: float) -> None:
    with refused(f"model.optim.lr is {lr}: must be above 0 and finite"):
        OptimConfig(lr=lr)


@pytest.mark.parametrize("min_lr_ratio", [-0.1, 1.1, math.nan])
def test_a_lowest_rate_outside_zero_to_one_is_refused(min_lr_ratio: float) -> None:
    with refused(f"model.optim.min_lr_ratio is {min_lr_ratio}: must be 0 to 1"):
        OptimConfig(min_lr_ratio=min_lr_ratio)


@pytest.mark.parametrize("warmup", [-0.1, 1.0, 100.0, math.nan])
def test_a_warmup_share_outside_the_run_is_refused(warmup: float) -> None:
    with refused(
        f"model.optim.warmup is {warmup}: a share of the run must be at least 0 and below 1; "
        "write an int (no dot) for a number of steps"
    ):
        OptimConfig(warmup=warmup)


def test_negative_warmup_steps_are_refused() -> None:
    with refused("model.optim.warmup is -1: must not be negative"):
        OptimConfig(warmup=-1)


@pytest.mark.parametrize("betas", [(1.0, 0.95), (0.9, 1.0), (-0.1, 0.95), (0.9, math.nan)])
def test_betas_outside_their_range_are_refused(betas: tuple[float, float]) -> None:
    with refused(f"model.optim.betas is {betas}: each must be at least 0, below 1"):
        OptimConfig(betas=betas)


@pytest.mark.parametrize("eps", [0.0, -1e-8, math.inf, math.nan])
def test_an_eps_that_divides_by_nothing_is_refused(eps: float) -> None:
    with refused(f"model.optim.eps is {eps}: must be above 0"):
        OptimConfig(eps=eps)


@pytest.mark.parametrize("weight_decay", [-0.1, math.inf, math.nan])
def test_a_negative_weight_decay_is_refused(weight_decay: float) -> None:
    with refused(f"model.optim.weight_decay is {weight_decay}: must not be negative"):
        OptimConfig(weight_decay=weight_decay)


@pytest.mark.parametrize("warmup", [0, 1, 10_000, 0.0, 0.999])
def test_steps_and_shares_are_both_accepted(warmup: int | float) -> None:
    assert OptimConfig(warmup=warmup).warmup == warmup
