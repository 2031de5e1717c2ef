"""Metrics of each logged step: to the loggers, and as one console line."""

import shutil
import sys
from typing import Any, Protocol, TextIO, runtime_checkable

from lightning.pytorch import Callback

from callbacks.loggers.metrics_csv import MetricsCSV, resume_logs
from callbacks.processes.console import Console
from callbacks.run.announce import line_enders
from callbacks.run.folder import contract
from callbacks.run.steps import at_step_edge, is_dry_run, is_logged
from callbacks.run.trainer import Trainer
from lm.module import LMModule

NOT_VALIDATED = (
    "no sample of the validation has a target, so there is no validation loss; raise "
    "trainer.limit_val_batches or prepare other validation data"
)

# Checksums for comparing runs; metrics.csv only, because they make no curve.
TRACES = ("data/rows_crc32",)


@runtime_checkable
class StepMetrics(Protocol):
    """A callback that adds metrics to each logged step."""

    def step_metrics(self, trainer: Trainer) -> dict[str, float]:
        """Return metrics by name."""
        ...


@runtime_checkable
class Watcher(Protocol):
    """A callback that receives the metrics of each logged step and of each validation."""

    def watch(self, trainer: Trainer, metrics: dict[str, float]) -> None:
        """Receive metrics by name."""
        ...


def duration(seconds: float) -> str:
    """Return seconds as text: 45 s, 12 min, 3 h 05 min."""
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"


def console_line(step: int, max_steps: int, metrics: dict[str, float]) -> str:
    """Return a step's metrics as one line, without absent ones."""
    parts = [f"step {step:>{len(str(max_steps))}}/{max_steps}"]
    texts = {
        "train/loss": "loss {:.4f}",
        "val/loss": "val loss {:.4f}",
        "optim/lr": "lr {:.2e}",
        "optim/grad_norm": "grad norm {:.3f}",
        "optim/skipped_steps": "skipped {:.0f}",
        "throughput/tokens_per_sec": "{:,.0f} tokens/s",
        "throughput/mfu": "MFU {:.1%}",
    }
    parts += [text.format(metrics[name]) for name, text in texts.items() if name in metrics]
    if "time/eta_s" in metrics:
        parts.append(f"{duration(metrics['time/eta_s'])} left")
    return " · ".join(parts)


def validation_line(metrics: dict[str, float]) -> str:
    """Return validation metrics as one line."""
    ran_away = metrics.get("val/perplexity", 0) >= 1e9
    texts = {
        "val/loss": "val loss {:.4f}",
        "val/perplexity": "perplexity {:.3g}" if ran_away else "perplexity {:.2f}",
        "val/bits_per_byte": "{:.4f} bits per byte",
        "train/eval_loss": "training data in evaluation mode {:.4f}",
    }
    parts = [text.format(metrics[name]) for name, text in texts.items() if name in metrics]
    sources = {name: loss for name, loss in metrics.items() if name.startswith("val/loss/")}
    parts += [f"{name.removeprefix('val/loss/')} {loss:.4f}" for name, loss in sources.items()]
    return " · ".join(parts)


def start_lines(trainer: Trainer, how_compiled: str) -> list[str]:
    """Return the summary of a run: parameters, device, batch arithmetic, length."""
    groups = trainer.optimizers[0].param_groups
    counts = [sum(p.numel() for p in group["params"]) for group in groups]
    decayed = ", ".join(
        f"{count:,} in {len(group['params'])} tensors with weight decay "
        f"{group.get('weight_decay', 0):g}"
        for count, group in zip(counts, groups, strict=True)
    )
    asked = " (auto)" if trainer.asked_precision == "auto" else ""
    data = trainer.datamodule
    split = (data.micro_batch_size, trainer.accumulate_grad_batches, trainer.world_size)
    return [
        f"{sum(counts):,} parameters: {decayed}",
        f"{trainer.strategy.root_device.type}, precision {trainer.precision}{asked}, "
        f"{' × '.join(map(str, split))} = {data.global_batch_size} sequences "
        f"({data.tokens_per_step:,} tokens) a step, {trainer.max_steps:,} steps"
        + (f", {how_compiled}" if how_compiled else ""),
    ]


def refuse_old_name(callbacks: list[Callback]) -> None:
    """Refuse a callback whose metrics would be left out because their method has its old name.

    Raises:
        ValueError: names the callback.
    """
    for callback in callbacks:
        if hasattr(callback, "step_figures") and not isinstance(callback, StepMetrics):
            raise ValueError(
                f"trainer.callbacks has {type(callback).__name__} with a method step_figures: the "
                "method for metrics is step_metrics; rename it to step_metrics"
            )


class Progress(Callback):
    """Logs every `trainer.log_every_n_steps` optimizer steps, the first and the last one.

    On a terminal the console line updates in place and validations stay; elsewhere each is a
    plain line.
    """

    def __init__(self, stream: TextIO | None = None) -> None:
        self.stream = sys.stderr if stream is None else stream
        self._validation: dict[str, float] = {}
        self._open_line = 0
        self._trains = False
        self._loaded_step = 0

    def on_fit_start(self, trainer: Trainer, pl_module: LMModule) -> None:
        line_enders[:] = [self._close_line]
        refuse_old_name(trainer.callbacks)
        for line in start_lines(trainer, pl_module.how_compiled):
            self._say(trainer, line)

    def on_train_start(self, trainer: Trainer, pl_module: LMModule) -> None:
        self._trains = True
        resume_logs(trainer)
        if trainer.global_step == 0:
            place = "" if is_dry_run(trainer) else f" in {trainer.default_root_dir}"
            self._say(trainer, f"starting at step 0{place}")
            for logger in trainer.loggers:
                logger.log_hyperparams(contract(trainer))

    def on_load_checkpoint(
        self, trainer: Trainer, pl_module: LMModule, checkpoint: dict[str, Any]
    ) -> None:
        self._loaded_step = checkpoint["global_step"]

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LMModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        step = trainer.global_step
        if not (at_step_edge(trainer, batch_idx) and is_logged(trainer, step)):
            return
        # The module first: reading its metrics waits for the device, so the times are right.
        metrics = pl_module.step_metrics()
        metrics |= trainer.datamodule.step_metrics()
        for callback in trainer.callbacks:
            if isinstance(callback, StepMetrics):
                metrics |= callback.step_metrics(trainer)
        self._log(trainer, metrics)
        line = console_line(step, trainer.max_steps, metrics | self._validation)
        self._say(trainer, line, passing=step != trainer.max_steps)
        self._show_watchers(trainer, metrics)

    def on_validation_end(self, trainer: Trainer, pl_module: LMModule) -> None:
        metrics = pl_module.validation_metrics
        self._validation = {name: metrics[name] for name in ("val/loss",) if name in metrics}
        self._log(trainer, metrics)
        # Outside a fit the Trainer does not know the step of what it evaluates.
        step = trainer.global_step if trainer.state.fn == "fit" else self._loaded_step
        if "val/loss" in metrics:
            self._say(trainer, f"step {step} · {validation_line(metrics)}")
        elif trainer.state.fn == "fit":
            self._say(trainer, f"warning: step {step}: {NOT_VALIDATED}")
        else:
            raise RuntimeError(NOT_VALIDATED)
        self._show_watchers(trainer, metrics)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LMModule) -> None:
        # Lightning would ask an exhausted loader again and again, without end or message.
        if trainer.global_step < trainer.max_steps and not trainer.should_stop:
            raise RuntimeError(
                f"the data ended at step {trainer.global_step} of {trainer.max_steps}"
            )

    def on_fit_end(self, trainer: Trainer, pl_module: LMModule) -> None:
        step, last = trainer.global_step, trainer.max_steps
        if self._trains and is_dry_run(trainer):
            self._say(trainer, f"done: {step} steps of a dry run, which leaves nothing behind")
        elif self._trains and step == last:
            self._say(trainer, f"done: {step} steps in {trainer.default_root_dir}")
        elif self._trains:
            self._say(trainer, f"stopped at step {step} of {last}; the same command goes on")
        # Lightning prints nothing when no step is left to train.
        elif step > last:
            self._say(
                trainer,
                f"the run is at step {step}, past its last step {last}: nothing is left to train "
                "and no file is changed; raise trainer.max_steps to go on",
            )
        else:
            self._say(trainer, f"finished at step {step} of {last}")

    def on_exception(self, trainer: Trainer, pl_module: LMModule, exception: BaseException) -> None:
        self._close_line()

    def _log(self, trainer: Trainer, metrics: dict[str, float]) -> None:
        # In evaluation outside a fit the curve of the run must not be touched.
        if trainer.state.fn == "fit":
            curves = {name: value for name, value in metrics.items() if name not in TRACES}
            for logger in trainer.loggers:
                given = metrics if isinstance(logger, MetricsCSV) else curves
                logger.log_metrics(given, step=trainer.global_step)

    def _show_watchers(self, trainer: Trainer, metrics: dict[str, float]) -> None:
        if trainer.state.fn == "fit":
            for callback in trainer.callbacks:
                if isinstance(callback, Watcher):
                    callback.watch(trainer, metrics)

    def _say(self, trainer: Trainer, line: str, passing: bool = False) -> None:
        if not trainer.is_global_zero:
            return
        if passing and self.stream.isatty():
            if isinstance(self.stream, Console):
                self.stream.log.add(line)
            # A wrapped line could not be overwritten.
            line = line[: shutil.get_terminal_size().columns - 1]
            print(f"\r{line:<{self._open_line}}", end="", file=self.stream, flush=True)
            self._open_line = len(line)
        else:
            self._close_line()
            print(line, file=self.stream, flush=True)

    def _close_line(self) -> None:
        if self._open_line:
            print(file=self.stream, flush=True)
            self._open_line = 0
