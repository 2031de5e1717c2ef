"""The gradient's norm: share of clipped steps, norms of parts, and patterns that mean trouble."""

import csv
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import Lightning, RunYaml

from callbacks.grad_norm import GradNorm, part_of
from callbacks.symptoms import RunHistory, norm_jump, norm_stuck, norm_zero

NAN, INF = math.nan, math.inf


class Run:
    """A monitor with the Trainer and the module that it looks at."""

    def __init__(self, clip: float | None = 1.0, **options: Any) -> None:
        self.monitor = GradNorm(**options)
        self.module: Any = torch.nn.ModuleDict({"net": torch.nn.ModuleDict()})
        self.module.net["norm"] = torch.nn.Linear(3, 2, bias=False)
        self.trainer: Any = SimpleNamespace(
            global_step=0,
            max_steps=100,
            log_every_n_steps=4,
            accumulate_grad_batches=1,
            gradient_clip_val=clip,
            lightning_module=self.module,
        )

    def step(self, norm: float, scale: float = 1.0) -> None:
        """One optimizer step, as Lightning and the module go through it."""
        self.module.net["norm"].weight.grad = torch.full((2, 3), norm / math.sqrt(6) / scale)
        optimizer: Any = None
        self.monitor.on_before_optimizer_step(self.trainer, self.module, optimizer)
        self.module.grad_norm, self.module.grad_scale = torch.tensor(norm), torch.tensor(scale)
        self.trainer.global_step += 1
        batch_idx = self.trainer.global_step * self.trainer.accumulate_grad_batches - 1
        self.monitor.on_train_batch_end(self.trainer, self.module, None, None, batch_idx)

    def steps(self, *norms: float) -> dict[str, float]:
        for norm in norms:
            self.step(norm)
        return self.monitor.step_metrics(self.trainer)


def rows(root: Path) -> list[dict[str, str]]:
    with (root / "metrics.csv").open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


# Clipping


def test_clip_share_is_of_the_norms_above_the_clip_value():
    assert Run(clip=0.5).steps(0.4, 0.5, 0.6, 0.7)["optim/clip_share"] == 0.5


def test_clip_share_looks_back_on_a_window_across_logs():
    run = Run(window=21)
    run.steps(*[2.0] * 20)
    assert run.steps(*[0.5] * 14)["optim/clip_share"] == 7 / 21


def test_without_clipping_there_is_no_share():
    assert Run(clip=None).steps(2.0, 3.0) == {}


def test_micro_batch_inside_a_step_does_not_count():
    run = Run()
    run.steps(2.0)
    run.trainer.accumulate_grad_batches = 3
    run.monitor.on_train_batch_end(run.trainer, run.module, None, None, 4)
    assert list(run.monitor.norms) == [2.0]
    assert run.monitor.step_metrics(run.trainer)["optim/clip_share"] == 1.0


def test_norms_that_are_not_finite_do_not_count():
    assert Run().steps(NAN, 0.5, INF, 2.0)["optim/clip_share"] == 0.5


def test_share_is_not_told_before_a_finite_norm():
    assert Run().steps(NAN) == {}


def test_resumed_monitor_knows_the_norms_before():
    run, other = Run(), Run()
    run.steps(2.0, 0.5)
    run.step(3.0)
    other.monitor.load_state_dict(run.monitor.state_dict())
    assert other.steps(0.25)["optim/clip_share"] == 0.5


# Parts


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("net.model.embed_tokens.weight", "embed_tokens"),
        ("net.model.layers.0.self_attn.q_proj.weight", "layers.0"),
        ("net.model.layers.12.input_layernorm.weight", "layers.12"),
        ("net.model.norm.weight", "norm"),
        ("net.lm_head.weight", "lm_head"),
    ],
)
def test_part_of_a_parameter_is_read_from_its_name(name: str, part: str):
    assert part_of(name) == part


def test_norm_of_a_part_is_that_of_the_token_mean():
    run = Run(clip=None, per_layer_every_n_steps=4)
    run.trainer.global_step = 3
    run.step(2.0, scale=16.0)
    assert run.monitor.step_metrics(run.trainer) == {"grad_norm/norm": pytest.approx(2.0)}


@pytest.mark.parametrize(
    ("every", "step", "told"),
    [(None, 4, False), (2, 4, True), (3, 4, False), (6, 6, False), (12, 12, True), (50, 100, True)],
)
def test_parts_are_measured_where_due_and_logged(every: int | None, step: int, told: bool):
    run = Run(clip=None, per_layer_every_n_steps=every)
    run.trainer.global_step = step - 1
    assert bool(run.steps(2.0)) == told


PARTS = ["embed_tokens", "layers.0", "layers.1", "norm"]


@pytest.mark.parametrize(("tied", "parts"), [(True, PARTS), (False, [*PARTS, "lm_head"])])
def test_squared_norms_of_the_parts_add_up(
    tied: bool, parts: list[str], lightning: Lightning, run_yaml: RunYaml, tmp_path: Path
):
    overrides = {
        "model.config.tie_embeddings": tied,
        "trainer.accumulate_grad_batches": 3,
        "trainer.gradient_clip_val": 0.1,
        "grad_norm.per_layer_every_n_steps": 2,
    }
    code, _, err = lightning("fit", "--config", run_yaml(overrides))
    assert code == 0, err
    row = rows(tmp_path / "run")[3]
    norms = [float(row[f"grad_norm/{part}"]) for part in parts]
    assert sum("grad_norm/" in key for key in row) == len(parts)
    assert math.hypot(*norms) == pytest.approx(float(row["optim/grad_norm"]), rel=1e-5)


# Patterns


def history(norms: list[float], clip: float | None = None, window: int = 100) -> RunHistory:
    monitor, run = GradNorm(window=window), RunHistory()
    monitor.norms.extend(norms)
    run.trainer = SimpleNamespace(callbacks=[monitor], gradient_clip_val=clip)
    return run


@pytest.mark.parametrize(
    ("norms", "clip", "found"),
    [
        ([10.1] * 100, 1.0, True),
        ([10.1] * 99, 1.0, False),
        ([9.9] * 100, 1.0, False),
        ([500.0] * 49 + [0.9] * 51, 1.0, False),
        ([500.0] * 100, None, False),
        ([1.5] * 100, 1.0, False),
    ],
)
def test_stuck_is_a_window_far_above_the_clip_value(norms, clip, found):
    assert (norm_stuck(history(norms, clip)) is not None) == found


@pytest.mark.parametrize(
    ("norms", "found"),
    [
        ([0.5] * 20 + [10.1], True),
        ([0.5] * 20 + [9.9], False),
        ([2.0] * 20 + [20.1], True),
        ([2.0] * 20 + [19.9], False),
        ([0.5] * 19 + [300.0], False),
        ([300.0] + [0.5] * 60, False),
        ([0.5] * 40 + [300.0] + [0.5] * 40, True),
    ],
)
def test_jump_is_to_tens_and_far_above_the_norms_before(norms, found):
    assert (norm_jump(history(norms)) is not None) == found


@pytest.mark.parametrize(
    ("norms", "found"),
    [
        ([0.5] * 80 + [0.0009] * 20, True),
        ([0.5] * 80 + [0.0011] * 20, False),
        ([0.0] * 19, False),
        ([0.5] * 80 + [0.0] * 9 + [0.5] * 11, False),
    ],
)
def test_vanished_is_near_zero_for_a_while(norms, found):
    assert (norm_zero(history(norms)) is not None) == found


def test_patterns_are_told_with_numbers():
    assert norm_stuck(history([12.5] * 30, 0.5, 30)) == (
        "the gradient norm is 12.5 in the median of 30 steps, clipped to 0.5"
    )
    assert norm_jump(history([0.5] * 20 + [80.0])) == (
        "the gradient norm jumped to 80 from a median of 0.5"
    )
    assert norm_zero(history([2e-4] * 20)) == (
        "the gradient norm is 0.0002 in the median of 20 steps"
    )


# Settings


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (
            {"per_layer_every_n_steps": 0},
            "grad_norm.per_layer_every_n_steps is 0: must be at least 1",
        ),
        ({"window": 20}, "grad_norm.window is 20: must be above 20"),
    ],
)
def test_settings_that_cannot_work_are_refused(options: dict[str, int], text: str):
    with pytest.raises(ValueError, match=r"^grad_norm\.") as refusal:
        GradNorm(**options)
    assert str(refusal.value) == text
