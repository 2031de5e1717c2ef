"""Several processes on one machine: as exact as one."""

import contextlib
import csv
import math
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import RunYaml, cut_back

from callbacks.checkpoint.files import damage, read_checkpoint
from callbacks.drill.drill import compare, rows
from data.tokens.folder import load_meta

ROOT = Path(__file__).parent.parent
PROGRAM = Path(sys.executable).with_name("lightning")
TORCHRUN = [Path(sys.executable).with_name("torchrun"), "--nproc_per_node", "2", "-m", "cli"]
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1"}
STEPS = 8
PATIENCE = 300  # seconds, for a machine with other work
ENDLESS = {
    "trainer.max_steps": 10**6,
    "trainer.val_check_interval": 10**6,
    "checkpoint.every_n_steps": 10**6,
}
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


def fit(path: Path, *program: Any, **variables: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [*(program or [PROGRAM]), "fit", "--config", path],
        cwd=ROOT,
        env=ENVIRONMENT | variables,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )


@contextlib.contextmanager
def started(path: Path, *program: Any, **variables: str) -> Iterator[subprocess.Popen]:
    """A run in a process group of its own, whose processes end with the context."""
    with subprocess.Popen(
        [*(program or [PROGRAM]), "fit", "--config", path],
        cwd=ROOT,
        env=ENVIRONMENT | variables,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as run:
        try:
            yield run
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(run.pid, signal.SIGKILL)


def wait_for_a_step(run: subprocess.Popen) -> None:
    assert any(line.startswith("step ") for line in run.stderr or ())


def train(run_yaml: RunYaml, root: Path, ranks: int, **overrides: Any) -> str:
    result = fit(config(run_yaml, root, ranks, **overrides))
    assert result.returncode == 0, result.stderr
    return result.stderr


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
    assert result.returncode == 2
    assert result.stderr.count("needs at least 100001") == 1


@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGTERM, 143), (signal.SIGUSR1, 143), (signal.SIGINT, -signal.SIGINT)],
)
@pytest.mark.parametrize("whom", ["group", "first", "child"])
def test_signal_to_any_process_saves_and_ends_all(
    run_yaml: RunYaml, tmp_path: Path, number: signal.Signals, code: int, whom: str
):
    with started(config(run_yaml, tmp_path / "run", 2, **ENDLESS)) as run:
        wait_for_a_step(run)
        send(run.pid, number, whom)
        _, rest = run.communicate(timeout=PATIENCE)
    assert run.returncode == code, rest
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
        os.kill(children(pid)[0], number)


def children(pid: int) -> list[int]:
    """Processes that a process started from its main thread."""
    words = Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii").split()
    return [int(word) for word in words]


def test_children_die_with_a_first_process_that_is_killed(run_yaml: RunYaml, tmp_path: Path):
    with started(config(run_yaml, tmp_path / "run", 2, **ENDLESS)) as run:
        wait_for_a_step(run)
        run.kill()
        # Its children hold the other ends of this pipe: it ends when the last of them is gone.
        run.communicate(timeout=PATIENCE)


# Ways to start


@pytest.mark.parametrize(
    "program", [[sys.executable, "-m", "cli"], TORCHRUN], ids=["python", "torchrun"]
)
def test_every_way_to_start_ends_with_the_same_bits(
    run_yaml: RunYaml, tmp_path: Path, program: list
):
    train(run_yaml, tmp_path / "script", 2)
    result = fit(config(run_yaml, tmp_path / "other", 2), *program)
    assert result.returncode == 0, result.stderr
    assert compare(tmp_path / "script", tmp_path / "other") == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP])
def test_signal_to_all_processes_of_torchrun_saves(
    run_yaml: RunYaml, tmp_path: Path, number: signal.Signals
):
    torchrun = [TORCHRUN[0], "--signals-to-handle", "SIGTERM,SIGUSR1,SIGHUP", *TORCHRUN[1:]]
    with started(config(run_yaml, tmp_path / "run", 2, **ENDLESS), *torchrun) as run:
        wait_for_a_step(run)
        # The agent passes on to the ranks what they have received already.
        for pid in (*children(run.pid), run.pid):
            os.kill(pid, number)
        _, rest = run.communicate(timeout=PATIENCE)
    assert run.returncode == 1
    assert f"{number.name}: saved at step" in rest
    [saved] = (tmp_path / "run" / "checkpoints").iterdir()
    assert damage(saved) is None


def test_rank_that_is_killed_is_named_with_the_way_to_go_on(run_yaml: RunYaml, tmp_path: Path):
    with started(config(run_yaml, tmp_path / "run", 2, **ENDLESS)) as run:
        wait_for_a_step(run)
        [rank] = children(run.pid)
        os.kill(rank, signal.SIGKILL)
        _, rest = run.communicate(timeout=PATIENCE)
    assert run.returncode == 1
    assert rest.splitlines()[-1].removeprefix("error: ") == (
        f"rank 1 (process {rank}) was killed by SIGKILL, as the system does when memory runs out; "
        "the same command goes on from the newest checkpoint"
    )


@pytest.mark.parametrize("program", [[PROGRAM], TORCHRUN], ids=["lightning", "torchrun"])
def test_ranks_end_when_who_starts_them_is_killed_in_their_first_moments(
    run_yaml: RunYaml, tmp_path: Path, program: list
):
    with started(config(run_yaml, tmp_path / "run", 2), *program) as run:
        while not children(run.pid):
            os.sched_yield()
        run.kill()
        # The ranks hold the other ends of this pipe: it ends when the last of them is gone.
        run.communicate(timeout=PATIENCE)
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_two_runs_at_once_do_not_meet(run_yaml: RunYaml, tmp_path: Path):
    names = ("one", "other")
    with contextlib.ExitStack() as stack:
        paths = [config(run_yaml, tmp_path / name, 2) for name in names]
        runs = [stack.enter_context(started(path)) for path in paths]
        errors = [run.communicate(timeout=PATIENCE)[1] for run in runs]
    assert [run.returncode for run in runs] == [0, 0], errors
    assert compare(tmp_path / "one", tmp_path / "other") == []


def test_busy_port_is_refused(run_yaml: RunYaml, tmp_path: Path):
    with socket.socket() as listener:
        listener.bind(("", 0))
        listener.listen()
        port = str(listener.getsockname()[1])
        result = fit(config(run_yaml, tmp_path / "run", 2), MASTER_PORT=port)
    assert (result.returncode, len(result.stderr.splitlines())) == (2, 1)
    assert result.stderr.startswith(f"error: MASTER_PORT is {port}, where the processes")


def slurm(rank: int) -> dict[str, str]:
    """What srun tells one of two processes on one machine."""
    return {
        "SLURM_JOB_ID": str(os.getpid()),  # becomes the port
        "SLURM_JOB_NAME": "train",
        "SLURM_NNODES": "1",
        "SLURM_NTASKS": "2",
        "SLURM_NTASKS_PER_NODE": "2",
        "SLURM_NODEID": "0",
        "SLURM_NODELIST": "localhost",
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": str(rank),
    }


def test_processes_of_slurm_train_together_and_save_at_its_signal(
    run_yaml: RunYaml, tmp_path: Path
):
    path = config(run_yaml, tmp_path / "run", 2, **ENDLESS)
    with started(path, **slurm(0)) as first, started(path, **slurm(1)) as second:
        wait_for_a_step(first)
        for run in (first, second):
            run.send_signal(signal.SIGUSR1)
        _, told = first.communicate(timeout=PATIENCE)
        _, nothing = second.communicate(timeout=PATIENCE)
    assert (first.returncode, second.returncode, nothing) == (143, 143, "")
    assert "SIGUSR1: saved at step" in told
    [saved] = (tmp_path / "run" / "checkpoints").iterdir()
    assert read_checkpoint(saved)["contract"]["trainer.world_size"] == 2


# Lengths that ranks do not divide


def test_epoch_of_odd_length_is_trained_by_two_ranks_as_by_one(
    run_yaml: RunYaml, corpus: Path, tmp_path: Path
):
    seq_len, each = 23, 4
    windows = (load_meta(corpus)["train"]["tokens"] - 1) // seq_len
    assert windows % each == 1  # all of the last step is one row of the first rank
    epoch = {"trainer.max_steps": ..., "data.epochs": 1, "data.seq_len": seq_len}
    train(run_yaml, tmp_path / "two", 2, **epoch)
    train(run_yaml, tmp_path / "one", 1, **epoch, **{"trainer.accumulate_grad_batches": 2})
    two, one = ([float(row["train/loss"]) for row in rows(tmp_path / n)] for n in ("two", "one"))
    assert len(two) == math.ceil(windows / each)
    assert two == pytest.approx(one, rel=1e-4)


def test_fewer_validation_windows_than_ranks_give_the_loss_of_one_rank(
    run_yaml: RunYaml, tmp_path: Path
):
    single = {"trainer.limit_val_batches": 1, "data.micro_batch_size": 1}
    train(run_yaml, tmp_path / "three", 3, **single)
    train(run_yaml, tmp_path / "one", 1, **single, **{"trainer.accumulate_grad_batches": 3})
    three, one = (
        [float(row["val/loss"]) for row in rows(tmp_path / name) if row["val/loss"]]
        for name in ("three", "one")
    )
    assert (len(three), three) == (2, pytest.approx(one, rel=1e-5))
