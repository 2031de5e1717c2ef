"""Launchers: variables that they leave in a shell, and the processes that they started."""

from pathlib import Path

import pytest
from conftest import Lightning, RunYaml

from callbacks.processes.launch import MPI_SIZES, RANKS, SIZES, SLURM_RANKS

ONE = "trainer.devices × trainer.num_nodes is 1 × 1 = 1"
TWO = "trainer.devices × trainer.num_nodes is 2 × 1 = 2"
SLURM = {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0", "SLURM_JOB_NAME": "train"}


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch: pytest.MonkeyPatch):
    more = ("TORCHELASTIC_RUN_ID", "SLURM_JOB_NAME", "SLURM_STEP_ID", "ENVIRONMENT")
    more = (*more, "MASTER_ADDR", "MASTER_PORT")
    for name in (*RANKS, *SLURM_RANKS, *SIZES, *MPI_SIZES, *more):
        monkeypatch.delenv(name, raising=False)


def set_all(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str]) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize(
    "variables",
    [
        {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"},
        {"WORLD_SIZE": "1"},
        SLURM | {"SLURM_NTASKS": "1"},
        {"SLURM_JOB_NAME": "train", "SLURM_NTASKS": "4"},
        SLURM | {"SLURM_JOB_NAME": "interactive", "SLURM_NTASKS": "4"},
        SLURM | {"SLURM_STEP_ID": "4294967290", "SLURM_NTASKS": "4"},
        {"OMPI_COMM_WORLD_SIZE": "1"},
    ],
    ids=["first of one", "size 1", "one task", "salloc", "interactive", "step", "mpirun -n 1"],
)
def test_one_device_run_leaves_all_its_files_in_any_shell(
    lightning: Lightning,
    run_yaml: RunYaml,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    variables: dict[str, str],
):
    set_all(monkeypatch, variables)
    assert lightning("fit", "--config", run_yaml({"trainer.max_steps": 1}))[0] == 0
    made = {path.name for path in (tmp_path / "run").iterdir()}
    assert {"metrics.csv", "run.json", "tensorboard", "tokenizer.json", "config.yaml"} <= made


LEFTOVER = "(a leftover in this shell)"


@pytest.mark.parametrize(
    ("variables", "error"),
    [
        (
            {"RANK": "1"},
            f"RANK is 1, but no launcher started this process as one of several ({ONE}); unset "
            f"RANK {LEFTOVER}, or start all processes by torchrun or srun",
        ),
        (
            {"SLURM_PROCID": "3", "SLURM_JOB_NAME": "bash"},
            f"SLURM_PROCID is 3, but no launcher started this process as one of several ({ONE}); "
            f"unset SLURM_PROCID {LEFTOVER}, or start all processes by torchrun or srun (of "
            "another SLURM_JOB_NAME than bash)",
        ),
        (
            {"LOCAL_RANK": "1"},
            f"LOCAL_RANK is 1, but {ONE}: it must be below the devices of a node; unset LOCAL_RANK "
            f"{LEFTOVER}, or raise trainer.devices",
        ),
        (
            {"NODE_RANK": "1"},
            f"NODE_RANK is 1, but {ONE}: it must be below the nodes; pass --trainer.num_nodes 2 or "
            "more, or unset NODE_RANK",
        ),
        (
            {"WORLD_SIZE": "2"},
            f"WORLD_SIZE is 2, but {ONE}; unset WORLD_SIZE, or start all processes by torchrun",
        ),
        (
            {"RANK": "one"},
            "the environment variable RANK is 'one': it must be a whole number, as launchers set "
            "it; unset RANK",
        ),
        (
            {"TORCHELASTIC_RUN_ID": "none"},
            "TORCHELASTIC_RUN_ID is set, as by torchrun, but not RANK, LOCAL_RANK, WORLD_SIZE, "
            "MASTER_ADDR, MASTER_PORT, which that launcher sets too; unset the first (a leftover "
            "in this shell), or start by the launcher",
        ),
        (
            {"TORCHELASTIC_RUN_ID": "none", "RANK": "5", "LOCAL_RANK": "0", "WORLD_SIZE": "2"}
            | {"MASTER_ADDR": "localhost", "MASTER_PORT": "1"},
            "RANK is 5, but WORLD_SIZE is 2: ranks are below their number, from 0 on; start by the "
            "launcher, which sets both",
        ),
        (
            SLURM | {"SLURM_NTASKS": "4", "SLURM_NTASKS_PER_NODE": "2", "SLURM_LOCALID": "3"},
            "SLURM_LOCALID is 3, but SLURM_NTASKS_PER_NODE is 2: ranks are below their number, "
            "from 0 on; start by the launcher, which sets both",
        ),
        (
            {"SLURM_JOB_ID": "abc"},
            "the environment variable SLURM_JOB_ID is 'abc': it must be a whole number, as "
            "launchers set it; unset SLURM_JOB_ID",
        ),
        pytest.param(
            SLURM | {"SLURM_NTASKS": "2", "SLURM_NTASKS_PER_NODE": "1", "SLURM_NNODES": "2"},
            f"SLURM_NTASKS is 2, but {ONE}; pass --trainer.devices 1 --trainer.num_nodes 2, or "
            "ask SLURM for as many tasks (without srun: unset SLURM_NTASKS)",
            marks=pytest.mark.slow,  # as below
        ),
        (
            SLURM | {"SLURM_NTASKS": "2"},
            "SLURM_NTASKS is 2 and SLURM_NTASKS_PER_NODE is not set: each node must run as many "
            "tasks as trainer.devices; pass --ntasks-per-node instead of --ntasks",
        ),
        (
            SLURM | {"SLURM_NTASKS": "2", "SLURM_NTASKS_PER_NODE": "2", "ENVIRONMENT": "BATCH"},
            "SLURM_NTASKS is 2, but the batch script itself has started this process, once: put "
            "srun before the command, or unset SLURM_NTASKS, and this process starts those of "
            "trainer.devices",
        ),
        (
            {"OMPI_COMM_WORLD_SIZE": "2"},
            "OMPI_COMM_WORLD_SIZE is 2: MPI started so many processes, which cannot meet; start by "
            "torchrun or srun, or unset OMPI_COMM_WORLD_SIZE to run one process",
        ),
    ],
)
def test_processes_that_do_not_fit_one_device_are_refused_before_any_work(
    lightning: Lightning,
    run_yaml: RunYaml,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    variables: dict[str, str],
    error: str,
):
    set_all(monkeypatch, variables)
    code, _, err = lightning("fit", "--config", run_yaml())
    assert (code, err) == (2, f"error: {error}\n")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("variables", "overrides", "error"),
    [
        (
            {},
            {"trainer.num_nodes": 2},
            "trainer.num_nodes is 2, but where the nodes meet is not told (MASTER_ADDR and "
            "MASTER_PORT not set); start by torchrun or srun, set MASTER_ADDR, MASTER_PORT and on "
            "each node NODE_RANK, or pass --trainer.num_nodes 1",
        ),
        (
            {},
            {"trainer.devices": 2, "trainer.strategy": "single_device"},
            "trainer.strategy is SingleDeviceStrategy, which trains on 1 of the 2 × 1 devices that "
            "trainer.devices × trainer.num_nodes asks for; pass --trainer.strategy ddp, or "
            "--trainer.devices 1",
        ),
        (
            {"LOCAL_RANK": "0"},
            {"trainer.devices": 2},
            "LOCAL_RANK is 0, so another program starts the processes of this run, but MASTER_PORT,"
            f" where they meet, is not set; unset LOCAL_RANK {LEFTOVER}, and this process starts "
            "the others, or start all by torchrun",
        ),
        (
            {"LOCAL_RANK": "1", "RANK": "0", "MASTER_PORT": "0"},
            {"trainer.devices": 2},
            f"RANK is 0, but NODE_RANK 0 and LOCAL_RANK 1 make rank 1 ({TWO}); unset RANK, or "
            "start all processes by torchrun",
        ),
        (
            {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "first", "MASTER_PORT": "0"},
            {"trainer.num_nodes": 2},
            "RANK is 1, but no launcher started this process as one of several (trainer.devices × "
            "trainer.num_nodes is 1 × 2 = 2); set NODE_RANK to the number of this node, from 0 on, "
            "or start all processes by torchrun or srun",
        ),
        pytest.param(
            SLURM | {"SLURM_NTASKS": "4", "SLURM_NTASKS_PER_NODE": "4"},
            {"trainer.devices": 2},
            f"SLURM_NTASKS is 4, but {TWO}; pass --trainer.devices 4 --trainer.num_nodes 1, or ask "
            "SLURM for as many tasks (without srun: unset SLURM_NTASKS)",
            # Rank 0 keeps its error for ranks that come later.
            marks=pytest.mark.slow,
        ),
        (
            {},
            {"trainer.devices": 2, "trainer.strategy": "ddp_spawn"},
            "trainer.strategy is ddp_spawn: spawned processes would need a pickled Trainer; use "
            "auto or ddp",
        ),
    ],
)
def test_processes_that_do_not_fit_the_devices_are_refused_before_any_work(
    lightning: Lightning,
    run_yaml: RunYaml,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    variables: dict[str, str],
    overrides: dict[str, object],
    error: str,
):
    set_all(monkeypatch, variables)
    code, _, err = lightning("fit", "--config", run_yaml(overrides))
    assert (code, err) == (2, f"error: {error}\n")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("variables", [{"RANK": "1"}, {"RANK": "one"}, {"SLURM_PROCID": "2"}])
def test_commands_of_one_process_take_no_rank_from_the_shell(
    lightning: Lightning,
    run_yaml: RunYaml,
    monkeypatch: pytest.MonkeyPatch,
    variables: dict[str, str],
):
    set_all(monkeypatch, variables)
    code, out, _ = lightning("plan", "--config", run_yaml())
    assert code == 0
    assert "parameters" in out
