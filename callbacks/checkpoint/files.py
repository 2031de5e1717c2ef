"""Checkpoint files: naming, integrity checks, reading without running code, atomic writes."""

import contextlib
import errno
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
from data.system.atomic import make_folder, replaced
from lm.finite import NonFiniteError, few, non_finite
from lm.trained import from_weights_file

FOLDER = "checkpoints"
WEIGHTS = "weights.safetensors"
NAME = re.compile(r"step-(\d+)\.ckpt")
# Most bytes of a zip file in which its end record is looked for.
ZIP_TAIL = 2**16 + 22


def file_name(step: int) -> str:
    """Return the file name of a step's checkpoint, which `NAME` matches."""
    return f"step-{step:08d}.ckpt"


def checkpoints(folder: Path) -> list[tuple[int, Path]]:
    """Return steps and files of a run folder, or of the checkpoint folder itself, newest first."""
    folder = folder / FOLDER if (folder / FOLDER).is_dir() else folder
    if not folder.is_dir():
        return []
    found = [(NAME.fullmatch(path.name), path) for path in folder.iterdir()]
    return sorted(((int(match[1]), path) for match, path in found if match), reverse=True)


def damage(path: Path) -> str | None:
    """Return why a checkpoint file is not intact, or None.

    Reads the whole file and compares the CRC32 that torch.save stores with each record, which
    torch.load does not.

    Raises:
        OSError: the system cannot read the file, which may be intact.
    """
    if path.is_dir():
        return "it is a folder"
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            return "it is no regular file"
        with path.open("rb") as file:
            # zipfile reports a read error in these bytes as a corrupt archive.
            file.seek(max(0, status.st_size - ZIP_TAIL))
            return _damage(file, status.st_size) if file.read() else "it is empty"
    except OSError as error:
        raise unreadable(error, path) from error


def _damage(file: IO[bytes], size: int) -> str | None:
    try:
        with zipfile.ZipFile(file) as archive:
            bad = archive.testzip()
    except zipfile.BadZipFile as error:
        return f"truncated or corrupt at {size} bytes ({error})"
    except Exception as error:
        # zipfile seeks to offsets that it reads from the file.
        if isinstance(error, OSError) and error.errno != errno.EINVAL:
            raise
        return f"cannot be read ({error})"
    return f"record {bad} does not match its checksum" if bad else None


def unreadable(error: OSError, path: Path) -> OSError:
    """Return the error of a read with the path and the way out."""
    advice = "the file may be intact, so no other is used; make it readable and try again"
    if path.is_symlink() and error.errno in (errno.ENOENT, errno.ELOOP):
        advice = f"it is a link to {path.readlink()}; bring that file back, or remove the link"
    return OSError(error.errno, f"{error.strerror}: {advice}", str(path))


def reason(error: BaseException) -> str:
    """Return the message of an error, without the path of an OSError."""
    if isinstance(error, OSError) and error.errno is not None:
        return f"[Errno {error.errno}] {error.strerror}"
    return str(error)


def unusable(path: Path) -> str | None:
    """Return why a checkpoint or weights file must not be used, or None.

    Raises:
        OSError: the system cannot read the file.
        ValueError: the file is intact and no checkpoint, or weights are damaged.
    """
    if path.suffix == ".safetensors":
        from_weights_file(path)
        return None
    found = _contents(path)
    return found if isinstance(found, str) else None


def _contents(path: Path) -> dict[str, Any] | str:
    """Return the contents of a checkpoint, or why they must not be used: damage, NaN, infinity."""
    if fault := damage(path):
        return fault
    content = _load(path)
    return non_finite_state(content) or content


def non_finite_state(checkpoint: dict[str, Any]) -> str | None:
    """Return which tensors of a checkpoint hold NaN or infinity, or None.

    Callbacks' states are left out, because a best score, for instance, may be infinite.
    """
    own = {name: value for name, value in checkpoint.items() if name != "callbacks"}
    bad = list(non_finite(own))
    return f"not finite: {few(bad)}" if bad else None


def read_newest(folder: Path, say: Callable[[str], None]) -> tuple[Path, dict[str, Any]]:
    """Return the newest usable checkpoint of a folder by step number, and its contents.

    Args:
        say: called with a warning for each newer checkpoint that is passed over.

    Raises:
        OSError: the system cannot read a file.
        ValueError: the folder has no checkpoint, or all are damaged.
    """
    faults = []
    for _, path in checkpoints(folder):
        try:
            found = _contents(path)
        except FileNotFoundError:
            if os.path.lexists(path):
                raise
            # A run in progress has removed this one and has newer ones.
            return read_newest(folder, say)
        if not isinstance(found, str):
            for line in faults:
                say(f"warning: passed over {line}")
            return path, found
        faults.append(f"{path}: {found}")
    if not faults:
        raise ValueError(f"{folder} holds no checkpoint (step-00000000.ckpt …); train first")
    too = f" and {WEIGHTS}" if (folder / WEIGHTS).exists() else ""
    raise ValueError(
        f"all {len(faults)} checkpoints of {folder} are damaged ({'; '.join(faults)}); remove them"
        f"{too} to start at step 0, or bring back an intact copy"
    )


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
        raise ValueError(f"{path} cannot be used: {found}; {_intact_one_beside(path)}")
    return found


def _intact_one_beside(path: Path) -> str:
    for _, other in checkpoints(path.parent):
        # The error about `path` matters more than one about these files.
        with contextlib.suppress(OSError, ValueError):
            if unusable(other) is None:
                return f"the newest intact one is {other}"
    return "no intact one is beside it"


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
