"""Optimizer steps: which micro-batch ends one, which are logged or validated."""

from callbacks.run.trainer import Trainer


def at_step_edge(trainer: Trainer, batch_idx: int) -> bool:
    """Whether this micro-batch was the last of its optimizer step."""
    return (batch_idx + 1) % trainer.accumulate_grad_batches == 0


def is_logged(trainer: Trainer, step: int) -> bool:
    """Whether an optimizer step is logged: the first, every nth and the last are."""
    return step % trainer.log_every_n_steps == 0 or step in (1, trainer.max_steps)


def validation_follows(trainer: Trainer, batch_idx: int) -> bool:
    """Whether validation runs right after this micro-batch."""
    every = trainer.val_check_batch
    return trainer.enable_validation and every is not None and (batch_idx + 1) % every == 0


def is_dry_run(trainer: Trainer) -> bool:
    """Whether the run writes no files (trainer.fast_dev_run)."""
    return bool(trainer.fast_dev_run)
