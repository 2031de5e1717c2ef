"""The Trainer: Lightning's, counted in optimizer steps, with precision chosen for the hardware."""

import os
import re
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, cast, get_args

import torch
from lightning.fabric.plugins.environments.cluster_environment import ClusterEnvironment
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.fabric.plugins.environments.torchelastic import TorchElasticEnvironment
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback, LightningDataModule, LightningModule
from lightning.pytorch import Trainer as LightningTrainer
from lightning.pytorch.callbacks import Timer
from lightning.pytorch.loggers import Logger
from lightning.pytorch.plugins import CheckpointIO, LayerSync
from lightning.pytorch.plugins import Precision as PrecisionPlugin
from lightning.pytorch.strategies import DDPStrategy, Strategy, StrategyRegistry
from lightning.pytorch.strategies.launchers import subprocess_script
from lightning.pytorch.utilities import rank_zero_only

from callbacks.processes.launch import Launch, check_processes, read_launch
from callbacks.processes.parent import watch_ranks
from callbacks.processes.peers import REPEAT, Peers, hint

Precision = Literal[
    "auto", "bf16-mixed", "16-mixed", "32-true", "bf16-true", "16-true", "64-true",
    "bf16", "16", "32", "64",
]  # fmt: skip
Plugin = PrecisionPlugin | ClusterEnvironment | CheckpointIO | LayerSync
SHORT = {"bf16": "bf16-mixed", "16": "16-mixed", "32": "32-true", "64": "64-true"}

# Strategies that split the model itself save in ways of their own.
SHARDED = ("fsdp", "deepspeed", "modelparallel", "xla")


def has_bf16(device: str) -> bool:
    """Whether a device type computes in bf16 rather than emulating it."""
    if device == "cuda":
        return torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 0)
    if device == "cpu":
        able = torch.cpu.get_capabilities()
        return any(able.get(name) for name in ("amx_bf16", "avx512_bf16", "bf16"))
    return False


def choose_precision(asked: str, device: str) -> str:
    """Lightning's name of the precision to train in.

    Raises:
        ValueError: the asked one cannot run on the device as named.
    """
    asked = SHORT.get(asked, asked)
    if asked not in get_args(Precision):
        raise ValueError(
            f"trainer.precision is {asked}: it must be one of {', '.join(get_args(Precision))}"
        )
    if asked == "auto":
        if has_bf16(device):
            return "bf16-mixed"
        return "16-mixed" if device == "cuda" else "32-true"
    on_cuda = device == "cuda" and torch.cuda.is_available()  # else Lightning refuses it well
    if asked.startswith("bf16") and on_cuda and not has_bf16(device):
        raise ValueError(
            f"trainer.precision is {asked}: {torch.cuda.get_device_name()} has no bf16; use "
            "16-mixed (fp16), 32-true (fp32) or auto"
        )
    if asked.startswith("16") and device == "cpu":
        raise ValueError(
            f"trainer.precision is {asked}: fp16 needs a GPU; use bf16-mixed, 32-true or auto"
        )
    return asked


# What ends a line that stands open on the terminal, before another one is announced.
line_enders: list[Callable[[], None]] = []


@rank_zero_only
def announce(line: str) -> None:
    """Say something that the user should see once, on stderr."""
    for end_line in line_enders:
        end_line()
    print(line, file=sys.stderr, flush=True)


def at_step_edge(trainer: LightningTrainer, batch_idx: int) -> bool:
    """Whether this micro-batch was the last of its optimizer step."""
    return (batch_idx + 1) % trainer.accumulate_grad_batches == 0


def is_logged(trainer: LightningTrainer, step: int) -> bool:
    """Whether the figures of an optimizer step are logged: the first, every nth, the last."""
    every = cast(Any, trainer).log_every_n_steps
    return step % every == 0 or step in (1, trainer.max_steps)


def validation_follows(trainer: LightningTrainer, batch_idx: int) -> bool:
    """Whether validation runs right after this micro-batch."""
    every = trainer.val_check_batch
    return trainer.enable_validation and every is not None and (batch_idx + 1) % every == 0


def is_dry_run(trainer: LightningTrainer) -> bool:
    """Whether the run is to leave nothing behind."""
    return bool(cast(Any, trainer).fast_dev_run)


STRATEGIES = ("auto", *StrategyRegistry.available_strategies())
ACCELERATORS = ("auto", "cpu", "gpu", "cuda", "mps")


def is_devices(value: Any) -> bool:
    """Whether a value is a number of devices, their numbers, or stands for all of them."""
    if isinstance(value, list):
        return bool(value) and all(number >= 0 for number in value)
    return bool(re.fullmatch(r"auto|-1|0*[1-9]\d*|\d+(,\d+)*,\d*", str(value).replace(" ", "")))


def check_devices(accelerator: str, devices: Any) -> None:
    """Refuse devices that this machine, or a CPU, does not have.

    Raises:
        ValueError: names the argument, the value found, the rule and the way out.
    """
    device = device_type(accelerator)
    there = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    if not there.get(device, accelerator != "gpu"):
        raise ValueError(
            f"trainer.accelerator is {accelerator}: this machine has none that torch "
            f"{torch.__version__} can use; pass auto or cpu"
        )
    if device == "cpu" and (isinstance(devices, list) or re.search("-|,", str(devices))):
        raise ValueError(
            f"trainer.devices is {devices}: on CPUs it must be auto or a number of processes "
            "above 0; pass --trainer.devices 1"
        )
    count = torch.cuda.device_count()
    text = str(devices).strip("[] ,")
    listed = isinstance(devices, list) or "," in str(devices)
    asked = [int(number) for number in text.split(",")] if text[:1].isdecimal() else []
    if device == "cuda" and asked and (max(asked) >= count if listed else asked[0] > count):
        raise ValueError(
            f"trainer.devices is {devices}: this machine has {count} GPUs"
            + (f", numbered from 0 to {count - 1}" if listed else "")
            + "; pass --trainer.devices auto for all"
        )


# What an argument may be, and why not something else.
PROMISES: tuple[tuple[str, Callable[[Any], bool], str], ...] = (
    (
        "max_epochs",
        lambda value: value == -1,
        "to Lightning a run is one endless epoch; give its length by trainer.max_steps, "
        "data.total_tokens or data.epochs",
    ),
    (
        "limit_train_batches",
        lambda value: value is None or (isinstance(value, float) and value == 1.0),
        "it would change which data a step sees; shorten the run by trainer.max_steps",
    ),
    (
        "overfit_batches",
        lambda value: not value,
        "it would change which data a step sees; shorten the run by trainer.max_steps",
    ),
    (
        "limit_val_batches",
        lambda value: value is None or value in (0, 1.0) or (isinstance(value, int) and value > 0),
        "it must be 0 for no validation, a number of micro-batches, or null; data.val_sequences "
        "bounds a validation by sequences",
    ),
    (
        "gradient_clip_algorithm",
        lambda value: value in (None, "norm"),
        "gradients are clipped by their total norm only; leave it out",
    ),
    (
        "gradient_clip_val",
        lambda value: value is None or value > 0,
        "it must be above 0; null turns clipping off",
    ),
    (
        "reload_dataloaders_every_n_epochs",
        lambda value: value == 0,
        "it would restart the data order; leave it out",
    ),
    (
        "use_distributed_sampler",
        lambda value: not value,
        "the data order gives each rank its own; leave it out",
    ),
    (
        "check_val_every_n_epoch",
        lambda value: value is None,
        "intervals count optimizer steps; use trainer.val_check_interval",
    ),
    (
        "num_sanity_val_steps",
        lambda value: value == 0,
        "the data is checked at the start anyway; leave it out",
    ),
    (
        "enable_checkpointing",
        lambda value: value is not False,
        "a run that cannot resume is not ours; a trial run is trainer.fast_dev_run",
    ),
    ("barebones", lambda value: not value, "it turns off what makes a run resume; leave it out"),
    ("num_nodes", lambda value: value >= 1, "it must be at least 1; leave it out for one machine"),
    (
        "accelerator",
        lambda value: value in ACCELERATORS,
        "it must be one of " + ", ".join(ACCELERATORS),
    ),
    (
        "devices",
        lambda value: is_devices(value),
        "it must be a number above 0, auto or -1 for all, or a list of the numbers of GPUs",
    ),
    (
        "strategy",
        lambda value: not any(name in str(value).lower() for name in SHARDED),
        "sharded strategies cannot be resumed exactly yet; use auto or ddp",
    ),
    (
        "strategy",
        lambda value: "spawn" not in str(value).lower(),
        "spawned processes would need a pickled Trainer; use auto or ddp",
    ),
    (
        "strategy",
        lambda value: not isinstance(value, str) or value in STRATEGIES,
        "it must be auto, ddp, or a class, written as class_path: DDPStrategy",
    ),
    *(
        (name, lambda value: value >= 1, "it must be at least 1")
        for name in ("accumulate_grad_batches", "val_check_interval", "log_every_n_steps")
    ),
    ("fast_dev_run", lambda value: value >= 0, "it must be 0 or more optimizer steps"),
)


def keep_promises(arguments: dict[str, Any]) -> None:
    """Refuse Trainer arguments that would break what this project promises.

    Raises:
        ValueError: names the argument, the value found, the rule and the way out.
    """
    for name, allowed, rule in PROMISES:
        if not allowed(arguments[name]):
            raise ValueError(f"trainer.{name} is {arguments[name]}: {rule}")


def view(place: Path) -> list[Any]:
    """What a process sees of a run folder or a checkpoint: files and sizes, and the lock's text."""
    files = [place] if place.is_file() else [*place.glob("*.ckpt"), *place.glob("*/*.ckpt")]
    lock = place / ".lock"
    return [
        sorted([file.name, file.stat().st_size] for file in files),
        lock.read_text(encoding="utf-8") if lock.is_file() else None,
    ]


class Trainer(LightningTrainer):
    """Lightning's Trainer over one endless epoch, with every interval in optimizer steps."""

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
        """Check the arguments against what the project promises.

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
            enable_progress_bar: Lightning's bar, beside the line of figures.
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
        arguments = {"num_nodes": 1, "devices": "auto"} | kwargs | locals()
        keep_promises(arguments)
        check_devices(accelerator, arguments["devices"])
        # fp32 is fp32, also where an environment variable of a container turns TF32 on.
        torch.set_float32_matmul_precision("highest")
        # A start's own budget; Lightning's would count the time of all starts together and stop
        # inside an accumulation window.
        try:
            self.max_seconds = Timer(cast(Any, max_time)).time_remaining()
        except (MisconfigurationException, TypeError, OverflowError) as error:
            raise ValueError(
                f"trainer.max_time is {max_time}: it must be DD:HH:MM:SS, as in 00:12:00:00"
            ) from error
        if self.max_seconds is not None and self.max_seconds <= 0:
            raise ValueError(f"trainer.max_time is {max_time}: it must be above 0")
        if fast_dev_run:
            # Lightning's own would count micro-batches.
            max_steps = val_check_interval = int(fast_dev_run)
            logger = False
            limit_val_batches = 0 if limit_val_batches == 0 else int(fast_dev_run)
        if peer_timeout is not None and not 0 < peer_timeout < 1e8:
            raise ValueError(
                f"trainer.peer_timeout is {peer_timeout}: it must be a number of seconds above 0; "
                "leave it out for 1800"
            )
        self.asked_precision = precision
        launch = read_launch()
        plugins = plugins if isinstance(plugins, list) else [plugins] if plugins else []
        given = any(isinstance(plugin, ClusterEnvironment) for plugin in plugins)
        if not given and launch.kind in ("own", "hand") and SLURMEnvironment.detect():
            # Lightning would take SLURM for the launcher wherever SLURM_NTASKS is set.
            plugins = [*plugins, LightningEnvironment()]
        super().__init__(
            precision=cast(Any, choose_precision(str(precision), device_type(accelerator))),
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
            plugins=plugins or None,
            **kwargs,
        )
        self._check_processes(launch)
        self.peers: Peers | None = None
        self.peer_facts: Callable[[], dict[str, Any]] = dict
        self.start_elsewhere: Callable[[], None] = lambda: None
        self._set_peer_timeout(peer_timeout)
        if self.world_size > 1:
            self._know_peers(launch)
        self.fast_dev_run = int(fast_dev_run)
        self._cpu_group: Any = None
        self._leave_signals_alone()

    def _check_processes(self, launch: Launch) -> None:
        """Refuse processes and strategies that would train on other devices than asked for."""
        connector = cast(Any, self._accelerator_connector)
        devices, nodes = len(connector._parallel_devices), connector._num_nodes_flag
        environment = connector.cluster_environment
        known = (LightningEnvironment, SLURMEnvironment, TorchElasticEnvironment)
        if type(environment) in known:
            check_processes(launch, devices, nodes)
        if self.world_size != devices * nodes:
            raise ValueError(
                f"trainer.strategy is {type(self.strategy).__name__}, which trains on "
                f"{self.world_size} of the {devices} × {nodes} devices that trainer.devices × "
                "trainer.num_nodes asks for; pass --trainer.strategy ddp, or --trainer.devices 1"
            )
        if launch.kind == "own":
            os.environ.pop("RANK", None)  # a leftover that the processes it starts would inherit

    def _set_peer_timeout(self, seconds: float | None) -> None:
        """Set one limit for all waits; a strategy that was given as an object may bring its own."""
        strategy = cast(Any, self.strategy)
        if seconds is not None and isinstance(strategy, DDPStrategy):
            strategy._timeout = timedelta(seconds=seconds)
        self.peer_timeout: timedelta = getattr(strategy, "_timeout", None) or timedelta(
            seconds=1800
        )

    def _know_peers(self, launch: Launch) -> None:
        """Note where the other processes are met; an error before that is told to them there."""
        environment = cast(Any, self._accelerator_connector).cluster_environment
        place = (environment.main_address, environment.main_port)
        self.peers = Peers(*place, self.global_rank, self.world_size, hint(launch))
        if launch.kind != "own" or self.num_nodes > 1:
            Peers.current = self.peers
        else:
            # This process starts them: imports take their time on a busy machine.
            self.peers.hint, self.peers.silence = "this process has started them", REPEAT

    def _meet(self, peers: Peers, ckpt_path: Any) -> Any:
        """Wait for the other processes, and return what rank 0 resumes from."""
        peers.children = getattr(self.strategy.launcher, "procs", [])
        limit = self.peer_timeout.total_seconds()
        peers.meet(limit, self.peer_facts())
        path = peers.decide("ckpt_path", None if ckpt_path is None else str(ckpt_path), limit)
        if self.state.fn == "fit" and not is_dry_run(self):
            root = Path(self.default_root_dir)
            peers.agree_on_view(lambda: view(root), str(root), limit)
        if path is not None and Path(path).suffix == ".ckpt":
            peers.agree_on_view(lambda: view(Path(path)), path, limit)
        if path is None and self.global_rank > 0 and self.state.fn == "fit":
            self.start_elsewhere()
        return path

    def _run(self, model: Any, ckpt_path: Any = None, weights_only: bool | None = None) -> Any:
        if self.peers is not None:
            ckpt_path = self._meet(self.peers, ckpt_path)
        return super()._run(model, ckpt_path, weights_only)

    def _leave_signals_alone(self) -> None:
        # Lightning's handlers save inside an accumulation window, and ask all ranks in every
        # micro-batch, in vain where a child gets the signal. `callbacks/signals.py` does it.
        self._signal_connector.register_signal_handlers = lambda: None
        self.fit_loop.epoch_loop._broadcast_sigterm_tensor = lambda: None
        # Lightning's observer kills this process where another one ends, and says nothing of use.
        cast(Any, subprocess_script)._launch_process_observer = watch_ranks

    def _run_stage(self) -> Any:
        result = super()._run_stage()
        # Lightning enters no loop when no step is left, not even for a validation that is due.
        for callback in self.checkpoint_callbacks:
            if hasattr(callback, "make_up_validation"):
                cast(Any, callback).make_up_validation(self)
        return result

    def largest(self, number: int) -> int:
        """Largest of all ranks' numbers; they agree over the CPU, which waits for no GPU."""
        if self.world_size == 1:
            return number
        if self._cpu_group is None:
            self._cpu_group = torch.distributed.new_group(backend="gloo", timeout=self.peer_timeout)
        told = torch.tensor(number)
        torch.distributed.all_reduce(told, torch.distributed.ReduceOp.MAX, self._cpu_group)
        return int(told)

    def fit(  # pyright: ignore[reportIncompatibleMethodOverride]
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
            ckpt_path: What to resume from: last (the newest whole checkpoint of the run folder, or
                a first start), best, a run folder or a checkpoint file. Unset: a new run in an
                empty folder.
        """
        super().fit(model, train_dataloaders, val_dataloaders, datamodule, ckpt_path, weights_only)

    def validate(  # pyright: ignore[reportIncompatibleMethodOverride]
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


def device_type(accelerator: str) -> str:
    """Device type that Lightning will take for an accelerator's name."""
    if accelerator in ("gpu", "auto"):
        if torch.cuda.is_available():
            return "cuda"
        if torch.backends.mps.is_available():
            return "mps"
    return "cpu" if accelerator in ("auto", "gpu") else accelerator
