"""Troubles of a run: each is told once, by what shows it, and healthy runs are left in peace."""

import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import Lightning, RunYaml
from torch._dynamo.exc import TorchDynamoException
from torch._inductor.exc import InductorError

from callbacks.grad_norm import GradNorm
from callbacks.health import Health, memory_advice
from callbacks.run import announce
from callbacks.run.folder import contract
from lm.module import LMModule

NAN, INF = float("nan"), float("inf")


class Run:
    """The callback with the Trainer that it looks at; each log is ten steps on."""

    def __init__(self, **changes: Any) -> None:
        self.health = Health()
        self.monitor = GradNorm()
        values = {
            "global_step": 0,
            "max_steps": 1000,
            "log_every_n_steps": 10,
            "accumulate_grad_batches": 4,
            "gradient_clip_val": 1.0,
            "precision": "bf16-mixed",
            "world_size": 1,
            "callbacks": [self.monitor, self.health],
            "strategy": SimpleNamespace(root_device=torch.device("cuda")),
            "optimizers": [SimpleNamespace(param_groups=[{"initial_lr": 3e-3}])],
            "datamodule": SimpleNamespace(micro_batch_size=6, num_workers=3, seq_len=16),
            "lightning_module": SimpleNamespace(
                expected_first_loss=10.0,
                flops_per_token=3_000_000_000,
                compiled=True,
                targets_seen=4096,
            ),
            "state": SimpleNamespace(fn="fit"),
        }
        self.trainer: Any = SimpleNamespace(**values | changes)
        self.start()

    def start(self) -> None:
        module: Any = None
        self.health.on_train_start(self.trainer, module)

    def resume(self, **changed: Any) -> None:
        """Go on from a checkpoint, in a new process, with other settings than it tells of."""
        state, module = self.health.state_dict(), self.trainer.lightning_module
        self.health = Health()
        checkpoint = {"contract": contract(self.trainer) | changed}
        self.health.on_load_checkpoint(self.trainer, module, checkpoint)
        self.health.load_state_dict(state)
        self.start()

    def log(self, loss: float = 5.0, *, rate: float = 1e-3, **figures: float) -> None:
        step = self.trainer.global_step
        self.trainer.global_step = 1 if step == 0 else step // 10 * 10 + 10
        told = {"train/loss": loss, "optim/lr": rate, "optim/grad_norm": 0.5}
        throughput = {f"throughput/{name}": value for name, value in figures.items()}
        self.health.watch(self.trainer, told | throughput)

    def logs(self, *losses: float) -> None:
        for loss in losses:
            self.log(loss)

    def norms(self, *norms: float) -> None:
        self.monitor.norms.extend(norms)
        self.log()

    def skips(self, *counts: int) -> None:
        for count in counts:
            self.trainer.global_step += 10
            figures = {"train/loss": 5.0, "optim/lr": 1e-3, "optim/skipped_steps": count}
            self.health.watch(self.trainer, figures)

    def validate(self, *losses: float, train: float = 4.0) -> None:
        for loss in losses:
            self.logs(*[train] * 12)
            self.health.watch(self.trainer, {"val/loss": loss})


@pytest.fixture(autouse=True)
def card(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "a card")


@pytest.fixture
def warnings(capsys: pytest.CaptureFixture[str]) -> Callable[[], list[str]]:
    """What was said since the last call."""
    return lambda: capsys.readouterr().err.splitlines()


# A healthy past: the loss starts where it should and falls to 5.
FALL = (10.0, 8.0, 6.5, *[5.0] * 22)


def loss_is(run: Run, loss: float) -> None:
    run.logs(*FALL, loss)


def skipped_are(run: Run, count: int) -> None:
    run.logs(*FALL)
    run.skips(count)


def first_loss_is(run: Run, loss: float) -> None:
    run.logs(loss)


def loss_stays_at(run: Run, loss: float) -> None:
    run.logs(10.0, *[loss] * 20)


def early_loss_is(run: Run, loss: float) -> None:
    run.logs(10.0, 6.0, loss, loss, 3.0)


def loss_rises_to(run: Run, loss: float) -> None:
    run.logs(*FALL, loss, loss)


def early_loss_rises_to(run: Run, loss: float) -> None:
    run.logs(10.0, 9.0, loss, loss)


def noisy_loss_rises_to(run: Run, loss: float) -> None:
    run.logs(*FALL, *[4.8, 5.2] * 11, loss, loss)


def loss_after_a_resume_is(run: Run, loss: float) -> None:
    run.logs(*FALL)
    run.resume()
    run.logs(5.0, 5.0, loss, loss)


def rate_after_a_resume_is(run: Run, rate: float) -> None:
    for past in (0.1e-3, 1e-3, 2e-3):
        run.log(9.9, rate=past)
    run.resume()
    run.log(9.9, rate=rate)


def validations_rise_to(run: Run, loss: float) -> None:
    run.logs(*FALL)
    run.validate(4.5, train=5.0)
    run.validate(loss, loss, loss)


def mfu_is(run: Run, mfu: float) -> None:
    run.trainer.global_step += 10
    for each in (0.1, mfu, 0.5, mfu, mfu):
        run.log(mfu=each)


def wait_is(run: Run, share: float) -> None:
    run.trainer.global_step += 10
    for each in (0.0, share, 0.5, share, share):
        run.log(data_wait=each)


def norms_stay_at(run: Run, norm: float) -> None:
    run.logs(*FALL)
    run.norms(*[norm] * 100)


def norm_goes_up_to(run: Run, norm: float) -> None:
    run.logs(*FALL)
    run.norms(*[0.5] * 30, norm)


SEEN = [
    (loss_is, NAN, 5.0, "the loss is nan; likely a learning rate"),
    (
        skipped_are,
        2,
        0,
        "the gradient was not finite: 2 updates skipped since the last logged step, 2",
    ),
    (first_loss_is, 10.31, 10.29, "the first loss is 10.31, that of new weights is 10.00"),
    (first_loss_is, 9.69, 9.71, "the first loss is 9.69,"),
    (loss_stays_at, 9.51, 9.49, "the loss is 9.51 and has never been below 9.51"),
    (early_loss_is, 2.49, 2.51, "the loss is 2.49 already, below a quarter of the 10.00"),
    (loss_rises_to, 6.01, 5.99, "the loss went up to 6.01 and 6.01, from 5.00"),
    (noisy_loss_rises_to, 6.61, 6.59, "the loss went up to 6.61 and 6.61, from 5.00"),
    (early_loss_rises_to, 11.01, 10.99, "the loss went up to 11.01 and 11.01, from 10.00 of new"),
    (
        loss_after_a_resume_is,
        6.01,
        5.99,
        "the loss went up to 6.01 and 6.01 right after the resume at step 240, from 5.00",
    ),
    (
        rate_after_a_resume_is,
        3.61e-3,
        3.59e-3,
        "the learning rate is 3.61e-03 right after the resume at step 20, it was 2.00e-03 before",
    ),
    (rate_after_a_resume_is, 1.39e-3, 1.41e-3, "the learning rate is 1.39e-03 right after"),
    (
        validations_rise_to,
        4.521,
        4.519,
        "val loss is 4.521, above its best of 4.500 for 3 validations, while train loss fell from "
        "5.000 to 4.000",
    ),
    (mfu_is, 0.299, 0.301, "MFU is 29.9%; likely slow data, small micro-batches; try "),
    (wait_is, 0.11, 0.09, "11% of the time goes by waiting for data"),
    (norms_stay_at, 10.1, 9.9, "the gradient norm is 10.1 in the median of 100 steps"),
    (norm_goes_up_to, 10.1, 9.9, "the gradient norm jumped to 10.1 from a median of 0.5"),
    (norms_stay_at, 0.0009, 0.0011, "the gradient norm is 0.0009 in the median of 20 steps"),
]


@pytest.mark.parametrize(("series", "value", "inside", "text"), SEEN)
def test_trouble_is_told_by_one_warning(series, value, inside, text: str, warnings):
    run = Run()
    series(run, value)
    [line] = warnings()
    assert line.startswith("warning: step ")
    assert f": {text}" in line
    assert "None" not in line


@pytest.mark.parametrize(("series", "value", "inside", "text"), SEEN)
def test_just_inside_the_limit_nothing_is_told(series, value, inside, text: str, warnings):
    run = Run()
    series(run, inside)
    assert warnings() == []


def test_warning_names_step_causes_and_keys(warnings):
    run = Run(gradient_clip_val=None, precision="16-mixed")
    run.logs(*FALL, INF)
    assert warnings() == [
        "warning: step 250: the loss is inf; likely a learning rate too high, no clipping, numbers "
        "that overflow the precision, odd samples; try model.optim.lr 0.001, "
        "trainer.gradient_clip_val 1.0, trainer.precision bf16-mixed"
    ]


def test_remedies_of_a_low_mfu_are_worked_out(warnings):
    run = Run(world_size=2)
    run.trainer.lightning_module.compiled = False
    mfu_is(run, 0.2)
    assert warnings() == [
        "warning: step 60: MFU is 20.0%; likely slow data, small micro-batches, no compilation, "
        "slow links between devices; try data.num_workers 6, data.micro_batch_size 12 with "
        "trainer.accumulate_grad_batches 2, model.compile true"
    ]


# Episodes


def test_trouble_that_lasts_is_told_once(warnings):
    run = Run()
    run.logs(*FALL, NAN, NAN, NAN)
    run.skips(1, 2, 3)
    assert len(warnings()) == 1


def test_trouble_that_comes_back_is_told_again(warnings):
    run = Run()
    run.logs(*FALL, NAN, NAN, 5.0, INF)
    assert [line.split(";")[0] for line in warnings()] == [
        "warning: step 250: the loss is nan",
        "warning: step 280: the loss is inf",
    ]


def test_validation_does_not_end_a_trouble_of_the_steps(warnings):
    run = Run()
    run.logs(*FALL, NAN)
    run.health.watch(run.trainer, {"val/loss": 6.0})
    run.logs(NAN)
    assert len(warnings()) == 1


def test_loss_that_stays_up_has_jumped_once(warnings):
    run = Run()
    run.logs(*FALL, *[8.0] * 60)
    assert len(warnings()) == 1


def test_loss_that_stays_up_after_a_resume_has_jumped_once(warnings):
    run = Run()
    run.logs(*FALL)
    run.resume()
    run.logs(*[8.0] * 60)
    assert len(warnings()) == 1


def test_second_jump_is_told_again(warnings):
    run = Run()
    run.logs(*FALL, 8.0, 8.0, *[5.0] * 25, 8.0, 8.0)
    assert len(warnings()) == 2


@pytest.mark.parametrize(("better", "times"), [(0.32, 1), (0.34, 2)])
def test_speed_about_its_limit_is_not_told_again_and_again(better, times, warnings):
    run = Run()
    for mfu in (0.29, better, 0.29):
        mfu_is(run, mfu)
    assert len(warnings()) == times


def test_warning_starts_on_a_line_of_its_own(capsys, monkeypatch):
    monkeypatch.setattr(announce, "line_enders", [lambda: print("the line ends", file=sys.stderr)])
    Run().logs(NAN)
    first, second = capsys.readouterr().err.splitlines()
    assert (first, second[:8]) == ("the line ends", "warning:")


# Healthy runs


def test_single_odd_loss_is_no_jump(warnings):
    run = Run()
    run.logs(*FALL, 9.0, 5.0, 9.0)
    assert warnings() == []


def test_clipping_at_every_step_is_healthy(warnings):
    run = Run()
    run.logs(*FALL)
    run.norms(5.8, *[1.5] * 99)
    assert warnings() == []


def test_loss_is_not_called_flat_while_the_rate_rises(warnings):
    run = Run()
    run.log(10.0, rate=0)
    for step in range(30):
        run.log(9.9, rate=1e-5 * step)
    assert warnings() == []


def test_steps_without_a_target_are_told_and_not_taken_for_a_bad_first_loss(warnings):
    run = Run(global_step=1)
    empty = {"optim/lr": 1e-3, "optim/steps_without_targets": 1}
    run.health.watch(run.trainer, empty)
    run.health.watch(run.trainer, {"optim/lr": 1e-3, "optim/steps_without_targets": 1})
    assert warnings() == [
        "warning: step 1: 1 of the steps since the last log had no target, and so nothing to "
        "learn; 1 since the start; likely labels that are all -100, rows that are all padding; try "
        "lightning peek with the same --config, to see what is a target"
    ]


@pytest.mark.parametrize(("targets", "times"), [(1, 0), (15, 0), (16, 1)])
def test_first_loss_of_a_few_targets_is_not_judged(targets: int, times: int, warnings):
    run = Run()
    run.trainer.lightning_module.targets_seen = torch.tensor(targets)
    first_loss_is(run, 12.0)
    assert len(warnings()) == times


def test_scaler_may_skip_updates_to_find_its_scale(warnings):
    run = Run(precision="16-mixed")
    run.skips(4, 6, 6, 7, 7)
    assert warnings() == []


def test_scaler_that_finds_no_scale_is_told(warnings):
    run = Run(precision="16-mixed")
    run.skips(4, 6, 7)
    assert len(warnings()) == 1


def test_updates_skipped_before_a_resume_are_not_told_again(warnings):
    run = Run()
    run.skips(3)
    run.resume()
    assert len(warnings()) == 1
    run.skips(3)
    assert warnings() == []


@pytest.mark.parametrize(
    "changes",
    [
        {"strategy": SimpleNamespace(root_device=torch.device("cpu"))},
        {
            "lightning_module": SimpleNamespace(
                expected_first_loss=10.0, flops_per_token=10**8, targets_seen=4096
            )
        },
    ],
    ids=["cpu", "small model"],
)
def test_low_mfu_is_normal_on_a_cpu_and_for_a_small_model(changes, warnings):
    run = Run(**changes)
    mfu_is(run, 0.02)
    assert warnings() == []


def test_wait_for_data_is_normal_for_a_toy_model(warnings):
    run = Run()
    run.trainer.lightning_module.flops_per_token = 60_000
    wait_is(run, 0.3)
    assert warnings() == []


@pytest.mark.parametrize("train", [5.0, 5.1])
def test_validation_that_rises_with_the_train_loss_is_no_overfitting(train, warnings):
    run = Run()
    run.logs(*FALL)
    run.validate(4.5, train=5.0)
    run.validate(4.7, 4.8, 4.9, train=train)
    assert warnings() == []


def test_new_best_validation_starts_the_count_anew(warnings):
    run = Run()
    run.logs(*FALL)
    run.validate(4.5, 4.7, 4.7, 4.4, 4.7, 4.7)
    assert warnings() == []


# Resuming


def test_announced_change_of_the_rate_is_not_told_again(warnings):
    run = Run()
    for rate in (1e-3, 1e-3, 1e-3):
        run.log(rate=rate)
    warnings()
    run.resume(**{"trainer.max_steps": 500})
    run.log(rate=9e-3)
    assert warnings() == []


@pytest.mark.parametrize(
    ("rates", "rate"),
    [
        ((0.1e-3, 1e-3, 2e-3), 3e-3),
        ((0.1e-3, 1e-3, 2e-3), 2.2e-3),
        ((3e-3, 3e-3, 2.9e-3), 2.7e-3),
        ((3e-3,), 9e-3),
    ],
    ids=["warm-up", "end of warm-up", "decay", "unknown slope"],
)
def test_rate_that_goes_on_as_it_went_is_healthy(rates, rate, warnings):
    run = Run()
    for past in rates:
        run.log(9.9, rate=past)
    run.resume()
    run.log(9.9, rate=rate)
    assert warnings() == []


def test_rate_is_not_foretold_over_a_long_gap(warnings):
    run = Run(max_steps=100)
    for _ in range(3):
        run.log(9.9)
    run.resume()
    run.log(9.9, rate=5e-4)
    assert warnings() == []


def test_overfitting_is_counted_over_a_resume(warnings):
    run = Run()
    run.logs(*FALL)
    run.validate(4.5, train=5.0)
    run.validate(4.6, 4.6)
    run.resume()
    run.validate(4.6)
    assert len(warnings()) == 1


def test_second_fit_starts_with_no_past(warnings):
    run = Run()
    run.logs(*FALL)
    run.trainer.global_step = 0
    run.start()
    run.logs(10.0, 10.0, 10.0)
    assert warnings() == []


def test_health_that_is_off_says_nothing(warnings):
    run = Run()
    run.health.enabled = False
    run.logs(NAN)
    assert warnings() == []


# Errors that end a run


@pytest.mark.parametrize(
    ("micro", "accumulate", "text"),
    [
        (8, 16, "--data.micro_batch_size 4 --trainer.accumulate_grad_batches 32, as many"),
        (15, 2, "--data.micro_batch_size 5 --trainer.accumulate_grad_batches 6, as many"),
        (7, 3, "--data.micro_batch_size 1 --trainer.accumulate_grad_batches 21, as many"),
    ],
)
def test_memory_advice_keeps_the_sequences_of_a_step(micro: int, accumulate: int, text: str):
    advice = memory_advice(micro, accumulate, 512)
    assert advice.startswith(f"out of memory with data.micro_batch_size {micro}; try {text}")
    assert advice.endswith("; else --data.seq_len 256 in a new run")


def test_memory_advice_shortens_what_cannot_be_split():
    assert memory_advice(1, 4, 512) == (
        "out of memory with data.micro_batch_size 1; try --data.seq_len 256 in a new run"
    )


OUT_OF_MEMORY = (
    "out of memory with data.micro_batch_size 2; try --data.micro_batch_size 1 "
    "--trainer.accumulate_grad_batches 2, as many sequences a step; else --data.seq_len 8 in a new "
    "run"
)
COMPILER = "torch.compile failed: --model.compile false runs without, or shows the error itself"


@pytest.mark.parametrize(
    ("error", "lines"),
    [
        (
            torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.\nAnd more."),
            ["error: CUDA out of memory. Tried to allocate 2 GiB.", OUT_OF_MEMORY],
        ),
        (
            RuntimeError("[enforce] DefaultCPUAllocator: can't allocate memory: you tried"),
            [
                "error: [enforce] DefaultCPUAllocator: can't allocate memory: you tried",
                OUT_OF_MEMORY,
            ],
        ),
        (TorchDynamoException("no graph\nfrom user code"), ["error: no graph", COMPILER]),
        (
            InductorError(ValueError("bad kernel"), None),
            ["error: ValueError: bad kernel", COMPILER],
        ),
    ],
    ids=["CUDA memory", "CPU memory", "dynamo", "inductor"],
)
def test_error_of_pytorch_is_told_with_what_to_do(
    error, lines, lightning: Lightning, run_yaml: RunYaml, monkeypatch: pytest.MonkeyPatch
):
    def training_step(*_: Any) -> None:
        raise error

    monkeypatch.setattr(LMModule, "training_step", training_step)
    code, _, err = lightning("fit", "--config", run_yaml())
    assert code == 1
    assert err.splitlines()[-2:] == lines
    assert "Traceback" not in err


def test_traceback_of_such_an_error_is_there_on_request(
    lightning: Lightning, run_yaml: RunYaml, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("RELIGHT_TRACEBACK", "1")
    monkeypatch.setattr(LMModule, "training_step", lambda *_: torch.zeros(2) @ torch.zeros(3))
    code, _, err = lightning("fit", "--config", run_yaml())
    assert code == 1
    assert "Traceback" in err


# The whole


def test_healthy_run_and_its_resume_end_without_a_warning(lightning: Lightning, run_yaml: RunYaml):
    overrides = {"trainer.gradient_clip_val": 1.0, "trainer.accumulate_grad_batches": 2}
    first = lightning("fit", "--config", run_yaml(overrides | {"trainer.max_steps": 12}))
    assert (first[0], "warning: step" in first[2]) == (0, False)
    more = lightning("fit", "--config", run_yaml(overrides | {"trainer.max_steps": 24}))
    assert (more[0], "warning: step" in more[2]) == (0, False)
    assert "resuming from" in more[2]


@pytest.mark.parametrize(("enabled", "times"), [(True, 1), (False, 0)])
def test_sick_run_is_warned_of_unless_that_is_off(
    enabled, times, lightning: Lightning, run_yaml: RunYaml, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(LMModule, "expected_first_loss", 9.0)
    code, _, err = lightning("fit", "--config", run_yaml({"health.enabled": enabled}))
    assert code == 0
    assert err.count("warning: step 1: the first loss is 5.") == times
