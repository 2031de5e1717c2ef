"""The folder of an export: what may be replaced, checksums, atomic publication."""

import glob
import json
import os
import shutil
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from fnmatch import fnmatch
from pathlib import Path

from lm.hub.files import INDEX, WEIGHTS

# Line of the model card that marks an export, and the names of an export's files.
EXPORTED = "Exported by Relight"
SEAL = "\n<!-- CRC32: "
FILES = ("config.json", "generation_config.json", WEIGHTS, INDEX, "README.md")
FILES += ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")
SHARDS = "model-?????-of-?????.safetensors"
BLOCK_BYTES = 1 << 24


def check_place(output: Path, overwrite: bool) -> None:
    """Check before any work whether the folder may be written; an empty one always may.

    Raises:
        ValueError: the folder holds something that may not be replaced.
    """
    place = output.resolve()
    # The folder is replaced by a rename, which neither of them allows.
    if place.is_mount() or place == Path.cwd():
        what = "a mount point" if place.is_mount() else "the current folder"
        raise ValueError(f"--output {output} is {what}: give a folder inside it")
    above = next(folder for folder in place.parents if folder.exists())
    if not above.is_dir():
        raise ValueError(f"--output {output} would lie in {above}, which is a file: give a folder")
    if not output.exists() or (output.is_dir() and not any(output.iterdir())):
        return
    if not is_export(output):
        raise ValueError(
            f"--output {output} exists and is not a folder that lightning export wrote: give "
            "another one"
        )
    if not overwrite:
        raise ValueError(
            f"--output {output} exists; give another one, or --overwrite to replace it"
        )
    if others := sorted(p.name for p in output.iterdir() if not is_own_name(p)):
        raise ValueError(
            f"--output {output} holds {', '.join(others)}, which no export writes and --overwrite "
            "would delete: move it away, or give another folder"
        )
    if others := changed(output):
        raise ValueError(
            f"--output {output} holds {', '.join(others)}, which changed since the export and "
            "--overwrite would delete: give another folder"
        )


def is_export(folder: Path) -> bool:
    """Whether `export` wrote the folder, by the line in its model card."""
    try:
        lines = (folder / "README.md").read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        return False
    return any(line.startswith(EXPORTED) for line in lines)


def seal(folder: Path, card: str) -> str:
    """Return the card with checksums of itself and of the weights in a folder."""
    sums = {path.name: file_checksum(path) for path in folder.glob("*.safetensors")}
    return f"{card}{SEAL}{json.dumps(sums | {'README.md': checksum([card.encode()])})} -->\n"


def changed(folder: Path) -> list[str]:
    """Return the names of the card and of weight files that changed since the export.

    Empty without checksums. Other files are not checked: they are quickly written again.
    """
    card, seal, text = (folder / "README.md").read_text(encoding="utf-8").partition(SEAL)
    if not seal:
        return []
    try:
        sums = json.loads(text.removesuffix(" -->\n"))
    except ValueError:
        return ["README.md"]
    found = {path.name: file_checksum(path) for path in sorted(folder.glob("*.safetensors"))}
    found["README.md"] = checksum([card.encode()])
    return [name for name, digits in found.items() if sums.get(name) != digits]


def file_checksum(path: Path) -> str:
    """Return the checksum of a file, read in blocks: weights may be larger than the memory."""
    with path.open("rb") as file:
        return checksum(iter(lambda: file.read(BLOCK_BYTES), b""))


def checksum(parts: Iterable[bytes]) -> str:
    """Return the CRC32 over all parts, as hexadecimal digits."""
    crc = 0
    for part in parts:
        crc = zlib.crc32(part, crc)
    return f"{crc:08x}"


def is_own_name(path: Path) -> bool:
    """Whether `export` writes files of this name."""
    return path.is_file() and (path.name in FILES or fnmatch(path.name, SHARDS))


@contextmanager
def atomic_folder(output: Path, needed: int, overwrite: bool) -> Iterator[Path]:
    """Yield a temporary folder, published under its name if the block succeeds, else removed."""
    output = output.resolve()
    missing = [folder for folder in output.parents if not folder.exists()]
    output.parent.mkdir(parents=True, exist_ok=True)
    for folder in missing:
        sync(folder.parent)
    free = shutil.disk_usage(output.parent).free
    if free < needed:
        raise OSError(
            f"No space left for {output}: {needed / 1e6:.0f} MB needed, {free / 1e6:.0f} MB free"
        )
    remove_leftovers(output)
    check_place(output, overwrite)
    place = output.with_name(f".{output.name}.tmp-{os.getpid()}")
    folder = place / "new"
    folder.mkdir(parents=True)
    try:
        yield folder
        for path in (*folder.iterdir(), folder):
            sync(path)
        check_place(output, overwrite)
        replace_folder(folder, output, place / "old")
    finally:
        shutil.rmtree(place, ignore_errors=True)


def remove_leftovers(output: Path) -> None:
    """Remove temporary folders of killed exports; restore a folder that was being replaced."""
    for stale in output.parent.glob(f".{glob.escape(output.name)}.tmp-*"):
        number = stale.name.rpartition("-")[2]
        if number.isdecimal() and not runs(int(number)):
            if not output.exists() and (stale / "old").exists():
                (stale / "old").rename(output)  # killed between the two renames
            shutil.rmtree(stale, ignore_errors=True)


def replace_folder(folder: Path, output: Path, old: Path) -> None:
    """Rename a folder to its final name; the folder with that name is moved to `old` first."""
    if output.exists():
        output.rename(old)
    try:
        folder.rename(output)
    except OSError:
        if old.exists():
            old.rename(output)
        raise
    sync(output.parent)


def runs(process: int) -> bool:
    """Whether another process with this id is running."""
    if process == os.getpid():
        return False
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def sync(path: Path) -> None:
    """Flush a file, or the names in a folder, to disk."""
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)
