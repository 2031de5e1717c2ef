"""A run that was killed ends with the very bits of one that was not.

Judged by weights, moments and the rows of metrics.csv: equal losses alone prove nothing.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Lightning, RunYaml, cut_back
from torch import nn

from callbacks.drill.drill import rows
from callbacks.drill.kill_points import VARIABLE
from data.tokens.folder import missing_files
from lm.config import OptimConfig
from lm.optim import parameter_groups
from lm.schedule import warmup_cosine

PROGRAM = Path(sys.executable).with_name("lightning")
STEPS = 7
# No save and no validation falls on every step: a resume starts at each of them all the same.
RUN = {
    "trainer.max_steps": STEPS,
    "trainer.val_check_interval": 3,
    "checkpoint.every_n_steps": 1,
    "checkpoint.keep_last": 99,
}


def state(root: Path, step: int = STEPS) -> dict[str, Any]:
    path = root / "checkpoints" / f"step-{step:08d}.ckpt"
    return torch.load(path, weights_only=True)


def assert_same_bits(left: Any, right: Any, where: str = "") -> None:
    """Equal structure and equal bits, all the way down."""
    assert type(left) is type(right), where
    if isinstance(left, dict):
        assert left.keys() == right.keys(), where
        for key in left:
            assert_same_bits(left[key], right[key], f"{where}.{key}")
    elif isinstance(left, list | tuple):
        assert len(left) == len(right), where
        for i, (a, b) in enumerate(zip(left, right, strict=True)):
            assert_same_bits(a, b, f"{where}[{i}]")
    elif isinstance(left, torch.Tensor):
        assert left.dtype == right.dtype, where
        assert torch.equal(left, right), where
    else:
        assert left == right, where


LEARNED = ("state_dict", "optimizer_states", "lr_schedulers", "loops", "LMDataModule")


def assert_same_run(
    one: Path, other: Path, step: int = STEPS, keys: tuple[str, ...] = (*LEARNED, "random_states")
) -> None:
    left, right = state(one, step), state(other, step)
    assert_same_bits({key: left[key] for key in keys}, {key: right[key] for key in keys})
    assert rows(one) == rows(other)


def train(lightning: Lightning, run_yaml: RunYaml, root: Path, **overrides: Any) -> None:
    config = run_yaml(RUN | {"trainer.default_root_dir": str(root)} | overrides)
    code, _, err = lightning("fit", "--config", config)
    assert code == 0, err


SETTINGS = pytest.mark.parametrize(
    "overrides",
    [
        {},
        {"trainer.accumulate_grad_batches": 3},
        {"model.config.dropout": 0.1, "trainer.accumulate_grad_batches": 2},
        {"data.windows": "random", "model.optim.fused": False},
        {"trainer.precision": "bf16-mixed", "data.eval_train": True},
    ],
    ids=["plain", "accumulate", "dropout", "random-windows", "bf16"],
)


def resume_after(
    steps: Iterable[int], lightning: Lightning, run_yaml: RunYaml, folder: Path, overrides: dict
) -> None:
    """Compare a whole run with one that goes on from each of these steps, the last ones first."""
    train(lightning, run_yaml, folder / "whole", **overrides)
    root = folder / "killed"
    train(lightning, run_yaml, root, **overrides)
    for step in steps:
        cut_back(root, step)
        train(lightning, run_yaml, root, **overrides)
        assert_same_run(folder / "whole", root)


@SETTINGS
def test_resume_ends_with_the_same_bits(
    lightning: Lightning, run_yaml: RunYaml, tmp_path: Path, overrides: dict
):
    # Inside the run after a validation, and from its first checkpoint.
    resume_after((3, 1), lightning, run_yaml, tmp_path, overrides)


@pytest.mark.slow
@SETTINGS
def test_resume_at_every_step_ends_with_the_same_bits(
    lightning: Lightning, run_yaml: RunYaml, tmp_path: Path, overrides: dict
):
    resume_after(range(STEPS - 1, 0, -1), lightning, run_yaml, tmp_path, overrides)


def test_resume_over_an_epoch_border_sees_every_window_once_an_epoch(
    lightning: Lightning, run_yaml: RunYaml, tmp_path: Path
):
    # 3,000-odd tokens at 150 positions are some 20 windows: epochs end inside the run.
    overrides = {"data.seq_len": 150, "data.micro_batch_size": 5, "trainer.max_steps": STEPS}
    train(lightning, run_yaml, tmp_path / "whole", **overrides)
    train(lightning, run_yaml, tmp_path / "killed", **overrides)
    cut_back(tmp_path / "killed", 4)
    train(lightning, run_yaml, tmp_path / "killed", **overrides)
    assert_same_run(tmp_path / "whole", tmp_path / "killed")


def test_kill_before_the_first_save_starts_over_without_a_seam(
    lightning: Lightning, run_yaml: RunYaml, tmp_path: Path
):
    train(lightning, run_yaml, tmp_path / "whole")
    train(lightning, run_yaml, tmp_path / "killed")
    cut_back(tmp_path / "killed", 0)
    train(lightning, run_yaml, tmp_path / "killed")
    assert_same_run(tmp_path / "whole", tmp_path / "killed")


def test_workers_change_nothing(lightning: Lightning, run_yaml: RunYaml, tmp_path: Path):
    train(lightning, run_yaml, tmp_path / "whole")
    train(lightning, run_yaml, tmp_path / "killed", **{"data.num_workers": 2})
    cut_back(tmp_path / "killed", 5)
    train(lightning, run_yaml, tmp_path / "killed", **{"data.num_workers": 2})
    # Starting workers draws from the generators that users' own code may use.
    assert_same_run(tmp_path / "whole", tmp_path / "killed", keys=LEARNED)


def test_same_global_batch_in_another_split_goes_on_with_the_same_samples(
    lightning: Lightning, run_yaml: RunYaml, tmp_path: Path
):
    two_by_two = {"data.micro_batch_size": 2, "trainer.accumulate_grad_batches": 2}
    train(lightning, run_yaml, tmp_path / "whole", **two_by_two)
    train(lightning, run_yaml, tmp_path / "split", **two_by_two)
    cut_back(tmp_path / "split", 4)
    four_by_one = {"data.micro_batch_size": 4, "trainer.accumulate_grad_batches": 1}
    train(lightning, run_yaml, tmp_path / "split", **four_by_one)
    for one, other in zip(rows(tmp_path / "whole"), rows(tmp_path / "split"), strict=True):
        assert one["step"] == other["step"]
        assert float(one["train/loss"]) == pytest.approx(float(other["train/loss"]), rel=1e-5)


def test_changed_global_batch_is_refused_with_the_value_that_keeps_it(
    lightning: Lightning, run_yaml: RunYaml, tmp_path: Path
):
    train(lightning, run_yaml, tmp_path / "run", **{"trainer.accumulate_grad_batches": 4})
    config = run_yaml(RUN | {"data.micro_batch_size": 4, "trainer.max_steps": 9})
    code, _, err = lightning("fit", "--config", config)
    assert code == 2
    assert "was 2 × 4 × 1 = 8 sequences a step and is 4 × 1 × 1 = 4 now" in err
    assert "set trainer.accumulate_grad_batches 2 to keep it" in err


def test_allowed_batch_change_carries_the_position_by_samples(
    lightning: Lightning, run_yaml: RunYaml, tmp_path: Path
):
    root = tmp_path / "run"
    train(lightning, run_yaml, root)
    more = {"data.micro_batch_size": 6, "trainer.max_steps": 9, "data.allow_batch_change": True}
    train(lightning, run_yaml, root, **more)
    assert state(root, 9)["LMDataModule"]["samples"] == STEPS * 2 + 2 * 6


@pytest.mark.parametrize(
    ("overrides", "parts"),
    [
        ({"model.config.n_layers": 3}, ["model.config.n_layers was 2 and is 3 now"]),
        ({"seed_everything": 7}, ["seed_everything was 1337 and is 7 now"]),
        ({"data.seq_len": 17}, ["data.seq_len was 16 and is 17 now"]),
        (
            {"data.windows": "random", "model.config.dropout": 0.1},
            ["data.windows was shuffled and is random now", "dropout was 0.0 and is 0.1 now"],
        ),
    ],
)
def test_checkpoint_of_another_run_is_refused_naming_every_difference(
    lightning: Lightning, run_yaml: RunYaml, tmp_path: Path, overrides: dict, parts: list[str]
):
    train(lightning, run_yaml, tmp_path / "run")
    config = run_yaml(RUN | {"trainer.max_steps": 9} | overrides)
    code, _, err = lightning("fit", "--config", config)
    assert code == 2
    for part in parts:
        assert part in err


def test_changed_rate_is_announced_and_holds(
    lightning: Lightning, run_yaml: RunYaml, tmp_path: Path
):
    root = tmp_path / "run"
    train(lightning, run_yaml, root)
    cut_back(root, 4)
    config = run_yaml(RUN | {"model.optim.lr": 1e-5, "model.optim.weight_decay": 0.3})
    code, _, err = lightning("fit", "--config", config)
    assert code == 0, err
    assert "changed since the checkpoint: model.optim.lr 0.0003 -> 1e-05" in err
    groups = state(root)["optimizer_states"][0]["param_groups"]
    assert [group["initial_lr"] for group in groups] == [1e-5, 1e-5]
    assert [group["weight_decay"] for group in groups] == [0.3, 0.0]
    expected = [1e-5 * warmup_cosine(step, 0, STEPS, 0.1) for step in range(4, STEPS)]
    assert [float(row["optim/lr"]) for row in rows(root)[4:]] == pytest.approx(expected)


def one_group(module: nn.Module, config: OptimConfig, fused: bool) -> torch.optim.Optimizer:
    return torch.optim.Rprop(module.parameters(), lr=config.lr)  # no weight decay, no kernel


def four_groups(module: nn.Module, config: OptimConfig, fused: bool) -> torch.optim.Optimizer:
    first, second, third, *rest = module.parameters()
    groups = [
        {"params": [first]},
        {"params": [second], "lr": 2 * config.lr},
        {"params": [third], "betas": (0.8, 0.9)},
        {"params": rest},
    ]
    return torch.optim.AdamW(groups, lr=config.lr, weight_decay=0.2, fused=fused or None)


@pytest.mark.parametrize("build", [one_group, four_groups])
def test_another_optimizer_resumes_with_the_same_bits(
    lightning: Lightning, run_yaml: RunYaml, tmp_path: Path, monkeypatch, build
):
    monkeypatch.setattr("lm.module.build_optimizer", build)
    train(lightning, run_yaml, tmp_path / "whole")
    train(lightning, run_yaml, tmp_path / "killed")
    cut_back(tmp_path / "killed", 4)
    train(lightning, run_yaml, tmp_path / "killed")
    assert_same_run(tmp_path / "whole", tmp_path / "killed")


def test_a_changed_rate_keeps_the_proportions_of_groups(
    lightning: Lightning, run_yaml: RunYaml, tmp_path: Path, monkeypatch
):
    monkeypatch.setattr("lm.module.build_optimizer", four_groups)
    train(lightning, run_yaml, tmp_path / "run")
    cut_back(tmp_path / "run", 4)
    train(lightning, run_yaml, tmp_path / "run", **{"model.optim.lr": 1e-5})
    groups = state(tmp_path / "run")["optimizer_states"][0]["param_groups"]
    assert [group["initial_lr"] for group in groups] == [1e-5, 2e-5, 1e-5, 1e-5]


def test_an_optimizer_of_other_groups_than_the_checkpoint_is_refused(
    lightning: Lightning, run_yaml: RunYaml, tmp_path: Path, monkeypatch
):
    train(lightning, run_yaml, tmp_path / "run")
    cut_back(tmp_path / "run", 4)
    monkeypatch.setattr("lm.module.build_optimizer", one_group)
    code, _, err = lightning("fit", "--config", run_yaml(RUN))
    assert code == 2
    assert err.splitlines()[-1] == (
        "error: the optimizer has groups of [20] tensors, in the checkpoint of [15, 5]: "
        "build_optimizer in lm/optim.py was changed; change it back, or begin a new run with these "
        "weights by model.from_weights"
    )


def other_class(module: nn.Module, config: OptimConfig, fused: bool) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameter_groups(module, 0.1), lr=config.lr)


def other_order(module: nn.Module, config: OptimConfig, fused: bool) -> torch.optim.Optimizer:
    decayed, rest = parameter_groups(module, config.weight_decay)
    rest["params"].reverse()
    return torch.optim.AdamW([decayed, rest], lr=config.lr)


@pytest.mark.parametrize(
    ("build", "difference"),
    [
        (other_class, "is SGD, in the checkpoint AdamW"),
        (other_order, "holds the tensors in another order than the checkpoint"),
    ],
)
def test_an_optimizer_that_would_misread_the_stored_moments_is_refused(
    lightning: Lightning, run_yaml: RunYaml, tmp_path: Path, monkeypatch, build, difference: str
):
    train(lightning, run_yaml, tmp_path / "run")
    cut_back(tmp_path / "run", 4)
    monkeypatch.setattr("lm.module.build_optimizer", build)
    code, _, err = lightning("fit", "--config", run_yaml(RUN))
    assert code == 2
    assert err.splitlines()[-1] == (
        f"error: the optimizer {difference}: build_optimizer in lm/optim.py was changed; change it "
        "back, or begin a new run with these weights by model.from_weights"
    )


@pytest.mark.parametrize("steps", [6, 7], ids=["with a validation at its end", "without"])
def test_longer_run_goes_on_by_the_new_schedule(
    lightning: Lightning, run_yaml: RunYaml, tmp_path: Path, steps: int
):
    root = tmp_path / "run"
    train(lightning, run_yaml, root, **{"trainer.max_steps": steps})
    code, _, err = lightning("fit", "--config", run_yaml(RUN | {"trainer.max_steps": 10}))
    assert code == 0, err
    assert f"changed since the checkpoint: trainer.max_steps {steps} -> 10" in err
    assert [int(row["step"]) for row in rows(root)] == list(range(1, 11))
    assert [row["step"] for row in rows(root) if row["val/loss"]] == ["3", "6", "9"]
    assert float(rows(root)[steps]["optim/lr"]) == 3e-4 * warmup_cosine(steps, 0, 10, 0.1)


def test_weights_with_compiler_prefix_resume(
    lightning: Lightning, run_yaml: RunYaml, tmp_path: Path
):
    root = tmp_path / "run"
    train(lightning, run_yaml, tmp_path / "whole")
    train(lightning, run_yaml, root)
    cut_back(root, 5)
    path = root / "checkpoints" / "step-00000005.ckpt"
    checkpoint = torch.load(path, weights_only=True)
    weights = checkpoint["state_dict"].items()
    checkpoint["state_dict"] = {f"_orig_mod.{name}": tensor for name, tensor in weights}
    torch.save(checkpoint, path)
    train(lightning, run_yaml, root)
    assert_same_run(tmp_path / "whole", root)


def test_going_back_to_an_older_file_is_a_new_way_from_there(
    lightning: Lightning, run_yaml: RunYaml, tmp_path: Path
):
    root = tmp_path / "run"
    train(lightning, run_yaml, root)
    older = root / "checkpoints" / "step-00000004.ckpt"
    train(lightning, run_yaml, root, **{"ckpt_path": str(older), "trainer.max_steps": 5})
    names = sorted(path.name for path in older.parent.glob("*.ckpt"))
    assert names[-1] == "step-00000005.ckpt"
    assert (older.parent / "step-00000007.ckpt.set-aside").exists()
    assert [int(row["step"]) for row in rows(root)] == [1, 2, 3, 4, 5]


def test_damaged_newest_file_costs_its_steps_and_nothing_else(
    lightning: Lightning, run_yaml: RunYaml, tmp_path: Path
):
    train(lightning, run_yaml, tmp_path / "whole")
    root = tmp_path / "run"
    train(lightning, run_yaml, root)
    newest = root / "checkpoints" / "step-00000007.ckpt"
    newest.write_bytes(newest.read_bytes()[: newest.stat().st_size // 2])
    code, _, err = lightning("fit", "--config", run_yaml(RUN))
    assert code == 0, err
    assert f"passed over {newest}: truncated or corrupt" in err
    assert_same_run(tmp_path / "whole", root)


def test_run_out_of_time_stops_at_a_step_edge_and_goes_on(
    lightning: Lightning, run_yaml: RunYaml, tmp_path: Path
):
    three = {"trainer.accumulate_grad_batches": 3}
    train(lightning, run_yaml, tmp_path / "whole", **three)
    root = tmp_path / "run"
    for step in (1, 2):
        train(lightning, run_yaml, root, **three, **{"trainer.max_time": {"milliseconds": 1}})
        assert (root / "checkpoints" / f"step-{step:08d}.ckpt").exists()
        assert len(rows(root)) == step
    train(lightning, run_yaml, root, **three)
    assert_same_run(tmp_path / "whole", root)


def test_checkpoint_holds_tensors_and_plain_types_only(
    lightning: Lightning, run_yaml: RunYaml, tmp_path: Path
):
    train(lightning, run_yaml, tmp_path / "run")
    for path in (tmp_path / "run" / "checkpoints").iterdir():
        checkpoint = torch.load(path, weights_only=True)
        assert not [name for name in checkpoint["state_dict"] if "_orig_mod" in name]
        assert checkpoint["train_loss"] > 0


@pytest.mark.slow
def test_resume_with_compile_ends_with_the_same_bits(run_yaml: RunYaml, tmp_path: Path):
    overrides = RUN | {"model.compile": True, "model.config.dropout": 0.1}

    def run(name: str) -> None:
        # In processes of their own: the shape checks of these tests do not compile.
        config = run_yaml(overrides | {"trainer.default_root_dir": str(tmp_path / name)})
        subprocess.run([PROGRAM, "fit", "--config", config], check=True)

    run("whole")
    run("killed")
    cut_back(tmp_path / "killed", 4)
    run("killed")
    assert_same_run(tmp_path / "whole", tmp_path / "killed")


def test_activation_checkpointing_may_be_switched_on_in_mid_run(
    lightning: Lightning, run_yaml: RunYaml, tmp_path: Path
):
    overrides = {"model.config.dropout": 0.1}
    train(lightning, run_yaml, tmp_path / "whole", **overrides)
    train(lightning, run_yaml, tmp_path / "cut", **overrides)
    cut_back(tmp_path / "cut", 3)
    overrides["model.config.activation_checkpointing"] = True
    root = {"trainer.default_root_dir": str(tmp_path / "cut")}
    code, _, err = lightning("fit", "--config", run_yaml(RUN | root | overrides))
    assert code == 0, err
    key = "model.config.activation_checkpointing"
    assert f"changed since the checkpoint: {key} False -> True" in err.splitlines()
    assert_same_run(tmp_path / "whole", tmp_path / "cut")


@pytest.mark.slow
@pytest.mark.parametrize("compiled", [True, False])
def test_two_runs_on_two_threads_end_with_the_same_bits(
    run_yaml: RunYaml, tmp_path: Path, compiled: bool
):
    # Large enough for threads to share the work, and for each id to be met by both.
    overrides = RUN | {
        "model.compile": compiled,
        "model.config.d_model": 128,
        "data.seq_len": 128,
        "data.micro_batch_size": 8,
        "trainer.precision": "auto",
        "trainer.limit_val_batches": 0,
    }
    for name in ("one", "other"):
        config = run_yaml(overrides | {"trainer.default_root_dir": str(tmp_path / name)})
        environment = os.environ | {"OMP_NUM_THREADS": "2"}
        subprocess.run([PROGRAM, "fit", "--config", config], check=True, env=environment)
    for step in range(1, STEPS + 1):  # names the first step that differs
        assert_same_run(tmp_path / "one", tmp_path / "other", step)


def test_sigkill_and_the_same_command_end_with_the_same_bits(
    lightning: Lightning, run_yaml: RunYaml, tmp_path: Path
):
    overrides = {"trainer.max_steps": 40, "checkpoint.keep_last": 2}
    train(lightning, run_yaml, tmp_path / "whole", **overrides)
    root = tmp_path / "killed"
    config = run_yaml(RUN | {"trainer.default_root_dir": str(root)} | overrides)
    command = [PROGRAM, "fit", "--config", config]
    environment = os.environ | {"OMP_NUM_THREADS": str(torch.get_num_threads())}
    for marker in (" 9/40", "21/40"):
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as run:
            assert any(f"step {marker}" in line for line in run.stderr or ())
            run.send_signal(signal.SIGKILL)
    assert subprocess.run(command, env=environment, check=False).returncode == 0
    assert_same_run(tmp_path / "whole", root, 40, LEARNED)


@pytest.mark.slow
def test_three_kills_after_one_save_end_with_the_same_bits(
    lightning: Lightning, run_yaml: RunYaml, tmp_path: Path
):
    rare = {"trainer.accumulate_grad_batches": 3, "trainer.limit_val_batches": 0}
    rare |= {"checkpoint.every_n_steps": 100, "model.config.dropout": 0.1}
    train(lightning, run_yaml, tmp_path / "whole", **rare)
    root = tmp_path / "killed"
    train(lightning, run_yaml, root, **rare, **{"trainer.max_time": {"milliseconds": 1}})
    config = run_yaml(RUN | {"trainer.default_root_dir": str(root)} | rare)
    for count in (7, 2, 9):
        environment = os.environ | {VARIABLE: f"inside accumulation:{count}"}
        killed = subprocess.run([PROGRAM, "fit", "--config", config], env=environment, check=False)
        assert killed.returncode == -signal.SIGKILL
        assert [path.name for path in (root / "checkpoints").iterdir()] == ["step-00000001.ckpt"]
    train(lightning, run_yaml, root, **rare)
    assert_same_run(tmp_path / "whole", root, keys=LEARNED)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "number", "stage"),
    [("prepare", signal.SIGTERM, "train tokenizer"), ("fit", signal.SIGUSR1, "encode: ")],
)
def test_signal_before_training_leaves_no_half_of_the_data(
    run_yaml: RunYaml, tmp_path: Path, command: str, number: signal.Signals, stage: str
):
    data = tmp_path / "data"
    config = run_yaml({"data.path": str(data), "data.corpus": "stdlib"})
    words = [PROGRAM, command, "--config", config]
    with subprocess.Popen(words, stderr=subprocess.PIPE, text=True) as run:
        assert any(line.startswith(stage) for line in run.stderr or ())
        run.send_signal(number)
    # No name but that of the work, from which the next call goes on.
    assert (run.returncode, [path.name for path in data.iterdir()]) == (143, [".work"])
    assert subprocess.run(words, check=False).returncode == 0
    assert missing_files(data) == []
    assert not (data / ".work").exists()


def test_changed_validation_is_announced_and_the_best_is_looked_for_anew(
    lightning: Lightning, run_yaml: RunYaml, tmp_path: Path
):
    options = {"trainer.limit_val_batches": ..., "data.val_sequences": 6}
    assert lightning("fit", "--config", run_yaml(options))[0] == 0
    longer = options | {"data.val_sequences": 4, "trainer.max_steps": 8}
    code, _, err = lightning("fit", "--config", run_yaml(longer))
    assert code == 0, err
    assert "changed since the checkpoint: validation sequences 6 -> 4" in err
    assert err.count("the run validates on other data than before") == 1
    saved = torch.load(tmp_path / "run/checkpoints/step-00000008.ckpt", weights_only=True)
    assert saved["callbacks"]["AtomicCheckpoint"]["best"] == {}


def test_another_micro_batch_validates_to_the_same_loss(
    lightning: Lightning, run_yaml: RunYaml, tmp_path: Path
):
    losses = []
    for micro in (1, 2):
        root = tmp_path / f"{micro}"
        options = {
            "trainer.limit_val_batches": ...,
            "data.val_sequences": 5,
            "data.micro_batch_size": micro,
            "trainer.accumulate_grad_batches": 2 // micro,
            "trainer.default_root_dir": str(root),
        }
        assert lightning("fit", "--config", run_yaml(options))[0] == 0
        losses.append([float(row["val/loss"]) for row in rows(root) if row["val/loss"]])
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
