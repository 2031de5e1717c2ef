"""Checkpoint files: found, whole or not there, read without running what is in them."""

import contextlib
import errno
import io
import os
import pickle
import re
import shutil
import stat
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from callbacks.checkpoint.state import original
from callbacks.drill.kill_points import reach, watched
from callbacks.run.announce import announce
from data.system.atomic import make_folder, replaced
from lm.finite import NonFiniteError, few, non_finite
from lm.hub.files import names_model
from lm.trained import from_weights_file, step_of_weights

FOLDER = "checkpoints"
WEIGHTS = "weights.safetensors"
NAME = re.compile(r"step-(\d+)\.ckpt")


def file_name(step: int) -> str:
    """Return the file name of a step's checkpoint, which `NAME` matches."""
    return f"step-{step:08d}.ckpt"


def checkpoints(folder: Path) -> list[tuple[int, Path]]:
    """Steps and files of a run folder, or of the checkpoint folder itself, newest first."""
    folder = folder / FOLDER if (folder / FOLDER).is_dir() else folder
    if not folder.is_dir():
        return []
    found = [(NAME.fullmatch(path.name), path) for path in folder.iterdir()]
    return sorted(((int(match[1]), path) for match, path in found if match), reverse=True)


class Whole(io.FileIO):
    """A file that keeps an error of a read, which zipfile may hide behind one of its own."""

    error: OSError | None = None

    def readinto(self, buffer: Any) -> int | None:
        try:
            return super().readinto(buffer)
        except OSError as error:
            self.error = error
            raise

    def readall(self) -> bytes:
        try:
            return super().readall()
        except OSError as error:
            self.error = error
            raise


def damage(path: Path) -> str | None:
    """Why a checkpoint file is not whole, or None.

    Reads all of it and compares the CRC32 that torch.save stores with each record, which
    torch.load does not.

    Raises:
        OSError: the system cannot read the file, which may be sound.
    """
    if path.is_dir():
        return "it is a folder"
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            return "it is no regular file"
        raw = Whole(path)
    except OSError as error:
        raise unreadable(error, path) from error
    with io.BufferedReader(raw) as file:
        fault = _fault(file)
    if raw.error is not None:
        raise unreadable(raw.error, path) from raw.error
    return fault


def _fault(file: IO[bytes]) -> str | None:
    try:
        if not file.read(1):
            return "it is empty"
        with zipfile.ZipFile(file) as archive:
            bad = archive.testzip()
        return f"record {bad} does not match its checksum" if bad else None
    except zipfile.BadZipFile as error:
        return f"truncated or corrupt at {os.fstat(file.fileno()).st_size} bytes ({error})"
    except Exception as error:
        return f"cannot be read ({error})"


def unreadable(error: OSError, path: Path) -> OSError:
    """The same error with the path, and what to do."""
    advice = "the file may be sound, so no other is used; make it readable and try again"
    if path.is_symlink() and error.errno in (errno.ENOENT, errno.ELOOP):
        advice = f"it is a link to {path.readlink()}; bring that file back, or remove the link"
    return OSError(error.errno, f"{error.strerror}: {advice}", str(path))


def reason(error: BaseException) -> str:
    """Return the message of an error, without the path of an OSError."""
    if isinstance(error, OSError) and error.errno is not None:
        return f"[Errno {error.errno}] {error.strerror}"
    return str(error)


def unusable(path: Path) -> str | None:
    """Why a checkpoint or a weights-only file must not be used, or None.

    Raises:
        OSError: the system cannot read the file.
        ValueError: the file is whole and no checkpoint, or weights are damaged.
    """
    if path.suffix == ".safetensors":
        from_weights_file(path)
        return None
    found = _contents(path)
    return found if isinstance(found, str) else None


def _contents(path: Path) -> dict[str, Any] | str:
    """Contents of a checkpoint, or why they must not be used: damage, tensors not finite."""
    if fault := damage(path):
        return fault
    content = _load(path)
    return non_finite_state(content) or content


def non_finite_state(checkpoint: dict[str, Any]) -> str | None:
    """Which tensors of a checkpoint hold NaN or infinity, or None.

    The states of callbacks are theirs: a best score, say, may be infinite.
    """
    own = {name: value for name, value in checkpoint.items() if name != "callbacks"}
    bad = list(non_finite(own))
    return f"not finite: {few(bad)}" if bad else None


def read_newest(folder: Path, say: Callable[[str], None]) -> tuple[Path, dict[str, Any]]:
    """Newest usable checkpoint of a folder by step number, and its contents.

    Unusable newer ones are named.

    Raises:
        OSError: the system cannot read a file.
        ValueError: there is none, or all are damaged.
    """
    faults = []
    for _, path in checkpoints(folder):
        try:
            found = _contents(path)
        except FileNotFoundError:
            if os.path.lexists(path):
                raise
            # A run that goes on has newer ones, and keeps this one no more.
            return read_newest(folder, say)
        if not isinstance(found, str):
            for line in faults:
                say(f"warning: passed over {line}")
            return path, found
        faults.append(f"{path}: {found}")
    if not faults:
        refuse_weights_alone(folder)
        raise ValueError(f"{folder} holds no checkpoint (step-00000000.ckpt …); train first")
    too = f" and {WEIGHTS}" if (folder / WEIGHTS).exists() else ""
    raise ValueError(
        f"all {len(faults)} checkpoints of {folder} are damaged ({'; '.join(faults)}); remove them"
        f"{too} to start at step 0, or bring back a sound copy"
    )


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


def resolve(ckpt_path: str | None, root: Path, starts: bool = False) -> Path | None:
    """Return the folder, meaning its newest intact file, or the file that `ckpt_path` stands for.

    Args:
        ckpt_path: `last`, `best`, a path, or None for a new run.
        root: The run's folder.
        starts: Whether `last` in a folder without checkpoints is a first start, which is None.

    Raises:
        ValueError: nothing is there, or a new run is asked for where one already is.
    """
    held = checkpoints(root)
    if not held and ckpt_path in (None, "last", "best"):
        # A run from step 0 would replace them at its end.
        refuse_weights_alone(root)
    if ckpt_path is None:
        if held:
            raise ValueError(
                f"{root} already holds checkpoints (step {held[0][0]}) and ckpt_path is null: "
                "resume by --ckpt_path last, or give another trainer.default_root_dir"
            )
        return None
    if ckpt_path not in ("last", "best"):
        asked, way = Path(ckpt_path), "give last, best, a run folder or a file"
        if not asked.exists():
            own = [str(file) for _, file in held if file.name in (asked.name, f"{asked.name}.ckpt")]
            way = f"give {own[0]}" if own else way
            raise ValueError(f"ckpt_path {ckpt_path} does not exist; {way}")
        if not checkpoints(asked):
            refuse_weights_alone(asked)
            refuse_model_folder(asked)
            if asked.is_dir():
                raise ValueError(f"ckpt_path {ckpt_path} holds no checkpoint (step-….ckpt); {way}")
            if asked.suffix != ".ckpt" and not (asked.is_file() and zipfile.is_zipfile(asked)):
                raise ValueError(f"ckpt_path {ckpt_path} is no checkpoint; {way}")
        place = Path(ckpt_path).resolve()
        if starts and held and root.resolve() not in (place, *place.parents):
            raise ValueError(
                f"ckpt_path {ckpt_path} is of another run, and {root} already holds checkpoints of "
                "its own; give another trainer.default_root_dir"
            )
        return Path(ckpt_path)
    if not held:
        if starts and ckpt_path == "last":
            return None
        raise ValueError(f"{root} holds no checkpoint; train first, or name one by --ckpt_path")
    if ckpt_path == "last":
        return root
    _, newest = read_newest(root, announce)
    best = newest["callbacks"]["AtomicCheckpoint"]["best"]
    if not best:
        raise ValueError(f"{root} has no best checkpoint: nothing was validated yet")
    file = held[0][1].with_name(file_name(best["step"]))
    if not file.exists():
        raise ValueError(
            f"the best checkpoint of {root} was {file.name}, which is not there; give last, or one "
            "of its files by --ckpt_path"
        )
    return file


def read_checkpoint(path: Path) -> dict[str, Any]:
    """Return the contents of a checkpoint on the CPU; no code in the file is executed.

    Raises:
        OSError: the system cannot read the file.
        ValueError: the file is missing, damaged, not finite or holds more than tensors and plain
            types.
    """
    if not path.is_file():
        raise ValueError(f"{path} does not exist; give a run folder or a checkpoint file")
    found = _contents(path)
    if isinstance(found, str):
        raise ValueError(f"{path} is of no use: {found}; {_sound_one_beside(path)}")
    return found


def _sound_one_beside(path: Path) -> str:
    for _, other in checkpoints(path.parent):
        # The error at hand matters more than one of these files.
        with contextlib.suppress(OSError, ValueError):
            if unusable(other) is None:
                return f"the newest sound one is {other}"
    return "no sound one is beside it"


def _load(path: Path) -> dict[str, Any]:
    """Return the contents of an intact file."""
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        name = re.search(r"GLOBAL (\S+)", str(error))
        raise ValueError(
            f"{path} is untrusted: it holds {name[1] if name else 'objects'} beside tensors and "
            "plain types, so loading could run foreign code; export its weights where it was made"
        ) from None
    except RuntimeError as error:
        raise ValueError(
            f"{path} is not a checkpoint: torch cannot read it ({error}); give one made by fit"
        ) from None
    if not isinstance(content, dict) or "state_dict" not in content:
        raise ValueError(f"{path} is not a checkpoint: it has no state_dict; give one made by fit")
    return original(content)


def tensor_bytes(value: Any) -> int:
    """Return the bytes of all tensors in nested containers."""
    if isinstance(value, Tensor):
        return value.nbytes
    if isinstance(value, dict):
        return sum(map(tensor_bytes, value.values()))
    return sum(map(tensor_bytes, value)) if isinstance(value, list | tuple) else 0


def write_checkpoint(checkpoint: dict[str, Any], path: Path) -> None:
    """Write a checkpoint atomically and durably.

    Raises:
        NonFiniteError: a tensor of the run's own state holds NaN or infinity.
        OSError: the file cannot be written.
    """
    make_folder(path.parent)
    needed, free = tensor_bytes(checkpoint), shutil.disk_usage(path.parent).free
    if free < needed:
        raise OSError(
            errno.ENOSPC,
            f"No space left: {needed / 1e6:,.2f} MB needed, {free / 1e6:,.2f} MB free",
            str(path),
        )
    step = checkpoint.get("global_step", 0)
    if fault := non_finite_state(checkpoint):
        raise NonFiniteError(f"the state after step {step} is {fault}; it is not saved", step)
    try:
        with replaced(path, reach) as temporary, temporary.open("wb") as file:
            torch.save(checkpoint, watched(file))
    except RuntimeError as error:
        if isinstance(error.__context__, OSError):
            # torch's writer hides the file system's error behind one of its own.
            raise error.__context__ from None
        raise
