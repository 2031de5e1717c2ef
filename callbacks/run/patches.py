"""Private names of Lightning that this project replaces or reads, each with the reason.

tests/test_patches.py fails when a release of Lightning renames one of them.
"""

from datetime import timedelta
from typing import Any

from lightning.fabric.plugins.environments.cluster_environment import ClusterEnvironment
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import DDPStrategy, Strategy
from lightning.pytorch.strategies.launchers import subprocess_script

from callbacks.processes.parent import watch_ranks

DEFAULT_TIMEOUT = timedelta(seconds=1800)


def disable_signal_handlers(trainer: Trainer) -> None:
    """Turn off the Trainer's signal handlers; callbacks/stop_signals.py replaces them.

    Lightning's handlers save inside an accumulation window, and ask all ranks in every
    micro-batch, without effect where a child process gets the signal.
    """
    trainer._signal_connector.register_signal_handlers = lambda: None
    trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = lambda: None


def replace_rank_observer() -> None:
    """Replace the thread that watches the ranks that Lightning's launcher starts.

    Lightning's kills this process when a rank ends, without saying which rank ended and why.
    """
    subprocess_script._launch_process_observer = watch_ranks  # pyright: ignore


def cluster_environment(trainer: Trainer) -> ClusterEnvironment:
    """Return the cluster environment, which strategies on a single device do not expose."""
    return trainer._accelerator_connector.cluster_environment


def requested_devices(trainer: Trainer) -> tuple[int, int]:
    """Return devices per node and nodes as requested; a single-device strategy reports 1 and 1."""
    connector: Any = trainer._accelerator_connector
    return len(connector._parallel_devices), connector._num_nodes_flag


def set_peer_timeout(strategy: Strategy, seconds: float | None) -> timedelta:
    """Set the limit for all waits between ranks, and return the limit in force.

    Lightning takes it in the constructor of DDPStrategy only, which "ddp" as a string does not
    reach; a strategy that was passed as an object may have its own.
    """
    if seconds is not None and isinstance(strategy, DDPStrategy):
        strategy._timeout = timedelta(seconds=seconds)
    return getattr(strategy, "_timeout", None) or DEFAULT_TIMEOUT
