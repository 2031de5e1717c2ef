"""Resume: what must be as in the checkpoint, what is announced, and positions in new units."""

from pathlib import Path
from typing import Any

from callbacks.checkpoint.files import FOLDER, file_name
from callbacks.run.announce import announce
from callbacks.run.folder import contract
from callbacks.run.trainer import Trainer

# A resumed run must agree in these and in what the datamodule refuses; other differences are
# announced, and the new value holds.
FIXED = ("model.config.", "seed_everything")
# Of the model, but not of what it computes.
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
        # First of all: the length of the run, and with it the schedule, rests on the position.
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
    """Why the best validation loss of a checkpoint is not that of the run that goes on, or None."""
    if not (best := checkpoint["callbacks"]["AtomicCheckpoint"]["best"]):
        return None
    old, new = checkpoint["contract"], contract(trainer)
    keys = {key for key in old.keys() | new.keys() if key.startswith(VALIDATION)}
    # Neither where the checkpoint is from before these entries, nor where nothing is validated.
    both = [key for key in keys if old.get(key) and new.get(key)]
    was = f"the best validation loss was {best['loss']:.4f} at step {best['step']:.0f}"
    if any(old[key] != new[key] for key in both):
        return f"the run validates on other data than before; {was}"
    file = Path(trainer.default_root_dir, FOLDER, file_name(int(best["step"])))
    return None if file.exists() else f"{was}, and {file} is not there"


def recount(trainer: Trainer, checkpoint: dict[str, Any], due: bool) -> None:
    """Put Lightning's counts of micro-batches into the units of this start.

    Args:
        due: whether the validation of the checkpoint's step was cut short.
    """
    step, loops = checkpoint["global_step"], checkpoint["loops"]["fit_loop"]
    # Lightning counts micro-batches: with another accumulate the same step is another count.
    progress = loops["epoch_loop.batch_progress"]
    was = checkpoint["contract"]["trainer.accumulate_grad_batches"]
    done = step * trainer.accumulate_grad_batches
    for counts in (progress["total"], progress["current"]):
        for name, count in counts.items():
            counts[name] = done + count - step * was
    # The last batch of a run that was lengthened since is not the last any more.
    progress["is_last_batch"] = False
    # One micro-batch begun and not finished: Lightning's sign that a validation is due.
    progress = loops["epoch_loop.val_loop.batch_progress"]
    cut_short = progress["current"]["completed"] if due else 0
    for counts in (progress["total"], progress["current"]):
        whole = counts["completed"] - cut_short
        counts |= {"ready": whole + due, "started": whole + due}
        counts |= {"processed": whole, "completed": whole}
