"""The Trainer: what it refuses, units of its intervals, precision for the hardware."""

import inspect
import signal
from types import SimpleNamespace
from typing import Any

import lightning.pytorch
import pytest
import torch
from conftest import SIGNALS

from callbacks.run.devices import device_type
from callbacks.run.precision import choose_precision
from callbacks.run.steps import at_step_edge, validation_follows
from callbacks.run.trainer import Trainer
from data.datamodule import LMDataModule
from lm.module import LMModule

NO_MODULE: Any = None
DATA_REFUSED = "it would change which data a step sees; shorten the run by trainer.max_steps"
SHARDED_REFUSED = "sharded strategies cannot be resumed exactly yet; use auto or ddp"
VAL_REFUSED = (
    "it must be 0 for no validation, a number of micro-batches, or null; data.val_sequences bounds "
    "a validation by sequences"
)
LEAST_ONE = "it must be at least 1"
STRATEGY_RULE = "it must be auto, ddp, or a class, written as class_path: DDPStrategy"
DEVICES_RULE = "it must be a number above 0, auto or -1 for all, or a list of the numbers of GPUs"
CPU_DEVICES_RULE = (
    "on CPUs it must be auto or a number of processes above 0; pass --trainer.devices 1"
)
REFUSED: list[tuple[str, Any, str]] = [
    (
        "max_epochs",
        3,
        "to Lightning a run is one endless epoch; give its length by trainer.max_steps, "
        "data.total_tokens or data.epochs",
    ),
    ("limit_train_batches", 5, DATA_REFUSED),
    ("limit_train_batches", 1, DATA_REFUSED),
    ("limit_train_batches", 0.5, DATA_REFUSED),
    ("overfit_batches", 1, DATA_REFUSED),
    ("limit_val_batches", 0.5, VAL_REFUSED),
    ("limit_val_batches", 5.5, VAL_REFUSED),
    ("limit_val_batches", -1, VAL_REFUSED),
    (
        "gradient_clip_algorithm",
        "value",
        "gradients are clipped by their total norm only; leave it out",
    ),
    ("gradient_clip_val", 0.0, "it must be above 0; null turns clipping off"),
    ("reload_dataloaders_every_n_epochs", 1, "it would restart the data order; leave it out"),
    ("use_distributed_sampler", True, "the data order gives each rank its own; leave it out"),
    (
        "check_val_every_n_epoch",
        1,
        "intervals count optimizer steps; use trainer.val_check_interval",
    ),
    ("num_sanity_val_steps", 2, "the data is checked at the start anyway; leave it out"),
    (
        "enable_checkpointing",
        False,
        "a run that cannot resume is not ours; a trial run is trainer.fast_dev_run",
    ),
    ("barebones", True, "it turns off what makes a run resume; leave it out"),
    ("strategy", "fsdp", SHARDED_REFUSED),
    ("strategy", "deepspeed_stage_2", SHARDED_REFUSED),
    ("strategy", "dp", STRATEGY_RULE),
    ("strategy", "DDPStrategy", STRATEGY_RULE),
    ("accelerator", "tpu", "it must be one of auto, cpu, gpu, cuda, mps"),
    ("accelerator", "CPU", "it must be one of auto, cpu, gpu, cuda, mps"),
    ("num_nodes", 0, "it must be at least 1; leave it out for one machine"),
    *(("devices", value, DEVICES_RULE) for value in (0, "0", -2, "nan", "3.0", [], [-1], "a,")),
    *(("devices", value, CPU_DEVICES_RULE) for value in (-1, "-1", [0], "0,1")),
    ("accumulate_grad_batches", 0, LEAST_ONE),
    ("val_check_interval", 0, LEAST_ONE),
    ("log_every_n_steps", 0, LEAST_ONE),
    ("fast_dev_run", -2, "it must be 0 or more optimizer steps"),
]


def trainer(**options: Any) -> Any:
    values: dict[str, Any] = {"accelerator": "cpu", "precision": "32-true", "max_steps": 7}
    values |= {"logger": False}
    return Trainer(**values | options)


# Arguments


@pytest.mark.parametrize(("name", "value", "rule"), REFUSED)
def test_argument_that_breaks_a_promise_is_refused_with_a_way_out(name, value, rule):
    with pytest.raises(ValueError, match=f"trainer.{name}") as refusal:
        trainer(**{name: value})
    assert str(refusal.value) == f"trainer.{name} is {value}: {rule}"


@pytest.mark.skipif(torch.cuda.is_available(), reason="has a GPU")
@pytest.mark.parametrize("name", ["gpu", "cuda", "mps"])
def test_accelerator_that_is_not_here_is_refused(name: str):
    with pytest.raises(ValueError, match="this machine has none") as refusal:
        trainer(accelerator=name)
    assert str(refusal.value) == (
        f"trainer.accelerator is {name}: this machine has none that torch {torch.__version__} can "
        "use; pass auto or cpu"
    )


@pytest.mark.parametrize(
    "options",
    [
        {"limit_train_batches": 1.0},
        {"gradient_clip_algorithm": "norm"},
        {"gradient_clip_val": 1.0},
        {"limit_val_batches": 0},
        {"limit_val_batches": 1.0},
        {"precision": 32},
    ],
)
def test_argument_that_changes_nothing_is_accepted(options):
    assert trainer(**options).max_steps == 7


def test_validation_interval_counts_optimizer_steps():
    assert trainer(val_check_interval=10, accumulate_grad_batches=4).val_check_interval == 40


def test_run_is_one_endless_epoch_without_sanity_check():
    built = trainer()
    assert built.max_epochs == -1
    assert built.check_val_every_n_epoch is None
    assert built.num_sanity_val_steps == 0


def test_validations_fall_on_every_tenth_optimizer_step(run_yaml, lightning):
    overrides = {"trainer.max_steps": 30, "trainer.val_check_interval": 10}
    config = run_yaml(overrides | {"trainer.accumulate_grad_batches": 4})
    code, _, err = lightning("fit", "--config", config)
    steps = [line.split()[1] for line in err.splitlines() if "perplexity" in line]
    assert (code, steps) == (0, ["10", "20", "30"])


# Trial run


def test_fast_dev_run_counts_optimizer_steps():
    built = trainer(fast_dev_run=3, accumulate_grad_batches=2, max_steps=100)
    assert (built.max_steps, built.val_check_interval, built.limit_val_batches) == (3, 6, 3)
    assert built.loggers == []


def test_fast_dev_run_leaves_validation_off_where_it_is_off():
    assert trainer(fast_dev_run=3, limit_val_batches=0).limit_val_batches == 0


def test_fast_dev_run_trains_whole_steps_and_leaves_nothing_behind(run_yaml, lightning, tmp_path):
    config = run_yaml({"trainer.fast_dev_run": 2, "trainer.accumulate_grad_batches": 3})
    code, _, err = lightning("fit", "--config", config)
    assert code == 0
    assert "step 2/2 · loss" in err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("asked", "precision"), [(32, "32-true"), ("bf16", "bf16-mixed")])
def test_short_names_of_lightning_are_understood(asked, precision, monkeypatch):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"amx_bf16": True})
    assert trainer(precision=asked).precision == precision


def test_weights_in_half_precision_train_too(run_yaml, lightning):
    code, _, err = lightning("fit", "--config", run_yaml({"trainer.precision": "bf16-true"}))
    assert code == 0, err
    assert "done: 6 steps" in err


# Time limit


def test_max_time_is_a_budget_in_seconds():
    assert trainer(max_time="00:01:00:00").max_seconds == 3600.0
    assert trainer().max_seconds is None


def test_max_time_of_nothing_is_refused():
    with pytest.raises(ValueError, match=r"trainer\.max_time is .*it must be above 0"):
        trainer(max_time={"seconds": 0})


# Step edges


def test_step_edge_is_the_last_micro_batch_of_a_step():
    stand_in: Any = SimpleNamespace(accumulate_grad_batches=3)
    edges = [at_step_edge(stand_in, batch_idx) for batch_idx in range(6)]
    assert edges == [False, False, True, False, False, True]


@pytest.mark.parametrize(
    ("enabled", "expected"), [(True, [False, False, False, True]), (False, [False] * 4)]
)
def test_validation_follows_every_val_check_batch(enabled, expected):
    stand_in: Any = SimpleNamespace(enable_validation=enabled, val_check_batch=4)
    assert [validation_follows(stand_in, batch_idx) for batch_idx in range(4)] == expected


# Signals and ranks


def test_lightning_still_calls_what_is_turned_off():
    plain: Any = lightning.pytorch.Trainer(accelerator="cpu", logger=False)
    assert callable(plain._signal_connector.register_signal_handlers)
    assert "self._signal_connector.register_signal_handlers()" in inspect.getsource(plain._run)
    loop = plain.fit_loop.epoch_loop
    assert callable(loop._broadcast_sigterm_tensor)
    assert "self._broadcast_sigterm_tensor()" in inspect.getsource(loop.advance)


@pytest.mark.parametrize(
    ("part", "hook"),
    [
        (LMDataModule, "train_dataloader"),
        (LMModule, "training_step"),
        (LMModule, "validation_step"),
    ],
)
def test_no_handler_of_a_fit_is_lightnings(part, hook, run_yaml, lightning, monkeypatch):
    step, handlers = getattr(part, hook), []

    def noting(*args: Any) -> Any:
        handlers.extend(map(signal.getsignal, SIGNALS))
        return step(*args)

    monkeypatch.setattr(part, hook, noting)
    assert lightning("fit", "--config", run_yaml())[0] == 0
    assert {getattr(handler, "__module__", None) for handler in handlers} == {
        "callbacks.processes.stop_requests"
    }


def test_largest_of_one_process_is_its_own():
    assert [trainer().largest(number) for number in (0, 14)] == [0, 14]


# Precision


@pytest.mark.parametrize(
    ("capability", "precision"),
    [((9, 0), "bf16-mixed"), ((8, 0), "bf16-mixed"), ((7, 5), "16-mixed"), ((7, 0), "16-mixed")],
)
def test_auto_precision_on_cuda_is_bf16_where_the_card_has_it(capability, precision, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)
    assert choose_precision("auto", "cuda") == precision


@pytest.mark.parametrize(
    ("capabilities", "precision"),
    [
        ({"avx2": True, "amx_bf16": True}, "bf16-mixed"),
        ({"avx512_bf16": True}, "bf16-mixed"),
        ({"bf16": True}, "bf16-mixed"),
        ({"avx2": True, "amx_bf16": False}, "32-true"),
        ({}, "32-true"),
    ],
)
def test_auto_precision_on_a_cpu_is_bf16_only_where_it_computes_in_it(
    capabilities, precision, monkeypatch
):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities)
    assert choose_precision("auto", "cpu") == precision


def test_auto_precision_on_mps_is_fp32():
    assert choose_precision("auto", "mps") == "32-true"


@pytest.mark.parametrize("asked", ["bf16-mixed", "bf16-true"])
def test_bf16_on_a_card_without_it_names_the_card_and_fp16(asked, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (7, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "Tesla V100")
    with pytest.raises(ValueError, match="has no bf16") as refusal:
        choose_precision(asked, "cuda")
    assert str(refusal.value) == (
        f"trainer.precision is {asked}: Tesla V100 has no bf16; use 16-mixed (fp16), 32-true "
        "(fp32) or auto"
    )


@pytest.mark.parametrize("asked", ["16-mixed", "16-true"])
def test_fp16_on_a_cpu_is_refused(asked):
    with pytest.raises(ValueError, match="fp16 needs a GPU") as refusal:
        trainer(precision=asked)
    assert str(refusal.value) == (
        f"trainer.precision is {asked}: fp16 needs a GPU; use bf16-mixed, 32-true or auto"
    )


@pytest.mark.parametrize(
    ("asked", "device"), [("bf16-mixed", "cpu"), ("32-true", "cuda"), ("16-mixed", "cuda")]
)
def test_explicit_precision_is_kept_where_it_can_run(asked, device, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (7, 0))
    monkeypatch.setattr(torch.cpu, "get_capabilities", dict)
    assert choose_precision(asked, device) == asked


def test_trainer_trains_in_the_chosen_precision_and_remembers_what_was_asked(monkeypatch):
    monkeypatch.setattr(torch.cpu, "get_capabilities", dict)
    built = trainer(precision="auto")
    assert (built.precision, built.asked_precision) == ("32-true", "auto")


def test_products_in_fp32_do_not_use_tf32():
    torch.set_float32_matmul_precision("high")
    trainer()
    assert torch.get_float32_matmul_precision() == "highest"


@pytest.mark.parametrize(
    ("accelerator", "cuda", "mps", "expected"),
    [
        ("auto", True, False, "cuda"),
        ("gpu", True, False, "cuda"),
        ("auto", False, True, "mps"),
        ("auto", False, False, "cpu"),
        ("gpu", False, False, "cpu"),
        ("cpu", True, True, "cpu"),
        ("cuda", False, False, "cuda"),
    ],
)
def test_device_type_follows_what_is_there(accelerator, cuda, mps, expected, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: mps)
    assert device_type(accelerator) == expected
