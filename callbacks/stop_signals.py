"""Stop signals: SIGTERM, SIGUSR1, Ctrl-C and max_time end a run between two steps."""

import os
import signal
import time
from collections.abc import Callable
from typing import Any

from lightning.pytorch import Callback
from lightning.pytorch.callbacks import Checkpoint, ProgressBar
from lightning.pytorch.utilities.model_helpers import is_overridden

from callbacks.checkpoint.callback import AtomicCheckpoint
from callbacks.processes.stop_requests import StopRequests, under_torchrun
from callbacks.run.announce import announce
from callbacks.run.steps import at_step_edge, validation_follows
from callbacks.run.trainer import Trainer
from callbacks.throughput import Throughput
from data.system.processes import STOP_SIGNALS
from lm.module import LMModule

BEGINNINGS = ("on_validation_start", "on_validation_epoch_start", "on_validation_batch_start")
# Stands for the end of `trainer.max_time` among the signals; nobody sends it.
TIME_IS_UP = signal.SIGALRM


def acts_in_validation(trainer: Trainer) -> str | None:
    """Return the name of a callback that may swap weights during a validation, or None.

    Weight averaging does so. A checkpoint written then would hold the averaged weights.
    """
    for callback in trainer.callbacks:
        watches = isinstance(callback, Checkpoint | ProgressBar | Throughput)
        if not watches and any(is_overridden(hook, callback, Callback) for hook in BEGINNINGS):
            return type(callback).__name__
    return None


class StopSignals(Checkpoint):
    """Finishes the step, saves, and exits with the signal's exit code.

    A second signal exits at once. The end of `trainer.max_time` exits with 0. A `Checkpoint`
    by type, so that it runs after the one that saves.
    """

    def __init__(self, stop: StopRequests, now: Callable[[], float] = time.monotonic) -> None:
        self._stop = stop
        self._now = now
        self._deadline = float("inf")
        self._mask: Any = None
        self._swaps: str | None = None  # what may hold other weights during a validation

    def on_fit_start(self, trainer: Trainer, pl_module: LMModule) -> None:
        # Also if no step is left: an interrupted validation may still run.
        self._swaps = acts_in_validation(trainer)

    def on_train_start(self, trainer: Trainer, pl_module: LMModule) -> None:
        budget = trainer.max_seconds
        # From the start of the process, as a time limit of a scheduler counts.
        self._deadline = float("inf") if budget is None else self._stop.began + budget
        if under_torchrun() and "SLURM_JOB_ID" in os.environ:
            handled = os.environ.get("TORCHELASTIC_SIGNALS_TO_HANDLE", "")
            if "SIGUSR1" not in handled:
                announce(
                    "warning: a SIGUSR1 of SLURM kills torchrun, and nothing is saved then; add "
                    "--signals-to-handle SIGTERM,SIGINT,SIGUSR1 to torchrun"
                )
        if self._swaps is not None:
            announce(
                "a stop request waits for the end of a validation, because "
                f"{self._swaps} acts in it"
            )

    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: LMModule, optimizer: Any
    ) -> None:
        # Before the first step nothing needs saving, so a signal exits at once: compiling may take
        # longer than the time until a SIGKILL.
        self._stop.saves = True

    def _hold(self) -> None:
        """Block the signals in this thread alone: a compiler that it starts must not die of them.

        Another thread receives them meanwhile.
        """
        if self._mask is None:
            self._mask = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)

    def _release(self) -> None:
        if self._mask is not None:
            signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)
            self._mask = None

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LMModule, batch: Any, batch_idx: int
    ) -> None:
        self._hold()

    def on_validation_batch_start(
        self,
        trainer: Trainer,
        pl_module: LMModule,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        self._hold()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LMModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._release()
        if at_step_edge(trainer, batch_idx) and not validation_follows(trainer, batch_idx):
            self._leave_if_asked(trainer)

    def on_validation_batch_end(
        self,
        trainer: Trainer,
        pl_module: LMModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        self._release()
        # A validation may take longer than the time until a SIGKILL. A checkpoint saved here
        # records that the validation is still due.
        if trainer.state.fn == "fit" and self._swaps is None:
            self._leave_if_asked(trainer, by_the_clock=False)

    def on_validation_end(self, trainer: Trainer, pl_module: LMModule) -> None:
        if trainer.state.fn == "fit":
            self._leave_if_asked(trainer)

    def _leave_if_asked(self, trainer: Trainer, by_the_clock: bool = True) -> None:
        number = self._stop.received
        # Otherwise a validation longer than the budget would start again at every start.
        if not number and by_the_clock and self._now() >= self._deadline:
            number = TIME_IS_UP
        number = trainer.largest(number)
        if not number:
            return
        for callback in trainer.checkpoint_callbacks:
            if isinstance(callback, AtomicCheckpoint):
                callback.final_step = trainer.global_step
                callback.save_now(trainer)
                if failure := callback.wait(trainer):
                    raise RuntimeError(
                        f"stopped at step {trainer.global_step}, not saved: {failure}"
                    )
        # A rank that exits while another writes would make the launcher end the other.
        trainer.strategy.barrier()
        reason = "time is up" if number == TIME_IS_UP else signal.Signals(number).name
        announce(
            f"\n{reason}: saved at step {trainer.global_step} of {trainer.max_steps}; "
            "the same command goes on from here"
        )
        # Lightning's launcher, in the first rank of a machine, kills all ranks where one that it
        # started ends with another code than 0. Everybody else needs to see the signal's.
        strategy: Any = trainer.strategy
        launched = (
            trainer.local_rank > 0 and not strategy.cluster_environment.creates_processes_externally
        )
        raise SystemExit(0 if launched else self._stop.code(number))

    def teardown(self, trainer: Trainer, pl_module: LMModule, stage: str) -> None:
        self._release()
        self._stop.saves = False
