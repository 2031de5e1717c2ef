"""Several processes on one machine: as exact as one."""

import csv
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import RunYaml

from callbacks.drill import compare, rows

PROGRAM = Path(sys.executable).with_name("lightning")
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1"}
STEPS = 8
pytestmark = pytest.mark.slow  # each start of three processes takes ten seconds


def config(run_yaml: RunYaml, root: Path, ranks: int, **overrides: Any) -> Path:
    return run_yaml(
        {
            "trainer.devices": ranks,
            "trainer.strategy": "ddp" if ranks > 1 else "auto",
            "trainer.max_steps": STEPS,
            "trainer.val_check_interval": 4,
            "checkpoint.every_n_steps": 1,
            "checkpoint.keep_last": 99,
            "model.config.d_model": 64,
            "trainer.default_root_dir": str(root),
        }
        | overrides,
        name=f"{root.name}.yaml",
    )


def fit(path: Path) -> subprocess.CompletedProcess:
    command = [PROGRAM, "fit", "--config", path]
    return subprocess.run(
        command, env=ENVIRONMENT, capture_output=True, text=True, timeout=120, check=False
    )


def train(run_yaml: RunYaml, root: Path, ranks: int, **overrides: Any) -> str:
    result = fit(config(run_yaml, root, ranks, **overrides))
    assert result.returncode == 0, result.stderr
    return result.stderr


def cut_back(root: Path, step: int) -> None:
    for path in (root / "checkpoints").iterdir():
        if int(path.stem.split("-")[1]) > step:
            path.unlink()


def test_resume_on_three_ranks_ends_with_the_same_bits(run_yaml: RunYaml, tmp_path: Path):
    three = {"trainer.accumulate_grad_batches": 2}
    train(run_yaml, tmp_path / "whole", 3, **three)
    train(run_yaml, tmp_path / "killed", 3, **three)
    cut_back(tmp_path / "killed", 3)
    train(run_yaml, tmp_path / "killed", 3, **three)
    assert compare(tmp_path / "whole", tmp_path / "killed") == []


def test_another_number_of_ranks_sees_the_same_rows_in_each_step(run_yaml: RunYaml, tmp_path: Path):
    train(run_yaml, tmp_path / "two", 2, **{"trainer.accumulate_grad_batches": 3})
    train(run_yaml, tmp_path / "one", 1, **{"trainer.accumulate_grad_batches": 6})
    for two, one in zip(rows(tmp_path / "two"), rows(tmp_path / "one"), strict=True):
        assert two["data/rows_crc32"] == one["data/rows_crc32"]
        for name in ("train/loss", "optim/grad_norm", "val/loss"):
            if one[name]:
                assert float(two[name]) == pytest.approx(float(one[name]), rel=1e-4)


def test_run_goes_on_with_another_number_of_ranks(run_yaml: RunYaml, tmp_path: Path):
    train(run_yaml, tmp_path / "whole", 2)
    train(run_yaml, tmp_path / "moved", 2)
    cut_back(tmp_path / "moved", 4)
    err = train(run_yaml, tmp_path / "moved", 1, **{"trainer.accumulate_grad_batches": 2})
    assert "changed since the checkpoint: trainer.world_size 2 -> 1" in err
    whole, moved = rows(tmp_path / "whole"), rows(tmp_path / "moved")
    assert [r["data/rows_crc32"] for r in whole] == [r["data/rows_crc32"] for r in moved]


def test_only_the_first_process_speaks_and_writes(run_yaml: RunYaml, tmp_path: Path):
    err = train(run_yaml, tmp_path / "run", 2)
    lines = err.splitlines()
    assert len(lines) == len(set(lines))
    with (tmp_path / "run" / "metrics.csv").open(encoding="utf-8", newline="") as file:
        assert [row["step"] for row in csv.DictReader(file)] == [str(s + 1) for s in range(STEPS)]


def test_mistake_is_told_once_and_ends_all_processes(run_yaml: RunYaml, tmp_path: Path):
    result = fit(config(run_yaml, tmp_path / "run", 2, **{"data.seq_len": 100_000}))
    assert result.returncode != 0
    assert "needs at least 100001" in result.stderr


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 143), (signal.SIGUSR1, 143), (signal.SIGINT, 130)]
)
@pytest.mark.parametrize("whom", ["group", "first", "child"])
def test_signal_to_any_process_saves_and_ends_all(
    run_yaml: RunYaml, tmp_path: Path, number: signal.Signals, code: int, whom: str
):
    endless = {"trainer.max_steps": 10**6, "checkpoint.every_n_steps": 10**6}
    path = config(run_yaml, tmp_path / "run", 2, **endless)
    command = [PROGRAM, "fit", "--config", path]
    with subprocess.Popen(
        command, env=ENVIRONMENT, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as run:
        assert run.stderr is not None
        assert any(line.startswith("step ") for line in run.stderr)
        send(run.pid, number, whom)
        rest = run.stderr.read()
        assert run.wait(60) == code, rest
    assert f"{number.name}: saved at step" in rest
    [saved] = (tmp_path / "run" / "checkpoints").iterdir()
    assert torch.load(saved, weights_only=True)["global_step"] > 0


def send(pid: int, number: signal.Signals, whom: str) -> None:
    """Signal the whole group, its first process, or the one that this started."""
    if whom == "group":
        os.killpg(pid, number)
    elif whom == "first":
        os.kill(pid, number)
    else:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii").split()
        os.kill(int(children[0]), number)


def test_children_die_with_a_first_process_that_is_killed(run_yaml: RunYaml, tmp_path: Path):
    path = config(run_yaml, tmp_path / "run", 2, **{"trainer.max_steps": 10**6})
    with subprocess.Popen(
        [PROGRAM, "fit", "--config", path], env=ENVIRONMENT, stderr=subprocess.PIPE, text=True
    ) as run:
        assert run.stderr is not None
        assert any(line.startswith("step ") for line in run.stderr)
        run.kill()
        # Its children hold the other ends of this pipe: it ends when the last of them is gone.
        run.stderr.read()
