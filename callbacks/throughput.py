"""How fast a run trains and how long it has to go."""

import resource
import sys
import time
from collections.abc import Callable
from typing import Any, cast

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from callbacks.trainer import at_step_edge


class Throughput(Callback):
    """Tokens a second over training time alone, time left, and peak memory.

    The first step after a start is left out (it compiles), and so are validation and saving.
    """

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self._now = now
        self._mark: float | None = None
        self._first_step: tuple[int, float] | None = None
        self._steps, self._seconds = 0, 0.0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._mark = self._first_step = None
        self._steps, self._seconds = 0, 0.0

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if self._first_step is not None and self._mark is None:
            self._mark = self._now()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if not at_step_edge(trainer, batch_idx):
            return
        now = self._now()
        if self._first_step is None:
            self._first_step = (trainer.global_step, now)
        if self._mark is not None:
            self._steps += 1
            self._seconds += now - self._mark
        self._mark = now

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._pause(trainer)

    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        self._pause(trainer)

    def _pause(self, trainer: Trainer) -> None:
        """Stop the clock until the next micro-batch, with the device's queue run dry."""
        if self._mark is not None:
            if trainer.strategy.root_device.type == "cuda":
                torch.cuda.synchronize()
            self._seconds += self._now() - self._mark
            self._mark = None

    def step_figures(self, trainer: Trainer) -> dict[str, float]:
        """Figures since the last call, for the steps between two logs."""
        figures = {"memory/peak_gib": peak_memory(trainer.strategy.root_device) / 2**30}
        if self._steps and self._first_step is not None:
            tokens = cast(Any, trainer).datamodule.tokens_per_step
            figures["throughput/tokens_per_sec"] = self._steps * tokens / self._seconds
            step, start = self._first_step
            # Validation and saving count here: they will come again.
            a_step = (self._now() - start) / (trainer.global_step - step)
            figures["time/eta_s"] = a_step * (trainer.max_steps - trainer.global_step)
        self._steps, self._seconds = 0, 0.0
        return figures


def peak_memory(device: torch.device) -> int:
    """Most bytes ever held: allocated on a GPU, else resident in this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
