"""Throughput: tokens/s, MFU, data wait, time left, and peak memory."""

import resource
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch import Callback

from callbacks.peak_flops import measured_peak_flops, peak_flops
from callbacks.run.announce import announce
from callbacks.run.steps import at_step_edge
from callbacks.run.trainer import Trainer
from lm.module import LMModule


class Throughput(Callback):
    """Tokens per second of training time, MFU, data wait, time left, and peak memory.

    The first step after a start is left out (it compiles), and so are validation and saving.
    """

    def __init__(
        self,
        *,
        peak_tflops: float | None = None,
        now: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Set the peak of the hardware.

        Args:
            peak_tflops: Dense TFLOP/s of one device in the precision of the run. Unset: known by
                the GPU's name, or measured on a CPU in a second at the start.
            now: Clock in seconds.
        """
        if peak_tflops is not None and not peak_tflops > 0:
            raise ValueError(f"throughput.peak_tflops is {peak_tflops}: must be above 0")
        self.peak = None if peak_tflops is None else peak_tflops * 1e12
        self._now = now
        self._mark: float | None = None
        self._first_step: tuple[int, float] | None = None
        self._steps, self._seconds = 0, 0.0
        self._waited, self._waited_before = 0.0, 0.0
        self._counted: tuple[int, float] = (0, 0.0)
        self._warned = False

    def on_fit_start(self, trainer: Trainer, pl_module: LMModule) -> None:
        device, precision = trainer.strategy.root_device, str(trainer.precision)
        if self.peak is not None:
            return
        if device.type == "cpu":
            self.peak = measured_peak_flops(precision)
            announce(f"peak of this CPU, measured: {self.peak / 1e12:.2f} TFLOP/s")
        elif device.type == "cuda":
            name = torch.cuda.get_device_name(device)
            self.peak = peak_flops(name, precision)
            if self.peak is None:
                announce(
                    f"no MFU: the peak of {name} in {precision} is not known; give the dense "
                    "TFLOP/s of one device by throughput.peak_tflops",
                )

    def on_train_start(self, trainer: Trainer, pl_module: LMModule) -> None:
        self._mark = self._first_step = None
        self._steps, self._seconds, self._waited = 0, 0.0, 0.0
        self._counted = (trainer.global_step, 0.0)

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LMModule, batch: Any, batch_idx: int
    ) -> None:
        if self._first_step is not None and self._mark is None:
            self._mark = self._now()
            self._waited_before = trainer.datamodule.seconds_waited

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LMModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if not at_step_edge(trainer, batch_idx):
            return
        if self._first_step is None:
            synchronize(trainer)  # queued work does not belong to later steps
        now, waited = self._now(), trainer.datamodule.seconds_waited
        if self._first_step is None:
            self._first_step = (trainer.global_step, now)
        if self._mark is not None:
            self._steps += 1
            self._seconds += now - self._mark
            self._waited += waited - self._waited_before
        self._mark, self._waited_before = now, waited

    def on_validation_start(self, trainer: Trainer, pl_module: LMModule) -> None:
        self.pause(trainer)

    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: LMModule, checkpoint: dict[str, Any]
    ) -> None:
        self.pause(trainer)

    def pause(self, trainer: Trainer) -> None:
        """Wait for the device, then stop the clock until the next micro-batch."""
        if self._mark is not None:
            synchronize(trainer)
            self._count_to_now()
            self._mark = None

    def _count_to_now(self) -> None:
        if self._mark is not None:
            now = self._now()
            self._seconds += now - self._mark
            self._mark = now

    def step_metrics(self, trainer: Trainer) -> dict[str, float]:
        """Return metrics of the steps since the last call."""
        # Progress has waited for the device already, so its queue is empty.
        self._count_to_now()
        metrics = memory(trainer.strategy.root_device)
        module = trainer.lightning_module
        source = trainer.datamodule
        targets = float(module.targets_seen)
        positions = (trainer.global_step - self._counted[0]) * source.tokens_per_step
        real = (targets - self._counted[1]) / max(positions, 1)
        self._counted = (trainer.global_step, targets)
        if self._steps and self._first_step is not None:
            rate = self._steps * source.tokens_per_step / self._seconds
            metrics["throughput/tokens_per_sec"] = rate
            if real < 1:
                metrics["throughput/targets_per_sec"] = rate * real
            metrics["throughput/data_wait"] = self._waited / self._seconds
            flops = rate * module.flops_per_token
            metrics["throughput/tflops_per_sec"] = flops / 1e12
            if self.peak is not None:
                metrics["throughput/mfu"] = mfu(flops, self.peak, trainer.world_size)
                self._warn_once(metrics["throughput/mfu"])
            step, start = self._first_step
            # Validation and saving count here, because they recur.
            per_step = (self._now() - start) / (trainer.global_step - step)
            metrics["time/eta_s"] = per_step * (trainer.max_steps - trainer.global_step)
        self._steps, self._seconds, self._waited = 0, 0.0, 0.0
        return metrics

    def _warn_once(self, share: float) -> None:
        if share > 1 and not self._warned:
            self._warned = True
            announce(
                f"warning: MFU is {share:.0%}, more than the hardware can do: the peak of one "
                "device is set too low; give the right one by throughput.peak_tflops",
            )


def mfu(flops_per_second: float, peak: float, devices: int) -> float:
    """Return model FLOP/s as a share (0 to 1) of the peak of all devices.

    Source: PaLM, arXiv:2204.02311, section 4.1.
    """
    return flops_per_second / (peak * devices)


def memory(device: torch.device) -> dict[str, float]:
    """Return peak GiB: allocated and reserved on a GPU, else resident in this process."""
    if device.type == "cuda":
        return {
            "memory/peak_gib": torch.cuda.max_memory_allocated(device) / 2**30,
            "memory/reserved_gib": torch.cuda.max_memory_reserved(device) / 2**30,
        }
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {"memory/peak_gib": peak / 2 ** (30 if sys.platform == "darwin" else 20)}


def synchronize(trainer: Trainer) -> None:
    """Wait for the work queued on a GPU."""
    if trainer.strategy.root_device.type == "cuda":
        torch.cuda.synchronize()


def pause_clock(trainer: Trainer) -> None:
    """Exclude the time up to the next step from training time."""
    for callback in trainer.callbacks:
        if isinstance(callback, Throughput):
            callback.pause(trainer)
