"""Resume: settings that must match the checkpoint, announced changes, positions in new units."""

from pathlib import Path
from typing import Any

from callbacks.checkpoint.files import FOLDER, file_name
from callbacks.run.announce import announce
from callbacks.run.folder import contract
from callbacks.run.trainer import Trainer

# A resumed run must agree in these and in what the datamodule refuses; other differences are
# announced, and the new value holds.
FIXED = ("model.config.", "seed_everything")
# Settings of the model that do not change its results.
FREE = ("model.config.activation_checkpointing",)
# Losses on other data, or on more of it, cannot be compared.
VALIDATION = "validation "


def refuse_other_run(trainer: Trainer, checkpoint: dict[str, Any]) -> None:
    """Compare a checkpoint's contract with this run's: differences are refused or announced.

    Raises:
        ValueError: the model, the data, their order or the seed differ; names every one.
    """
    if "contract" not in checkpoint:
        raise ValueError("the checkpoint has no contract: it was not made by fit")
    fits = trainer.state.fn == "fit"
    data = trainer.datamodule
    if fits:
        # First, because the length of the run, and so the schedule, depends on the position.
        data.load_state_dict(checkpoint[type(data).__qualname__])
    fixed = FIXED if fits else (*FIXED, "tokenizer fingerprint")
    old, new = checkpoint["contract"], contract(trainer)
    differ = [key for key in old if key in new and old[key] != new[key]]
    faults = [
        f"{key} was {old[key]} and is {new[key]} now"
        for key in differ
        if key.startswith(fixed) and key not in FREE
    ]
    if fits:
        faults += data.refused_changes(old)
    if faults:
        raise ValueError(
            f"the checkpoint belongs to another run: {'; '.join(faults)}; go back to the old "
            "values, or start anew in another trainer.default_root_dir"
        )
    if fits:
        for key in differ:
            announce(f"changed since the checkpoint: {key} {old[key]} -> {new[key]}")


def forget_best(trainer: Trainer, checkpoint: dict[str, Any]) -> str | None:
    """Return why the best validation loss of a checkpoint no longer counts, or None."""
    if not (best := checkpoint["callbacks"]["AtomicCheckpoint"]["best"]):
        return None
    old, new = checkpoint["contract"], contract(trainer)
    keys = {key for key in old.keys() | new.keys() if key.startswith(VALIDATION)}
    # Older checkpoints lack these entries, and a run may validate nothing.
    both = [key for key in keys if old.get(key) and new.get(key)]
    was = f"the best validation loss was {best['loss']:.4f} at step {best['step']:.0f}"
    if any(old[key] != new[key] for key in both):
        return f"the run validates on other data than before; {was}"
    file = Path(trainer.default_root_dir, FOLDER, file_name(int(best["step"])))
    return None if file.exists() else f"{was}, and {file} is not there"


def recount(trainer: Trainer, checkpoint: dict[str, Any], due: bool) -> None:
    """Convert Lightning's counts of micro-batches to the accumulation of this start.

    Args:
        due: whether the validation of the checkpoint's step was interrupted.
    """
    step, loops = checkpoint["global_step"], checkpoint["loops"]["fit_loop"]
    # Lightning counts micro-batches: with another accumulate the same step is another count.
    progress = loops["epoch_loop.batch_progress"]
    was = checkpoint["contract"]["trainer.accumulate_grad_batches"]
    done = step * trainer.accumulate_grad_batches
    for counts in (progress["total"], progress["current"]):
        for name, count in counts.items():
            counts[name] = done + count - step * was
    # A run may have been lengthened since.
    progress["is_last_batch"] = False
    # Lightning runs a validation that has one micro-batch started and not completed.
    progress = loops["epoch_loop.val_loop.batch_progress"]
    cut_short = progress["current"]["completed"] if due else 0
    for counts in (progress["total"], progress["current"]):
        whole = counts["completed"] - cut_short
        counts |= {"ready": whole + due, "started": whole + due}
        counts |= {"processed": whole, "completed": whole}
