"""Atomic writes: a file is durable under its final name, or that name is as it was."""

import contextlib
import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path

TEMPORARY = ".tmp-"


def _pass(_: str) -> None:
    pass


@contextlib.contextmanager
def replaced(path: Path, reach: Callable[[str], None] = _pass) -> Iterator[Path]:
    """Yield a temporary path beside `path`; the file written there replaces `path` at the end.

    The content is on disk before the name, and the name before this returns. An exception in the
    block removes the temporary file and leaves `path` as it was.

    Args:
        reach: called with "before fsync" and "before replace" at these moments.

    Raises:
        OSError: naming `path`, whichever call failed.
    """
    make_folder(path.parent)
    # The same folder, because renaming is atomic only within one file system. Hidden, because
    # people list and copy these folders. The suffix stays, because readers go by it.
    temporary = path.with_name(f".{path.stem}{TEMPORARY}{os.getpid()}{path.suffix}")
    try:
        with naming(path, temporary):
            yield temporary
            reach("before fsync")
            sync(temporary)
            reach("before replace")
            os.replace(temporary, path)
            sync(path.parent)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise


@contextlib.contextmanager
def naming(path: Path, written: Path | None = None) -> Iterator[None]:
    """Name a path in an OSError that names none, as that of a write, or only `written`."""
    try:
        yield
    except OSError as error:
        if error.errno is None or error.filename not in (None, str(written)):
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error


def replace_text(path: Path, text: str) -> None:
    """Write a text file as UTF-8: a reader finds the old or the new text, never a part."""
    with replaced(path) as temporary:
        temporary.write_text(text, encoding="utf-8", newline="\n")


def sync(path: Path) -> None:
    """Return when a file's content, or the names in a folder, are on disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        with naming(path):
            os.fsync(handle)
    except OSError as error:
        # Some network file systems have no fsync for folders.
        if error.errno != errno.EINVAL or not path.is_dir():
            raise
    finally:
        os.close(handle)


def make_folder(folder: Path) -> None:
    """Make a folder and its missing parents, each durable."""
    missing = [each for each in (folder, *folder.parents) if not each.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for each in reversed(missing):
        sync(each.parent)
