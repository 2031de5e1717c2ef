"""Files that folders, links and patterns stand for, each once; what is left out is said."""

import errno
import glob
import os
import stat
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

from data.prepare.other_kinds import is_leftover

Seen = set[tuple[int, int]]
"""Folders by device and inode."""


def named_files(word: str) -> list[Path]:
    """Return the files that a word names, in order; none where it names nothing.

    A link to a folder is followed, unless it leads back up. Each file counts once, under its own
    name where that is there beside a link's. Hidden ones count where they are named. Markers,
    backups and unfinished files of other programs are left out.

    Raises:
        ValueError: a link leads nowhere; a socket or a device, or a pipe that is not `word` itself.
        OSError: a folder cannot be read.
    """
    paths = [Path(word)]
    if not os.path.lexists(word):
        paths = matching(word)
    files: dict[Path, list[Path]] = {}
    hidden, seen = [], set()
    for path in sorted(paths, key=Path.is_symlink):
        parts = list(_walk(path, seen)) if path.is_dir() else [(path, [path], [])]
        files[path] = sorted(file for _, inside, _ in parts for file in inside)
        hidden += [each for _, _, skipped in parts for each in skipped]
    found = [file for path in paths for file in files[path]]
    left = {path for path in found if is_leftover(path) and path != Path(word)}
    found = [path for path in found if path not in left]
    for path in found:
        _check(path, named=[path] == paths)
    once: dict[str, Path] = {}
    for path in sorted(found, key=Path.is_symlink):
        once.setdefault(os.path.realpath(path), path)
    kept = {*once.values()}
    again = [path for path in found if path not in kept]
    if hidden:
        _say(word, hidden, "hidden; name it to read it")
    if left:
        _say(word, sorted(left), "left by another program")
    if again:
        _say(word, again, "a link to a file that is read already")
    return [path for path in found if path in kept]


def matching(pattern: str) -> list[Path]:
    """Return what a pattern of glob names, sorted; its ** enters each real folder once."""
    return sorted({*_matches(Path(), Path(pattern).parts)}, key=str) if pattern else []


def _walk(top: Path, seen: Seen) -> Iterator[tuple[Path, list[Path], list[Path]]]:
    """Folders that were not seen, each with its files and with what is hidden."""
    starts = [top]
    for start in starts:  # linked folders join it, and so come after those that are not
        for place, folders, names in os.walk(start, onerror=_raise):
            folder, here = Path(place), os.stat(place)
            if (here.st_dev, here.st_ino) in seen:
                folders.clear()
                continue
            seen.add((here.st_dev, here.st_ino))
            hidden = [folder / name for name in (*folders, *names) if name[0] == "."]
            folders[:] = sorted(name for name in folders if name[0] != ".")
            starts += [folder / name for name in folders if _leads_on(folder / name)]
            yield folder, [folder / name for name in names if name[0] != "."], sorted(hidden)


def _leads_on(path: Path) -> bool:
    """Whether a folder is a link, and not one to a folder that it is in."""
    return path.is_symlink() and path.resolve() not in (path.parent / "x").resolve().parents


def _matches(folder: Path, parts: tuple[str, ...]) -> Iterator[Path]:
    # Part by part, because glob's own ** goes round in links.
    if not parts:
        yield folder
    elif parts[0] != "**":
        for name in glob.glob(parts[0], root_dir=folder):
            yield from _matches(folder / name, parts[1:])
    elif folder.is_dir():
        for inside, _, _ in _walk(folder, set()):
            yield from _matches(inside, parts[1:])


def _check(path: Path, *, named: bool) -> None:
    try:
        mode = path.stat().st_mode
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ELOOP):
            raise
        raise ValueError(
            f"{path} is a link to {path.readlink()}, which does not exist: bring that back, or "
            "remove the link"
        ) from error
    if stat.S_ISFIFO(mode) and not named:
        raise ValueError(
            f"{path} is a pipe: a pipe is read where --input names it by itself; move it elsewhere"
        )
    if not (stat.S_ISREG(mode) or stat.S_ISFIFO(mode)):
        kind = "a socket" if stat.S_ISSOCK(mode) else "a device"
        raise ValueError(f"{path} is {kind}: name files, folders or pipes")


def _say(word: str, paths: list[Path], why: str) -> None:
    more = f" and {len(paths) - 1:,} more" if paths[1:] else ""
    print(f"{word}: not read: {paths[0]}{more} ({why})", file=sys.stderr)


def _raise(error: OSError) -> NoReturn:
    raise error
