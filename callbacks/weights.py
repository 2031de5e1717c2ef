"""Weights files and exported folders, beside the checkpoints."""

import os
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback

from callbacks.checkpoint.files import WEIGHTS
from callbacks.run.announce import announce
from callbacks.run.folder import contract
from callbacks.run.steps import at_step_edge, is_dry_run
from callbacks.run.trained import export_weights
from callbacks.run.trainer import Trainer
from callbacks.throughput import pause_clock
from data.system.atomic import TEMPORARY, replaced
from lm.module import LMModule
from lm.trained import step_of_weights

EXPORTS = "exports"


class Weights(Callback):
    """Writes weights alone, a third of a checkpoint, and Hugging Face folders."""

    def __init__(
        self, *, save_at_end: bool = True, export_every_n_steps: int | None = None
    ) -> None:
        """Set up the weights files.

        Args:
            save_at_end: Write weights.safetensors when training ends: enough to sample, export,
                evaluate or start another run with, but not to resume.
            export_every_n_steps: Write exports/step-00001000 every so many optimizer steps, as
                lightning export does; unset: never.
        """
        if export_every_n_steps is not None and export_every_n_steps < 1:
            raise ValueError(
                f"weights.export_every_n_steps is {export_every_n_steps}: must be at least 1, or "
                "null"
            )
        self.save_at_end, self.export_every_n_steps = save_at_end, export_every_n_steps
        self._trained = False

    def on_train_start(self, trainer: Trainer, pl_module: LMModule) -> None:
        self._trained = True
        self._sweep(trainer)

    def _sweep(self, trainer: Trainer) -> None:
        if trainer.is_global_zero and not is_dry_run(trainer):
            for stale in Path(trainer.default_root_dir).glob(f"*{TEMPORARY}*"):
                stale.unlink(missing_ok=True)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LMModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        every = self.export_every_n_steps
        if every is None or not at_step_edge(trainer, batch_idx) or is_dry_run(trainer):
            return
        if trainer.global_step % every == 0 and trainer.is_global_zero:
            pause_clock(trainer)
            self._export(trainer, pl_module)

    def on_fit_end(self, trainer: Trainer, pl_module: LMModule) -> None:
        # Not in on_train_end, which is not called in a run that was killed after its last step.
        if not self.save_at_end or not trainer.is_global_zero or is_dry_run(trainer):
            return
        root = Path(trainer.default_root_dir)
        if not self._trained:
            held = step_of_weights(root / WEIGHTS)
            if trainer.global_step != trainer.max_steps or held >= trainer.global_step:
                return
            self._sweep(trainer)
        try:
            with replaced(root / WEIGHTS) as file:
                self._write(trainer, pl_module, file)
        except Exception as error:  # the checkpoint exists anyway
            announce(f"warning: {root / WEIGHTS} not written: {error}")

    def _write(self, trainer: Trainer, pl_module: LMModule, file: Path) -> None:
        content = {"global_step": trainer.global_step, "contract": contract(trainer)}
        pl_module.write_weights(file, content)

    def _export(self, trainer: Trainer, pl_module: LMModule) -> None:
        root = Path(trainer.default_root_dir)
        folder = root / EXPORTS / f"step-{trainer.global_step:08d}"
        file = root / f".export{TEMPORARY}{os.getpid()}.safetensors"
        state = torch.random.get_rng_state()
        try:
            self._write(trainer, pl_module, file)
            lines = export_weights(file, folder)
        except Exception as error:  # training goes on
            announce(f"warning: {folder} not written: {error}")
        else:
            announce(f"exported {lines[0]}")
        finally:
            file.unlink(missing_ok=True)
            torch.random.set_rng_state(state)
