"""Private names of libraries that this project replaces or reads, each with the reason.

tests/test_patches.py fails when a release of a library renames one of them.
"""

import argparse
from datetime import timedelta
from typing import Any

from lightning.fabric.plugins.environments.cluster_environment import ClusterEnvironment
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.strategies import DDPStrategy, Strategy
from lightning.pytorch.strategies.launchers import subprocess_script
from torch.utils.tensorboard import FileWriter, SummaryWriter

from callbacks.processes.parent import watch_ranks

DEFAULT_TIMEOUT = timedelta(seconds=1800)


class PatchedCLI(LightningCLI):
    """LightningCLI that leaves checkpoints alone while it parses."""

    def _parse_ckpt_path(self) -> None:
        """Do nothing: Lightning loads ckpt_path and lets its settings override the options."""


class PatchedTrainer(Trainer):
    """Lightning's Trainer with a hook before a run and one after its loop.

    Lightning's own hooks come too late for the first, when the checkpoint is chosen, and are left
    out where no step remains.
    """

    def before_run(self, ckpt_path: str | None) -> str | None:
        """Return the checkpoint to load."""
        return ckpt_path

    def after_loop(self) -> None:
        """Run after the loop of fit or validate, also if it had no step left."""

    def _run(
        self,
        model: LightningModule,
        ckpt_path: Any = None,
        weights_only: bool | None = None,
    ) -> Any:
        return super()._run(model, self.before_run(ckpt_path), weights_only)

    def _run_stage(self) -> Any:
        result = super()._run_stage()
        self.after_loop()
        return result


class PatchedSummaryWriter(SummaryWriter):
    """PyTorch's SummaryWriter over a given file writer; its own starts a thread."""

    def __init__(self, writer: FileWriter, purge_step: int) -> None:
        self._writer = writer
        super().__init__(writer.get_logdir(), purge_step=purge_step)

    def _get_file_writer(self) -> FileWriter:
        self.file_writer, self.all_writers = self._writer, {self.log_dir: self._writer}
        return self._writer


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


def argument_types(parser: argparse.ArgumentParser) -> dict[str, Any]:
    """Return the type hint of each argument of a jsonargparse parser; None for a section."""
    return {action.dest: getattr(action, "_typehint", None) for action in parser._actions}


def is_inner_parser(parser: argparse.ArgumentParser) -> bool:
    """Whether jsonargparse made this parser for the arguments of a class that a value names."""
    return getattr(parser, "_inner_parser", False)
