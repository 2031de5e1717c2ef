"""SIGTERM, SIGUSR1, Ctrl-C and the end of max_time: one agreed stop between two steps."""

import signal
import time
from collections.abc import Callable
from types import FrameType
from typing import Any, cast

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint

from callbacks.checkpoint import AtomicCheckpoint
from callbacks.trainer import announce, at_step_edge, validation_follows

# Stands for the end of `trainer.max_time` among the signals; nobody sends it.
TIME_IS_UP = signal.SIGALRM


class StopSignals(Checkpoint):
    """Finishes the step, saves, and leaves with the signal's exit code.

    A second signal leaves at once. The end of `trainer.max_time` leaves with 0. A `Checkpoint`
    by type, so that it runs after the one that saves.
    """

    def __init__(
        self, exit_codes: dict[signal.Signals, int], now: Callable[[], float] = time.monotonic
    ) -> None:
        self._exit_codes = exit_codes
        self._now = now
        self._deadline = float("inf")
        self._received = 0
        self._before: dict[signal.Signals, Any] = {}

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._received = 0
        budget = cast(Any, trainer).max_seconds
        self._deadline = float("inf") if budget is None else self._now() + budget
        # From here on there is something to save; before, a signal leaves at once.
        self._before = {number: signal.signal(number, self._handle) for number in self._exit_codes}

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._received:
            raise SystemExit(self._exit_codes[signal.Signals(self._received)])
        self._received = number

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if at_step_edge(trainer, batch_idx) and not validation_follows(trainer, batch_idx):
            self._leave_if_asked(trainer)

    def on_validation_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        # A validation may take longer than the grace before a SIGKILL. What is saved here says
        # that it is still due.
        if trainer.state.fn == "fit":
            self._leave_if_asked(trainer, by_the_clock=False)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.state.fn == "fit":
            self._leave_if_asked(trainer)

    def _leave_if_asked(self, trainer: Trainer, by_the_clock: bool = True) -> None:
        number = self._received
        # A validation longer than the budget would else begin anew at every start.
        if not number and by_the_clock and self._now() >= self._deadline:
            number = TIME_IS_UP
        number = cast(Any, trainer).largest(number)
        if not number:
            return
        for callback in trainer.checkpoint_callbacks:
            if isinstance(callback, AtomicCheckpoint):
                callback.save_now(trainer)
                if failure := callback.wait(trainer):
                    raise RuntimeError(
                        f"stopped at step {trainer.global_step}, not saved: {failure}"
                    )
        # No rank may leave while another still writes: who started it would end it.
        trainer.strategy.barrier()
        reason = "time is up" if number == TIME_IS_UP else signal.Signals(number).name
        announce(
            f"\n{reason}: saved at step {trainer.global_step} of {trainer.max_steps}; "
            "the same command goes on from here"
        )
        # Another rank's code is for the one that started it, which kills all ranks on any but 0.
        code = self._exit_codes.get(signal.Signals(number), 0)
        raise SystemExit(code if trainer.is_global_zero else 0)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}
