"""Mixture of experts: what it computes, how even it is, what is counted and logged of it."""

import csv
import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from conftest import Lightning, RunYaml, cut_back
from torch import Tensor

from lm.config import ModelConfig
from lm.experts import Experts, arrange, balance_loss, expert_metrics
from lm.flops import active_parameters, flops_per_token, parameters
from lm.model import LM

MOE: dict[str, Any] = {
    "model.config.n_experts": 4,
    "model.config.n_experts_per_token": 2,
    "model.config.ffn_dim": 24,
}


def layer(n_experts: int = 4, per_token: int = 2) -> Experts:
    torch.manual_seed(0)
    experts = Experts(16, 24, n_experts, per_token)
    for parameter in experts.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return experts


def one_by_one(experts: Experts, x: Tensor) -> Tensor:
    """Every expert on every position, weighted by what the router gave it."""
    probabilities = (x @ experts.gate.weight.T).softmax(-1)
    chosen = probabilities.topk(experts.per_token).indices
    weights = torch.zeros_like(probabilities).scatter(-1, chosen, probabilities.gather(-1, chosen))
    weights = weights / weights.sum(-1, keepdim=True)
    result = torch.zeros_like(x)
    stacked = experts.experts
    for number in range(probabilities.shape[-1]):
        gate, up = (x @ stacked.gate_up_proj[number].T).chunk(2, -1)
        made = (F.silu(gate) * up) @ stacked.down_proj[number].T
        result = result + made * weights[..., number : number + 1]
    return result


# A few rows, and so many that each expert's are filled up.
@pytest.mark.parametrize("shape", [(3, 5), (8, 70)])
@pytest.mark.parametrize(("n_experts", "per_token"), [(4, 2), (4, 1), (4, 4), (1, 1), (7, 3)])
def test_grouped_products_are_each_expert_on_its_own_positions(
    n_experts: int, per_token: int, shape: tuple[int, int]
):
    experts = layer(n_experts, per_token)
    x = torch.randn(*shape, 16, requires_grad=True)
    made, _ = experts(x)
    expected = one_by_one(experts, x)
    torch.testing.assert_close(made, expected)
    outward = torch.randn_like(made)
    wanted = [x, *experts.parameters()]
    got = torch.autograd.grad(made, wanted, outward)
    # Sums over hundreds of rows in another order.
    near: dict[str, Any] = {"rtol": 1e-4, "atol": 1e-4} if len(x) > 3 else {}
    torch.testing.assert_close(got, torch.autograd.grad(expected, wanted, outward), **near)


def test_no_position_is_dropped_when_all_choose_one_expert():
    experts = layer(per_token=1)
    with torch.no_grad():
        experts.gate.weight.zero_()
        experts.gate.weight[2] = 10.0
    x = torch.rand(2, 200, 16)
    made, routing = experts(x)
    torch.testing.assert_close(made, one_by_one(experts, x))
    assert routing[0].tolist() == [0, 0, 1, 0]


def test_balance_loss_is_one_where_even_and_the_number_of_experts_where_not():
    even = torch.full((3, 2, 4), 0.25)
    assert balance_loss(even) == 1
    collapsed = torch.zeros(3, 2, 4)
    collapsed[..., 1] = 1.0
    assert balance_loss(collapsed) == 4
    figures = expert_metrics(collapsed)
    assert (figures["moe/load_max"], figures["moe/load_min"]) == (4, 0)
    assert [figures[f"moe/load/{i}"] for i in range(4)] == [0, 4, 0, 0]


def test_balance_loss_pulls_the_router_towards_evenness():
    experts = layer()
    x = torch.randn(1, 64, 16) + 1.0
    optimizer = torch.optim.SGD([experts.gate.weight], lr=1.0)
    losses = []
    for _ in range(100):
        loss = balance_loss(experts(x)[1].unsqueeze(0))
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert losses[-1] < 1.02 < losses[0]


def test_gradients_repeat_bit_for_bit_on_two_threads():
    torch.manual_seed(0)
    model = LM(ModelConfig(vocab_size=64, d_model=32, n_layers=2, ffn_dim=48, n_experts=4))
    ids = torch.randint(64, (4, 64))
    found = []
    try:
        torch.set_num_threads(2)
        for _ in range(3):
            model.zero_grad()
            model(ids).square().sum().backward()
            found.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    finally:
        torch.set_num_threads(1)
    assert len(found[0]) == len(list(model.parameters()))
    for again in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], again, strict=True))


@pytest.mark.parametrize("chosen", [[], [3] * 300, [0, 1, 2, 3] * 100, [1, 1, 3] * 150])
def test_every_choice_lies_once_among_those_of_its_expert(chosen: list[int]):
    choices = torch.tensor(chosen, dtype=torch.int64)
    slots, choice_at, ends, counts = arrange(choices, 4)
    assert counts.tolist() == [chosen.count(i) for i in range(4)]
    assert ends[-1] == len(choice_at)
    begins = torch.cat((ends.new_zeros(1), ends[:-1]))
    for number, slot in enumerate(slots.tolist()):
        assert choice_at[slot] == number
        assert begins[chosen[number]] <= slot < ends[chosen[number]]
    assert int((choice_at >= 0).sum()) == len(chosen)
    # Whole multiples, so that kernels meet few numbers of rows; a few rows are left as they are.
    assert not any(end % 64 for end in ends.tolist()) or len(chosen) < 256
    assert len(choice_at) < len(chosen) + 5 * 64


def test_active_parameters_and_flops_count_the_chosen_experts_alone():
    dense = ModelConfig(vocab_size=64, d_model=32, n_layers=2, ffn_dim=48)
    sparse = dataclasses.replace(dense, n_experts=8, n_experts_per_token=2)
    wide = dataclasses.replace(dense, ffn_dim=96)
    assert sum(parameters(sparse).values()) == sum(p.numel() for p in LM(sparse).parameters())
    router = 2 * 32 * 8
    assert sum(active_parameters(sparse).values()) == sum(parameters(wide).values()) + router
    assert flops_per_token(sparse, 16) == flops_per_token(wide, 16) + 6 * router


def test_parameters_of_normed_queries_are_counted():
    config = ModelConfig(vocab_size=64, d_model=32, n_layers=2, ffn_dim=48, qk_norm=True)
    assert sum(parameters(config).values()) == sum(p.numel() for p in LM(config).parameters())


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"n_experts": 2, "n_experts_per_token": 3}, "n_experts_per_token is 3 and n_experts is 2"),
        ({"n_experts": 2, "n_experts_per_token": 0}, "n_experts_per_token is 0"),
        ({"n_experts": 2, "aux_loss_coef": -0.1}, "aux_loss_coef is -0.1: must be 0 or more"),
        ({"n_experts": 2, "ffn_dim": 44}, "ffn_dim is 44: with n_experts it must be a multiple"),
    ],
)
def test_impossible_experts_are_refused(options: dict[str, Any], told: str):
    sizes: dict[str, Any] = {"d_model": 32, "ffn_dim": 48}
    with pytest.raises(ValueError, match=told):
        ModelConfig(**(sizes | options))


def rows(root: Path) -> list[dict[str, str]]:
    with (root / "metrics.csv").open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def test_a_run_of_experts_learns_and_logs_their_load(
    lightning: Lightning, run_yaml: RunYaml, tmp_path: Path
):
    longer = MOE | {
        "trainer.max_steps": 60,
        "model.optim.lr": 3e-3,
        "trainer.val_check_interval": 60,
    }
    code, _, err = lightning("fit", "--config", run_yaml(longer | {"checkpoint.every_n_steps": 60}))
    assert code == 0, err
    found = rows(tmp_path / "run")
    assert float(found[-1]["train/loss"]) < float(found[0]["train/loss"]) - 1
    last = found[-1]
    loads = [float(last[f"moe/load/{i}"]) for i in range(4)]
    assert sum(loads) == pytest.approx(4)
    assert (
        float(last["moe/load_min"]) <= min(loads) <= 1 <= max(loads) <= float(last["moe/load_max"])
    )
    assert 0.9 < float(last["moe/balance_loss"]) < 1.5


def test_a_resumed_run_of_experts_ends_with_the_same_bits(
    lightning: Lightning, run_yaml: RunYaml, tmp_path: Path
):
    path = run_yaml(MOE)
    assert lightning("fit", "--config", path)[0] == 0
    whole = torch.load(tmp_path / "run/checkpoints/step-00000006.ckpt")["state_dict"]
    cut_back(tmp_path / "run", 4)
    code, _, err = lightning("fit", "--config", path)
    assert code == 0, err
    assert "resuming from" in err
    again = torch.load(tmp_path / "run/checkpoints/step-00000006.ckpt")["state_dict"]
    assert all(torch.equal(whole[name], again[name]) for name in whole)
