"""Launchers: which processes they started for a run, read from environment variables.

Imports nothing heavy: Lightning reads some of these variables when it is imported, and fails on
values that are no numbers.
"""

import os
from dataclasses import dataclass
from typing import Literal

# Variables by which launchers tell a process its rank, and how many processes they started.
RANKS = ("RANK", "LOCAL_RANK", "NODE_RANK", "GROUP_RANK", "JSM_NAMESPACE_RANK")
SLURM_RANKS = ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID")
SIZES = ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "SLURM_NTASKS", "SLURM_NTASKS_PER_NODE", "SLURM_NNODES")
# What the ranks of SLURM are below.
SLURM_SIZES = ("SLURM_NTASKS", "SLURM_NTASKS_PER_NODE", "SLURM_NNODES")
MPI_SIZES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE")

SET_NODE = "set NODE_RANK to the number of this node, from 0 on"
# The step of salloc's shell on a node of the job.
INTERACTIVE_STEP = "4294967290"

Kind = Literal["torchrun", "srun", "hand", "own"]


@dataclass(frozen=True)
class Launch:
    """How the processes of a run were started, read from environment variables."""

    kind: Kind
    """torchrun, srun, hand (LOCAL_RANK is set: a script, or a first process of ours, started each
    process), own (this process starts the others of its node)."""
    numbers: dict[str, int]
    """Launcher variables that are set."""

    @property
    def rank(self) -> int | None:
        """Rank of this process in the run; None if only the configuration determines it."""
        get = self.numbers.get
        if self.kind == "hand" and get("NODE_RANK", get("GROUP_RANK", 0)):
            return get("RANK")
        names = {"torchrun": "RANK", "srun": "SLURM_PROCID", "hand": "LOCAL_RANK"}
        return get(names.get(self.kind, ""))

    @property
    def world_size(self) -> int | None:
        """Number of started processes; None if only the configuration determines it."""
        names = {"torchrun": "WORLD_SIZE", "srun": "SLURM_NTASKS", "hand": "WORLD_SIZE"}
        return self.numbers.get(names.get(self.kind, ""))


def read_launch() -> Launch:
    """Read the environment of this process.

    Raises:
        ValueError: a variable is no number, or one that its launcher always sets is missing.
    """
    found = {}
    for name in (*RANKS, *SLURM_RANKS, *SIZES, *MPI_SIZES, "SLURM_JOB_ID"):
        text = os.environ.get(name)
        if text is not None and not text.isdecimal():
            raise ValueError(
                f"the environment variable {name} is {text!r}: it must be a whole number, as "
                f"launchers set it; unset {name}"
            )
        if text is not None:
            found[name] = int(text)
    if "TORCHELASTIC_RUN_ID" in os.environ:
        needed = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
        _require(needed, "TORCHELASTIC_RUN_ID is set, as by torchrun")
        _check_ranks(found, {"RANK": "WORLD_SIZE", "LOCAL_RANK": "LOCAL_WORLD_SIZE"})
        return Launch("torchrun", found)
    # In a shell of salloc or `srun --pty` SLURM has started one process, whatever it could start.
    step = os.environ.get("SLURM_STEP_ID")
    shell = os.environ.get("SLURM_JOB_NAME") in ("bash", "interactive") or step == INTERACTIVE_STEP
    tasks = found.get("SLURM_NTASKS", 1)
    if tasks > 1 and "SLURM_PROCID" in found and not shell:
        if os.environ.get("ENVIRONMENT") == "BATCH" and step is None:
            raise ValueError(
                f"SLURM_NTASKS is {tasks}, but the batch script itself has started this process, "
                "once: put srun before the command, or unset SLURM_NTASKS, and this process "
                "starts those of trainer.devices"
            )
        _require(("SLURM_LOCALID", "SLURM_NODEID"), f"SLURM_NTASKS is {tasks}, as by srun")
        if "SLURM_NTASKS_PER_NODE" not in found:
            raise ValueError(
                f"SLURM_NTASKS is {tasks} and SLURM_NTASKS_PER_NODE is not set: each node must run "
                "as many tasks as trainer.devices; pass --ntasks-per-node instead of --ntasks"
            )
        _check_ranks(found, dict(zip(SLURM_RANKS, SLURM_SIZES, strict=True)))
        return Launch("srun", found)
    return Launch("hand" if "LOCAL_RANK" in found else "own", found)


def _require(names: tuple[str, ...], why: str) -> None:
    missing = [name for name in names if name not in os.environ]
    if missing:
        raise ValueError(
            f"{why}, but not {', '.join(missing)}, which that launcher sets too; unset the first "
            "(a leftover in this shell), or start by the launcher"
        )


def _check_ranks(found: dict[str, int], sizes: dict[str, str]) -> None:
    for name, size in sizes.items():
        if name in found and size in found and found[name] >= found[size]:
            raise ValueError(
                f"{name} is {found[name]}, but {size} is {found[size]}: ranks are below their "
                "number, from 0 on; start by the launcher, which sets both"
            )


def forget_launcher() -> None:
    """Drop what makes Lightning take this process for one of several.

    Commands other than fit and validate run in one process, and the runs that drill starts are
    launched by themselves.
    """
    for name in (*RANKS, *SLURM_RANKS, *SIZES, *MPI_SIZES, "TORCHELASTIC_RUN_ID"):
        os.environ.pop(name, None)


def check_processes(launch: Launch, devices: int, nodes: int) -> None:
    """Compare the started processes with those that the configuration asks for.

    Raises:
        ValueError: other processes were started, or some can never join.
    """
    numbers, world = launch.numbers, devices * nodes
    asked = f"trainer.devices × trainer.num_nodes is {devices} × {nodes} = {world}"
    name = {"torchrun": "WORLD_SIZE", "srun": "SLURM_NTASKS"}.get(launch.kind, "WORLD_SIZE")
    size = numbers.get(name, world)
    if launch.kind == "own" and size == 1:
        size = world  # a launcher that started one process leaves the others to it
    if size != world:
        raise ValueError(f"{name} is {size}, but {asked}; {_way_out(launch, size)}")
    if launch.kind == "torchrun":
        _check_spread(launch, "LOCAL_WORLD_SIZE", devices, asked)
    elif launch.kind == "srun":
        _check_spread(launch, "SLURM_NTASKS_PER_NODE", devices, asked)
        _check_spread(launch, "SLURM_NNODES", nodes, asked)
    elif launch.kind == "hand":
        _check_by_hand(numbers, devices, nodes, asked)
    else:
        _check_own(numbers, nodes, asked)


def _way_out(launch: Launch, size: int) -> str:
    if launch.kind == "torchrun":
        each = launch.numbers.get("LOCAL_WORLD_SIZE", size)
        return f"pass --trainer.devices {each} --trainer.num_nodes {max(1, size // each)}"
    if launch.kind == "srun":
        each = launch.numbers["SLURM_NTASKS_PER_NODE"]
        nodes = launch.numbers.get("SLURM_NNODES", max(1, size // each))
        return (
            f"pass --trainer.devices {each} --trainer.num_nodes {nodes}, or ask SLURM for as many "
            "tasks (without srun: unset SLURM_NTASKS)"
        )
    return "unset WORLD_SIZE, or start all processes by torchrun"


def _check_spread(launch: Launch, name: str, asked: int, words: str) -> None:
    if launch.numbers.get(name, asked) != asked:
        size = launch.world_size or 1
        raise ValueError(f"{name} is {launch.numbers[name]}, but {words}; {_way_out(launch, size)}")


def _check_by_hand(numbers: dict[str, int], devices: int, nodes: int, asked: str) -> None:
    local, node = numbers["LOCAL_RANK"], _check_node(numbers, nodes, asked)
    leftover = "unset LOCAL_RANK (a leftover in this shell)"
    if local >= devices:
        raise ValueError(
            f"LOCAL_RANK is {local}, but {asked}: it must be below the devices of a node; "
            f"{leftover}, or raise trainer.devices"
        )
    rank = node * devices + local
    if numbers.get("RANK", rank) != rank:
        raise ValueError(
            f"RANK is {numbers['RANK']}, but NODE_RANK {node} and LOCAL_RANK {local} make rank "
            f"{rank} ({asked}); {SET_NODE if nodes > 1 else 'unset RANK'}, or start all processes "
            "by torchrun"
        )
    if devices * nodes > 1 and "MASTER_PORT" not in os.environ:
        raise ValueError(
            f"LOCAL_RANK is {local}, so another program starts the processes of this run, but "
            f"MASTER_PORT, where they meet, is not set; {leftover}, and this process starts the "
            "others, or start all by torchrun"
        )


def _check_own(numbers: dict[str, int], nodes: int, asked: str) -> None:
    for name in MPI_SIZES:
        if numbers.get(name, 1) > 1:
            raise ValueError(
                f"{name} is {numbers[name]}: MPI started so many processes, which cannot meet; "
                f"start by torchrun or srun, or unset {name} to run one process"
            )
    node = _check_node(numbers, nodes, asked)
    for name in ("RANK", "SLURM_PROCID", "JSM_NAMESPACE_RANK"):
        if numbers.get(name, 0) > 0 and not (name == "RANK" and node > 0):
            job = os.environ.get("SLURM_JOB_NAME")
            named = f" (of another SLURM_JOB_NAME than {job})" if name == "SLURM_PROCID" else ""
            way_out = f"unset {name} (a leftover in this shell)"
            if name == "RANK" and nodes > 1:
                way_out = SET_NODE
            raise ValueError(
                f"{name} is {numbers[name]}, but no launcher started this process as one of "
                f"several ({asked}); {way_out}, or start all processes by torchrun or "
                f"srun{named if job else ''}"
            )
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if nodes > 1 and missing:
        raise ValueError(
            f"trainer.num_nodes is {nodes}, but where the nodes meet is not told ("
            f"{' and '.join(missing)} not set); start by torchrun or srun, set MASTER_ADDR, "
            "MASTER_PORT and on each node NODE_RANK, or pass --trainer.num_nodes 1"
        )


def _check_node(numbers: dict[str, int], nodes: int, asked: str) -> int:
    name = "NODE_RANK" if "NODE_RANK" in numbers else "GROUP_RANK"
    node = numbers.get(name, 0)
    if node >= nodes:
        raise ValueError(
            f"{name} is {node}, but {asked}: it must be below the nodes; pass "
            f"--trainer.num_nodes {node + 1} or more, or unset {name}"
        )
    return node
