"""The checkpoint that `ckpt_path` stands for: last, best, a run folder or a file."""

import zipfile
from pathlib import Path

from callbacks.checkpoint.files import WEIGHTS, checkpoints, file_name, read_newest
from callbacks.run.announce import announce
from lm.hub.files import names_model
from lm.trained import step_of_weights


def resolve(ckpt_path: str | None, root: Path, starts: bool = False) -> Path | None:
    """Return a checkpoint file, a folder that stands for its newest intact one, or None.

    Args:
        ckpt_path: `last`, `best`, a path, or None for a new run.
        root: The run's folder.
        starts: Whether a run may start at step 0, for which `last` in an empty folder is None.

    Raises:
        ValueError: no checkpoint is found, or a new run is asked for where one already is.
    """
    held = checkpoints(root)
    if ckpt_path not in (None, "last", "best"):
        return _given(ckpt_path, root, starts)
    if not held:
        # A run from step 0 would replace them at its end.
        refuse_weights_alone(root)
        if ckpt_path is None or (starts and ckpt_path == "last"):
            return None
        raise ValueError(f"{root} holds no checkpoint; train first, or name one by --ckpt_path")
    if ckpt_path is None:
        raise ValueError(
            f"{root} already holds checkpoints (step {held[0][0]}) and ckpt_path is null: "
            "resume by --ckpt_path last, or give another trainer.default_root_dir"
        )
    return root if ckpt_path == "last" else _best(root)


def _given(ckpt_path: str, root: Path, starts: bool) -> Path:
    place, held = Path(ckpt_path), checkpoints(root)
    way = "give last, best, a run folder or a file"
    if not place.exists():
        own = [str(file) for _, file in held if file.name in (place.name, f"{place.name}.ckpt")]
        way = f"give {own[0]}" if own else way
        raise ValueError(f"ckpt_path {ckpt_path} does not exist; {way}")
    if not checkpoints(place):
        refuse_weights_alone(place)
        refuse_model_folder(place)
        if place.is_dir():
            raise ValueError(f"ckpt_path {ckpt_path} holds no checkpoint (step-….ckpt); {way}")
        if place.suffix != ".ckpt" and not (place.is_file() and zipfile.is_zipfile(place)):
            raise ValueError(f"ckpt_path {ckpt_path} is no checkpoint; {way}")
    if starts and held and not place.resolve().is_relative_to(root.resolve()):
        raise ValueError(
            f"ckpt_path {ckpt_path} is of another run, and {root} already holds checkpoints of "
            "its own; give another trainer.default_root_dir"
        )
    return place


def _best(root: Path) -> Path:
    path, newest = read_newest(root, announce)
    best = newest["callbacks"]["AtomicCheckpoint"]["best"]
    if not best:
        raise ValueError(f"{root} has no best checkpoint: nothing was validated yet")
    file = path.with_name(file_name(best["step"]))
    if not file.exists():
        raise ValueError(
            f"the best checkpoint of {root} was {file.name}, which is not there; give last, or one "
            "of its files by --ckpt_path"
        )
    return file


def refuse_weights_alone(place: Path) -> None:
    """Refuse a weights-only file, or a folder that holds one, where a checkpoint is asked for.

    Raises:
        ValueError: says what the file can be used for.
    """
    file = place / WEIGHTS if place.is_dir() else place
    own = file.name == WEIGHTS or step_of_weights(file) >= 0
    if file.suffix == ".safetensors" and file.is_file() and own:
        raise ValueError(
            f"{file} holds weights alone, which cannot be resumed or validated: give it to "
            "lightning sample, evaluate or export, or begin another run with it by "
            "--model.from_weights and another trainer.default_root_dir"
        )


def refuse_model_folder(place: Path) -> None:
    """Refuse a folder of Hugging Face's form, or a file of one, where a checkpoint is asked for.

    Raises:
        ValueError: says what the folder can be used for.
    """
    folder = place if place.is_dir() else place.parent
    if names_model(folder) and not zipfile.is_zipfile(place):
        raise ValueError(
            f"{folder} holds weights alone in Hugging Face's form, which cannot be resumed or "
            "validated: give the folder to lightning sample, evaluate or export, or begin a run "
            "with it by --model.from_weights"
        )
