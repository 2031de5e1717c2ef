"""The figures of each logged step: to the loggers, and as one line on the console."""

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

# Figures that tell two runs apart and make no curve: in metrics.csv alone.
TRACES = ("data/rows_crc32",)


@runtime_checkable
class StepFigures(Protocol):
    """A callback that has figures for a logged step."""

    def step_figures(self, trainer: Trainer) -> dict[str, float]:
        """Figures by metric name."""
        ...


@runtime_checkable
class Watcher(Protocol):
    """A callback that looks at the figures of each logged step and of each validation."""

    def watch(self, trainer: Trainer, figures: dict[str, float]) -> None:
        """See figures by metric name."""
        ...


def duration(seconds: float) -> str:
    """Seconds for people: 45 s, 12 min, 3 h 05 min."""
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"


def console_line(step: int, max_steps: int, figures: dict[str, float]) -> str:
    """Figures as one line; what is absent is left out."""
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
    parts += [text.format(figures[name]) for name, text in texts.items() if name in figures]
    if "time/eta_s" in figures:
        parts.append(f"{duration(figures['time/eta_s'])} left")
    return " · ".join(parts)


def validation_line(figures: dict[str, float]) -> str:
    """Validation figures as one line."""
    ran_away = figures.get("val/perplexity", 0) >= 1e9
    texts = {
        "val/loss": "val loss {:.4f}",
        "val/perplexity": "perplexity {:.3g}" if ran_away else "perplexity {:.2f}",
        "val/bits_per_byte": "{:.4f} bits per byte",
        "train/eval_loss": "training data in evaluation mode {:.4f}",
    }
    parts = [text.format(figures[name]) for name, text in texts.items() if name in figures]
    sources = {name: loss for name, loss in figures.items() if name.startswith("val/loss/")}
    parts += [f"{name.removeprefix('val/loss/')} {loss:.4f}" for name, loss in sources.items()]
    return " · ".join(parts)


def start_lines(trainer: Trainer, how_compiled: str) -> list[str]:
    """What a run is, before its first step: parameters, device, batch arithmetic, length."""
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
        # The module first: reading its figures waits for the device, so that times are true.
        figures = pl_module.step_metrics()
        figures |= trainer.datamodule.step_figures()
        for callback in trainer.callbacks:
            if isinstance(callback, StepFigures):
                figures |= callback.step_figures(trainer)
        self._log(trainer, figures)
        line = console_line(step, trainer.max_steps, figures | self._validation)
        self._say(trainer, line, passing=step != trainer.max_steps)
        self._show_watchers(trainer, figures)

    def on_validation_end(self, trainer: Trainer, pl_module: LMModule) -> None:
        figures = pl_module.validation_metrics
        self._validation = {name: figures[name] for name in ("val/loss",) if name in figures}
        self._log(trainer, figures)
        # Outside a fit the Trainer does not know the step of what it evaluates.
        step = trainer.global_step if trainer.state.fn == "fit" else self._loaded_step
        if "val/loss" in figures:
            self._say(trainer, f"step {step} · {validation_line(figures)}")
        elif trainer.state.fn == "fit":
            self._say(trainer, f"warning: step {step}: {NOT_VALIDATED}")
        else:
            raise RuntimeError(NOT_VALIDATED)
        self._show_watchers(trainer, figures)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LMModule) -> None:
        # Lightning would ask an exhausted loader again and again, for ever and without a word.
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
        # Lightning ends a run without any word when nothing is left to train.
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

    def _log(self, trainer: Trainer, figures: dict[str, float]) -> None:
        # In evaluation outside a fit the curve of the run must not be touched.
        if trainer.state.fn == "fit":
            curves = {name: value for name, value in figures.items() if name not in TRACES}
            for logger in trainer.loggers:
                given = figures if isinstance(logger, MetricsCSV) else curves
                logger.log_metrics(given, step=trainer.global_step)

    def _show_watchers(self, trainer: Trainer, figures: dict[str, float]) -> None:
        if trainer.state.fn == "fit":
            for callback in trainer.callbacks:
                if isinstance(callback, Watcher):
                    callback.watch(trainer, figures)

    def _say(self, trainer: Trainer, line: str, passing: bool = False) -> None:
        if not trainer.is_global_zero:
            return
        if passing and self.stream.isatty():
            if isinstance(self.stream, Console):
                self.stream.log.add(line)
            # A line that wraps could not be written over.
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
