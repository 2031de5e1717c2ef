"""The Trainer: Lightning's, counted in optimizer steps, with precision chosen for the hardware."""

import os
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins.environments.cluster_environment import ClusterEnvironment
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.fabric.plugins.environments.torchelastic import TorchElasticEnvironment
from lightning.pytorch import Callback, LightningDataModule, LightningModule
from lightning.pytorch.loggers import Logger
from lightning.pytorch.plugins import CheckpointIO, LayerSync
from lightning.pytorch.plugins import Precision as PrecisionPlugin
from lightning.pytorch.strategies import Strategy

from callbacks.processes.launch import Launch, check_processes, read_launch
from callbacks.processes.peers import REPEAT, Peers, hint
from callbacks.run.devices import check_devices, device_type
from callbacks.run.patches import (
    PatchedTrainer,
    cluster_environment,
    disable_signal_handlers,
    replace_rank_observer,
    requested_devices,
    set_peer_timeout,
)
from callbacks.run.precision import Precision, choose_precision
from callbacks.run.trainer_arguments import check_arguments, check_peer_timeout, seconds_of
from data.datamodule import LMDataModule
from lm.module import LMModule

Plugin = PrecisionPlugin | ClusterEnvironment | CheckpointIO | LayerSync


def with_environment(plugins: list[Plugin] | Plugin | None, launch: Launch) -> list[Plugin]:
    """Return the plugins, with Lightning's own environment unless SLURM launched this process.

    Lightning would take SLURM for the launcher wherever SLURM_NTASKS is set.
    """
    given = plugins if isinstance(plugins, list) else [plugins] if plugins else []
    named = any(isinstance(plugin, ClusterEnvironment) for plugin in given)
    if not named and launch.kind in ("own", "hand") and SLURMEnvironment.detect():
        return [*given, LightningEnvironment()]
    return given


def file_listing(place: Path) -> list[Any]:
    """Return the files and sizes in a run folder or of a checkpoint, and the text of its lock."""
    files = [place] if place.is_file() else [*place.glob("*.ckpt"), *place.glob("*/*.ckpt")]
    lock = place / ".lock"
    return [
        sorted([file.name, file.stat().st_size] for file in files),
        lock.read_text(encoding="utf-8") if lock.is_file() else None,
    ]


class Trainer(PatchedTrainer):
    """Lightning's Trainer over one endless epoch, intervals in optimizer steps."""

    # Lightning sets these without declaring them, or declares a wider type.
    callbacks: list[Callback]
    datamodule: LMDataModule
    lightning_module: LMModule  # pyright: ignore[reportIncompatibleVariableOverride]
    log_every_n_steps: int

    def __init__(
        self,
        *,
        precision: Precision | int = "auto",
        accelerator: str = "auto",
        strategy: str | Strategy = "auto",
        max_steps: int = -1,
        max_epochs: int = -1,
        max_time: str | timedelta | dict[str, int] | None = None,
        accumulate_grad_batches: int = 1,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
        val_check_interval: int = 100,
        check_val_every_n_epoch: int | None = None,
        limit_train_batches: int | float | None = None,
        limit_val_batches: int | float | None = None,
        overfit_batches: int | float = 0.0,
        log_every_n_steps: int = 10,
        reload_dataloaders_every_n_epochs: int = 0,
        use_distributed_sampler: bool = False,
        fast_dev_run: int | bool = False,
        num_sanity_val_steps: int = 0,
        barebones: bool = False,
        logger: Logger | list[Logger] | bool | None = None,
        enable_checkpointing: bool | None = None,
        enable_progress_bar: bool = False,
        enable_model_summary: bool = False,
        enable_autolog_hparams: bool = False,
        default_root_dir: str = "runs/default",
        peer_timeout: float | None = None,
        callbacks: list[Callback] | Callback | None = None,
        plugins: list[Plugin] | Plugin | None = None,
        **kwargs: Any,
    ) -> None:
        """Check the arguments and apply the defaults.

        Args:
            precision: auto is bf16-mixed where the hardware has it, 16-mixed on older CUDA cards,
                else 32-true.
            accelerator: auto, cpu, gpu or mps.
            strategy: auto, or ddp for several devices.
            max_steps: Length of the run in optimizer steps; else data.total_tokens or data.epochs.
            max_epochs: Not used: data.epochs is.
            max_time: Budget of one start, as DD:HH:MM:SS, from its first moment: preparing, loading
                and compiling count. The run stops at the first step edge after it.
            accumulate_grad_batches: Micro-batches of a device in an optimizer step.
            gradient_clip_val: Largest total L2 norm of the gradient; unset: no clipping.
            gradient_clip_algorithm: Only norm.
            val_check_interval: Optimizer steps between validations.
            check_val_every_n_epoch: Not used: val_check_interval is.
            limit_train_batches: Not used: max_steps is.
            limit_val_batches: 0: no validation; else micro-batches of a validation over all
                devices, so that another micro-batch validates on other sequences; unset:
                data.val_sequences.
            overfit_batches: Not used.
            log_every_n_steps: Optimizer steps between logged steps.
            reload_dataloaders_every_n_epochs: Not used.
            use_distributed_sampler: Not used: the data order gives each rank its own.
            fast_dev_run: Train so many optimizer steps and leave nothing behind.
            num_sanity_val_steps: Not used.
            barebones: Not used.
            logger: Unset: TensorBoard and metrics.csv; false: none.
            enable_checkpointing: Always on.
            enable_progress_bar: Lightning's bar, beside the line of metrics.
            enable_model_summary: Lightning's table of layers.
            enable_autolog_hparams: Lightning's log of hyperparameters; ours is config.yaml.
            default_root_dir: Folder of the run.
            peer_timeout: Seconds that a process waits for the others, at the start and in every
                step, before the run ends with an error; unset: 1800. A network that is cut may
                end the run earlier, by the limits of TCP.
            callbacks: More callbacks, by class path.
            plugins: Plugins of Lightning, by class path.
        """
        # By an index: jsonargparse would take the type of an argument from kwargs.get.
        others = {"num_nodes": 1, "devices": "auto", "profiler": None, "min_steps": None}
        arguments = others | kwargs | locals()
        check_arguments(arguments)
        check_devices(accelerator, arguments["devices"])
        check_peer_timeout(peer_timeout)
        # TF32 stays off, also where an environment variable of a container turns it on.
        torch.set_float32_matmul_precision("highest")
        # Budget of one start. Lightning's counts the time of all starts together and stops inside
        # an accumulation window.
        self.max_seconds = seconds_of(max_time)
        if fast_dev_run:
            # Lightning's own would count micro-batches.
            max_steps = val_check_interval = int(fast_dev_run)
            logger = False
            limit_val_batches = 0 if limit_val_batches == 0 else int(fast_dev_run)
        self.asked_precision = precision
        launch = read_launch()
        super().__init__(
            precision=choose_precision(  # pyright: ignore[reportArgumentType]
                str(precision), device_type(accelerator)
            ),
            accelerator=accelerator,
            strategy=strategy,
            max_steps=max_steps,
            max_epochs=max_epochs,
            accumulate_grad_batches=accumulate_grad_batches,
            gradient_clip_val=gradient_clip_val,
            val_check_interval=val_check_interval * accumulate_grad_batches,
            check_val_every_n_epoch=None,
            limit_val_batches=limit_val_batches,
            log_every_n_steps=log_every_n_steps,
            use_distributed_sampler=False,
            num_sanity_val_steps=0,
            logger=logger,
            enable_progress_bar=enable_progress_bar,
            enable_model_summary=enable_model_summary,
            enable_autolog_hparams=enable_autolog_hparams,
            default_root_dir=default_root_dir,
            callbacks=callbacks,
            plugins=with_environment(plugins, launch) or None,
            **kwargs,
        )
        self.fast_dev_run = int(fast_dev_run)
        self._cpu_group: Any = None
        self._check_processes(launch)
        self.peer_timeout = set_peer_timeout(self.strategy, peer_timeout)
        self.peers = self._join_peers(launch) if self.world_size > 1 else None
        self.peer_facts: Callable[[], dict[str, Any]] = dict
        self.start_elsewhere: Callable[[], None] = lambda: None
        disable_signal_handlers(self)
        replace_rank_observer()

    def _check_processes(self, launch: Launch) -> None:
        """Refuse a strategy that would train on other devices than requested."""
        devices, nodes = requested_devices(self)
        known = (LightningEnvironment, SLURMEnvironment, TorchElasticEnvironment)
        if type(cluster_environment(self)) in known:
            check_processes(launch, devices, nodes)
        if self.world_size != devices * nodes:
            raise ValueError(
                f"trainer.strategy is {type(self.strategy).__name__}, which trains on "
                f"{self.world_size} of the {devices} × {nodes} devices that trainer.devices × "
                "trainer.num_nodes asks for; pass --trainer.strategy ddp, or --trainer.devices 1"
            )
        if launch.kind == "own":
            os.environ.pop("RANK", None)  # the processes that this one starts would inherit it

    def _join_peers(self, launch: Launch) -> Peers:
        """Return the channel to the other processes, which also carries errors at the start."""
        environment = cluster_environment(self)
        address = (environment.main_address, environment.main_port)
        peers = Peers(*address, self.global_rank, self.world_size, hint(launch))
        if launch.kind != "own" or self.num_nodes > 1:
            Peers.current = peers
        else:
            # The other ranks are children of this one: on a busy machine their imports take long.
            peers.hint, peers.silence = "this process has started them", REPEAT
        return peers

    def before_run(self, ckpt_path: str | None) -> str | None:
        """Wait for the other processes, and return the checkpoint that rank 0 resumes from."""
        if self.peers is None:
            return ckpt_path
        self.peers.children = getattr(self.strategy.launcher, "procs", [])
        limit = self.peer_timeout.total_seconds()
        self.peers.meet(limit, self.peer_facts())
        chosen = None if ckpt_path is None else str(ckpt_path)
        path = self.peers.decide("ckpt_path", chosen, limit)
        if self.state.fn == "fit" and not self.fast_dev_run:
            root = Path(self.default_root_dir)
            self.peers.agree_on_view(lambda: file_listing(root), str(root), limit)
        if path is not None and Path(path).suffix == ".ckpt":
            self.peers.agree_on_view(lambda: file_listing(Path(path)), path, limit)
        if path is None and self.global_rank > 0 and self.state.fn == "fit":
            self.start_elsewhere()
        return path

    def after_loop(self) -> None:
        """Make up a validation that is due where no step is left: Lightning enters no loop then."""
        for callback in self.checkpoint_callbacks:
            make_up: Any = getattr(callback, "make_up_validation", None)
            if make_up is not None:
                make_up(self)

    def largest(self, number: int) -> int:
        """Return the largest of all ranks' numbers, reduced on the CPU: no wait for a GPU."""
        if self.world_size == 1:
            return number
        if self._cpu_group is None:
            self._cpu_group = torch.distributed.new_group(backend="gloo", timeout=self.peer_timeout)
        largest = torch.tensor(number)
        torch.distributed.all_reduce(largest, torch.distributed.ReduceOp.MAX, self._cpu_group)
        return int(largest)

    def fit(
        self,
        model: LightningModule,
        train_dataloaders: Any = None,
        val_dataloaders: Any = None,
        datamodule: LightningDataModule | None = None,
        ckpt_path: str | None = None,
        weights_only: bool | None = None,
    ) -> None:
        """Train; the same command resumes after a kill at any moment.

        Args:
            ckpt_path: What to resume from: last (the newest intact checkpoint of the run folder, or
                a first start), best, a run folder or a checkpoint file. Unset: a new run in an
                empty folder.
        """
        super().fit(model, train_dataloaders, val_dataloaders, datamodule, ckpt_path, weights_only)

    def validate(
        self,
        model: LightningModule | None = None,
        dataloaders: Any = None,
        ckpt_path: str | None = None,
        verbose: bool = True,
        datamodule: LightningDataModule | None = None,
        weights_only: bool | None = None,
    ) -> Any:
        """Evaluate a checkpoint on the validation data of its run.

        Args:
            ckpt_path: What to evaluate: last (also when unset), best, a run folder or a checkpoint
                file.
        """
        return super().validate(model, dataloaders, ckpt_path, verbose, datamodule, weights_only)
