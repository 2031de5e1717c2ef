"""Tokens a second and time left, by a clock that the test moves."""

import resource
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from callbacks.throughput import Throughput, memory

CPU = torch.device("cpu")


class Run:
    """A throughput callback with the Trainer and the clock that it looks at."""

    def __init__(self, accumulate: int = 1, step: int = 0) -> None:
        self.seconds = 1000.0
        self.trainer: Any = SimpleNamespace(
            accumulate_grad_batches=accumulate,
            global_step=step,
            max_steps=100,
            strategy=SimpleNamespace(root_device=CPU),
            datamodule=SimpleNamespace(tokens_per_step=120, seconds_waited=0.0),
            lightning_module=SimpleNamespace(
                flops_per_token=5_000_000_000, targets_seen=torch.zeros(())
            ),
            world_size=2,
            is_global_zero=True,
        )
        self.throughput = Throughput(peak_tflops=1.0, now=lambda: self.seconds)
        self.module: Any = None
        self.throughput.on_train_start(self.trainer, self.module)

    def micro_batch(
        self, batch_idx: int, seconds: float, waited: float = 0.0, targets: int = 120
    ) -> None:
        self.seconds += waited
        self.trainer.datamodule.seconds_waited += waited
        self.trainer.lightning_module.targets_seen += targets / self.trainer.accumulate_grad_batches
        self.throughput.on_train_batch_start(self.trainer, self.module, None, batch_idx)
        self.seconds += seconds
        self.trainer.global_step += (batch_idx + 1) % self.trainer.accumulate_grad_batches == 0
        self.throughput.on_train_batch_end(self.trainer, self.module, None, None, batch_idx)

    def steps(self, *durations: float) -> None:
        for seconds in durations:
            self.micro_batch(0, seconds)

    def validate(self, seconds: float) -> None:
        self.throughput.on_validation_start(self.trainer, self.module)
        self.seconds += seconds

    def save(self, seconds: float) -> None:
        self.throughput.on_save_checkpoint(self.trainer, self.module, {})
        self.seconds += seconds

    def figures(self) -> dict[str, float]:
        return self.throughput.step_metrics(self.trainer)


def test_tokens_per_second_is_tokens_of_the_steps_over_their_time():
    run = Run()
    run.steps(0.5, 0.5, 1.0)
    assert run.figures()["throughput/tokens_per_sec"] == 2 * 120 / 1.5


def test_mfu_is_of_the_peak_of_all_devices():
    run = Run()
    run.steps(1.0, 0.5)
    figures = run.figures()
    assert figures["throughput/tflops_per_sec"] == 240 * 0.005
    assert figures["throughput/mfu"] == pytest.approx(0.6)


def test_more_than_the_hardware_can_do_is_warned_of_once(capsys):
    run = Run()
    run.steps(1.0)
    for _ in range(2):
        run.steps(0.1)
        assert run.figures()["throughput/mfu"] > 1
    assert capsys.readouterr().err.count("warning: MFU is ") == 1


def test_unknown_peak_leaves_out_mfu_alone():
    run = Run()
    run.throughput.peak = None
    run.steps(1.0, 0.5)
    figures = run.figures()
    assert "throughput/mfu" not in figures
    assert figures["throughput/tokens_per_sec"] == 240


def test_first_step_after_a_start_is_left_out():
    run = Run(step=40)
    run.steps(30.0, 0.5)
    assert run.figures()["throughput/tokens_per_sec"] == 240


def test_validation_and_saving_are_not_counted():
    run = Run()
    run.steps(1.0, 0.5)
    run.validate(2.0)
    run.save(3.0)
    run.steps(0.5)
    run.save(4.0)
    run.steps(0.5)
    assert run.figures()["throughput/tokens_per_sec"] == 240


def test_wait_for_data_between_two_steps_is_counted():
    run = Run()
    run.steps(1.0)
    run.seconds += 0.5
    run.steps(0.5)
    assert run.figures()["throughput/tokens_per_sec"] == 120


def test_step_of_several_micro_batches_counts_once():
    run = Run(accumulate=2)
    run.micro_batch(0, 9.0)
    run.micro_batch(1, 9.0)
    run.micro_batch(2, 0.25)
    run.micro_batch(3, 0.75)
    assert run.figures()["throughput/tokens_per_sec"] == 120


def test_figures_are_of_the_steps_since_the_last_log():
    run = Run()
    run.steps(1.0, 8.0)
    run.figures()
    run.steps(0.5)
    assert run.figures()["throughput/tokens_per_sec"] == 240


@pytest.mark.parametrize("durations", [(), (5.0,)])
def test_speed_is_not_told_before_it_is_known(durations):
    run = Run()
    run.steps(*durations)
    assert list(run.figures()) == ["memory/peak_gib"]


def test_time_left_includes_validation_and_saving():
    run = Run()
    run.steps(30.0, 0.5)
    run.validate(2.0)
    run.steps(0.5)
    assert run.figures()["time/eta_s"] == 97 * 3.0 / 2


def test_second_fit_starts_its_clock_anew():
    run = Run()
    run.steps(1.0, 1.0)
    run.seconds += 500
    run.throughput.on_train_start(run.trainer, run.module)
    run.steps(1.0, 0.5)
    assert run.figures()["throughput/tokens_per_sec"] == 240


# Data


def test_data_wait_is_its_share_of_the_training_time():
    run = Run(accumulate=2)
    for batch_idx in range(4):
        run.micro_batch(batch_idx, 1.0, waited=0.25)
    assert run.figures()["throughput/data_wait"] == 0.5 / 2.5


def test_wait_during_a_pause_is_not_training_time():
    run = Run()
    run.steps(1.0, 1.0)
    run.validate(2.0)
    run.micro_batch(0, 1.0, waited=5.0)
    run.micro_batch(0, 1.0, waited=1.0)
    figures = run.figures()
    assert figures["throughput/data_wait"] == 1.0 / 4.0
    assert figures["throughput/tokens_per_sec"] == 3 * 120 / 4.0


def test_padding_shows_as_a_rate_of_real_targets_of_its_own():
    run = Run()
    run.steps(1.0, 0.5)
    assert "throughput/targets_per_sec" not in run.figures()
    run.micro_batch(0, 0.5, targets=90)
    run.micro_batch(0, 0.5, targets=30)
    figures = run.figures()
    assert figures["throughput/tokens_per_sec"] == 240
    assert figures["throughput/targets_per_sec"] == 120


# Memory


@pytest.mark.parametrize(("platform", "unit"), [("linux", 1024), ("darwin", 1)])
def test_peak_memory_of_a_cpu_run_is_the_resident_peak_in_bytes(platform, unit, monkeypatch):
    usage = SimpleNamespace(ru_maxrss=3000)
    monkeypatch.setattr(resource, "getrusage", lambda _: usage)
    monkeypatch.setattr(sys, "platform", platform)
    assert memory(CPU) == {"memory/peak_gib": 3000 * unit / 2**30}


def test_memory_of_a_cuda_run_is_what_was_allocated_and_reserved(monkeypatch):
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 2**30)
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda device: 3 * 2**29)
    assert memory(torch.device("cuda", 0)) == {"memory/peak_gib": 1.0, "memory/reserved_gib": 1.5}
