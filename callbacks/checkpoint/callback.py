"""AtomicCheckpoint: when a run is saved, which checkpoints are kept, and what they hold."""

import contextlib
import functools
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.callbacks import Checkpoint

from callbacks.checkpoint.files import FOLDER, checkpoints, damage, file_name, reason
from callbacks.checkpoint.plugin import AtomicCheckpointIO
from callbacks.checkpoint.recovery import after_non_finite
from callbacks.checkpoint.resume import forget_best, recount, refuse_other_run
from callbacks.checkpoint.state import plain, random_states, restore_random_states
from callbacks.drill.kill_points import reach
from callbacks.loggers.metrics_csv import resume_logs, save_logs
from callbacks.processes.peers import is_lost
from callbacks.run.announce import announce
from callbacks.run.folder import contract
from callbacks.run.steps import at_step_edge, is_dry_run, validation_follows
from callbacks.run.trainer import Trainer
from data.system.atomic import TEMPORARY
from lm.finite import NonFiniteError
from lm.module import LMModule


def newest_name(folder: Path) -> str:
    """Return the part of an error about a failed save that names the newest checkpoint."""
    for _, path in checkpoints(folder)[:1]:
        return f"the newest checkpoint is {path.name}"
    return "there is no checkpoint yet"


def writer(trainer: Trainer) -> AtomicCheckpointIO:
    """Return the checkpoint plugin of a run."""
    io = trainer.strategy.checkpoint_io
    assert isinstance(io, AtomicCheckpointIO)
    return io


class AtomicCheckpoint(Checkpoint):
    """Saves and prunes checkpoints, and checks the one that a run resumes from."""

    def __init__(
        self,
        *,
        every_n_steps: int = 1000,
        every_minutes: float | None = None,
        keep_last: int = 3,
        keep_every: int | None = None,
    ) -> None:
        """Set when to save and what to keep.

        Args:
            every_n_steps: Optimizer steps between saves. The last step and each new best
                validation loss are saved too.
            every_minutes: Also save when this many minutes have passed since the last save.
            keep_last: Number of newest checkpoints to keep, beside the best by validation loss.
            keep_every: Keep every checkpoint whose step is a multiple of this, forever.
        """
        for name, value in (("every_n_steps", every_n_steps), ("keep_last", keep_last)):
            if value < 1:
                raise ValueError(f"checkpoint.{name} is {value}: must be at least 1")
        if keep_every is not None and keep_every < 1:
            raise ValueError(f"checkpoint.keep_every is {keep_every}: must be at least 1, or null")
        if every_minutes is not None and not every_minutes > 0:
            raise ValueError(f"checkpoint.every_minutes is {every_minutes}: must be above 0")
        self.every_n_steps = every_n_steps
        self.every_minutes = every_minutes
        self._now = time.monotonic
        self._saved_at = self._now()
        self.keep_last = keep_last
        self.keep_every = keep_every
        self.best: dict[str, float] = {}
        self._saved_step = -1
        self._validating = False
        self._validation_due_at = -1
        self._random_states: list[dict[str, Any]] = []
        self._states_before_validation: dict[str, Any] = {}
        self._kept_best: float | None = None
        self._failure: str | None = None  # of the latest write
        self.final_step = -1
        """Step of the run's last save, whose failure is reported by the error that ends the run."""
        self._diverged: NonFiniteError | None = None
        self._forget: str | None = None

    # Saving

    def setup(self, trainer: Trainer, pl_module: LMModule, stage: str) -> None:
        folder = Path(trainer.default_root_dir, FOLDER)
        if stage == "fit" and folder.exists() and not folder.is_dir():
            raise ValueError(
                f"{folder} is a file: checkpoints are written to a folder of that name; rename it, "
                "or give another trainer.default_root_dir"
            )
        trainer.strategy.checkpoint_io = AtomicCheckpointIO(
            trainer, lambda checkpoint: self.check(trainer, checkpoint)
        )

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LMModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if not at_step_edge(trainer, batch_idx):
            return
        # Only rank 0 knows; with several processes all end together at the next save.
        if self._diverged is not None and trainer.world_size == 1:
            raise self._diverged
        if validation_follows(trainer, batch_idx):
            # A validation draws random numbers when it starts, and an interrupted one starts again.
            self._states_before_validation = random_states()
            return
        if self._due(trainer):
            self.save_now(trainer)

    def on_validation_start(self, trainer: Trainer, pl_module: LMModule) -> None:
        self._validating = True

    def on_validation_end(self, trainer: Trainer, pl_module: LMModule) -> None:
        self._validating = False
        # A checkpoint of a step whose validation is due comes after it: a kill between the two
        # would lose the validation for good.
        if trainer.state.fn != "fit":
            return
        # A validation without a target has no loss.
        loss = pl_module.validation_metrics.get("val/loss", float("inf"))
        new_best = loss < self.best.get("loss", float("inf"))
        if new_best:
            self.best = {"loss": loss, "step": trainer.global_step}
        if new_best or self._due(trainer):
            self.save_now(trainer, verify=new_best)

    def on_train_end(self, trainer: Trainer, pl_module: LMModule) -> None:
        failure = self.wait(trainer)
        if self._saved_step != trainer.global_step > 0:
            self.save_now(trainer)
        elif failure and trainer.is_global_zero:
            # Not the current weights, which a callback may have replaced by an average.
            writer(trainer).write_again(self._after_write(trainer, verify=True))
        if failure := self.wait(trainer):
            raise RuntimeError(f"the last checkpoint could not be written: {failure}")

    def make_up_validation(self, trainer: Trainer) -> None:
        """Run the last validation of a run if a signal interrupted it."""
        last = trainer.global_step == trainer.max_steps
        if last and self._validation_due_at == trainer.max_steps and trainer.enable_validation:
            self._validation_due_at = -1
            resume_logs(trainer)
            trainer.validating = True
            trainer.fit_loop.epoch_loop.val_loop.run()
            trainer.training = True
            self.on_train_end(trainer, trainer.lightning_module)

    def _due(self, trainer: Trainer) -> bool:
        step = trainer.global_step
        if step % self.every_n_steps == 0 or step == trainer.max_steps or trainer.should_stop:
            return True
        if self.every_minutes is None:
            return False
        # Clocks differ between ranks: rank 0 decides for all.
        over = trainer.is_global_zero and self._now() - self._saved_at >= 60 * self.every_minutes
        return bool(trainer.largest(int(over)))

    def save_now(self, trainer: Trainer, verify: bool = False) -> None:
        """Start saving the state of the step just finished, unless it is saved already.

        Returns when the state is copied; `wait` returns when the file is on disk.
        """
        step = trainer.global_step
        if is_dry_run(trainer) or step == self._saved_step:
            return
        if trainer.world_size > 1:
            self.wait(trainer)
        # Metrics up to this step must survive a kill or power failure after it.
        save_logs(trainer)
        path = Path(trainer.default_root_dir, FOLDER, file_name(step))
        self._saved_step, self._saved_at = step, self._now()
        if step == trainer.max_steps:
            verify, self.final_step = True, step
        try:
            trainer.save_checkpoint(path)
        except (OSError, RuntimeError) as error:
            if is_lost(error):
                raise  # another process has ended, which ends the run
            self._saved_step = -1
            self._finish(path, verify, error)
            return
        if trainer.is_global_zero:
            writer(trainer).then(self._after_write(trainer, verify))

    def _after_write(
        self, trainer: Trainer, verify: bool
    ) -> Callable[[BaseException | None], None]:
        """Return the function to call with the error of the write in flight, or None."""
        step = trainer.global_step
        in_row = trainer.lightning_module.skipped_in_row
        return functools.partial(
            self._finish,
            Path(trainer.default_root_dir, FOLDER, file_name(step)),
            verify,
            best=self.best.get("step"),
            finite_until=step - in_row if in_row else None,
        )

    def wait(self, trainer: Trainer) -> str | None:
        """Wait for the write in flight; return its failure or None, the same on all ranks.

        Raises:
            NonFiniteError: the state to be saved is not finite.
        """
        writer(trainer).wait()
        failure, diverged = trainer.strategy.broadcast((self._failure, self._diverged))
        if diverged is not None:
            raise diverged
        return failure

    def _finish(
        self,
        path: Path,
        verify: bool,
        error: BaseException | None,
        best: float | None = None,
        finite_until: int | None = None,
    ) -> None:
        """Verify a finished write if requested, then remove expired checkpoints."""
        if isinstance(error, NonFiniteError):
            # Raised at the next step edge, in the thread that trains.
            self._diverged = error
        try:
            fault = reason(error) if error else damage(path) if verify else None
        except OSError as unread:
            fault = reason(unread)
        self._failure = f"{path}: {fault}; {newest_name(path.parent)}" if fault else None
        if self._diverged:
            return
        if self._failure:
            if path.name != file_name(self.final_step):
                announce(f"error: checkpoint not saved: {self._failure}")
            return
        reach("before retention")
        try:
            self._prune(path.parent, best, finite_until)
        except OSError as unkept:
            announce(f"warning: an older checkpoint could not be removed: {unkept}")

    def _prune(self, folder: Path, best: float | None, finite_until: int | None = None) -> None:
        """Remove expired checkpoints.

        Args:
            finite_until: Last step with a finite gradient, while updates are being skipped. The
                newest file from before it is kept: that step itself may have broken the weights.
        """
        held = checkpoints(folder)
        finite = [step for step, _ in held if finite_until is not None and step < finite_until][:1]
        # The previous best stays until the new best is on disk.
        if best in [step for step, _ in held]:
            self._kept_best = best
        for place, (step, path) in enumerate(held):
            forever = self.keep_every is not None and step % self.keep_every == 0
            kept = step in (self._kept_best, *finite) or forever
            if place >= self.keep_last and not kept and not path.is_dir():
                path.unlink(missing_ok=True)

    def on_exception(self, trainer: Trainer, pl_module: LMModule, exception: BaseException) -> None:
        if isinstance(exception, NonFiniteError) and exception.step and not is_dry_run(trainer):
            # The advice names a checkpoint, and the write in flight may add or remove one.
            with contextlib.suppress(Exception):
                writer(trainer).wait()
            root, lr = Path(trainer.default_root_dir), pl_module.optim_config.lr
            exception.add_note(after_non_finite(root, exception.step, lr, self.every_n_steps))

    # Contents

    def state_dict(self) -> dict[str, Any]:
        return {"best": dict(self.best)}

    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: LMModule, checkpoint: dict[str, Any]
    ) -> None:
        own = self._states_before_validation if self._validating else random_states()
        states: list[Any] = [own]
        if trainer.world_size > 1:
            states = [None] * trainer.world_size
            torch.distributed.all_gather_object(states, own)
        checkpoint["random_states"] = states
        checkpoint["contract"] = contract(trainer)
        checkpoint["validation_due"] = self._validating
        # Other callbacks and plugins have stored their state by now.
        for key, value in checkpoint.items():
            checkpoint[key] = plain(value, key)

    # Resuming

    def check(self, trainer: Trainer, checkpoint: dict[str, Any]) -> None:
        """Check that a checkpoint belongs to this run, and announce changed settings.

        Raises:
            ValueError: the model, the data, their order or the seed differ; lists every difference.
        """
        refuse_other_run(trainer, checkpoint)
        self._random_states = checkpoint["random_states"]

    def on_load_checkpoint(
        self, trainer: Trainer, pl_module: LMModule, checkpoint: dict[str, Any]
    ) -> None:
        if trainer.state.fn != "fit":
            return
        step, due = checkpoint["global_step"], checkpoint.get("validation_due", False)
        # A validation that was interrupted runs first, and the step is saved again after it.
        self._saved_step, self._validation_due_at = (-1, step) if due else (step, -1)
        recount(trainer, checkpoint, due)
        why = forget_best(trainer, checkpoint) if trainer.is_global_zero else None
        self._forget = trainer.strategy.broadcast(why)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.best = dict(state_dict["best"])
        if self._forget:
            announce(
                f"warning: {self._forget}, so it no longer counts: the best is looked for anew"
            )
            self.best = {}

    def on_train_start(self, trainer: Trainer, pl_module: LMModule) -> None:
        # A callback whose state cannot be saved is refused now, not at the first save.
        for callback in trainer.callbacks:
            plain(callback.state_dict(), f"callbacks.{callback.state_key}")
        # A start that is refused changes no file, and this start no longer can be.
        self._tidy(trainer)
        # Last, because the set-up of other parts draws random numbers.
        if trainer.global_rank < len(self._random_states):
            restore_random_states(self._random_states[trainer.global_rank])
        self._states_before_validation = random_states()

    def on_fit_end(self, trainer: Trainer, pl_module: LMModule) -> None:
        # A kill between the last write of a run and its pruning leaves one file too many.
        held = checkpoints(Path(trainer.default_root_dir))
        if held and held[0][0] == trainer.global_step == trainer.max_steps:
            self._tidy(trainer)

    def _tidy(self, trainer: Trainer) -> None:
        """Remove temporary files, and set aside checkpoints newer than the step resumed from.

        They are damaged or from an abandoned branch of the run. `last` would find them again, and
        pruning would count them as the newest.
        """
        folder, step = Path(trainer.default_root_dir, FOLDER), trainer.global_step
        if not trainer.is_global_zero or is_dry_run(trainer) or not folder.is_dir():
            return
        for stale in folder.glob(f"*{TEMPORARY}*"):
            stale.unlink(missing_ok=True)
        for newer, path in checkpoints(folder):
            if newer > step > 0:
                path.rename(path.with_name(f"{path.name}.set-aside"))
                announce(f"set aside {path}: newer than the step that the run goes on from")
        if step > 0:
            self._prune(folder, self.best.get("step"))
