"""Pipes and standard input: copied once, because preparing reads its inputs more than once."""

import contextlib
import hashlib
import os
import select
import shutil
import stat
import sys
import tempfile
from pathlib import Path
from typing import IO

from data.system.atomic import make_folder, naming

STANDARD_INPUT = "/dev/stdin"
SYSTEM = ("/dev/", "/proc/")
WAIT_SECONDS = 20
"""How long a named pipe may be without a writer."""
COPIED = 1 << 20


def place_of(path: Path) -> Path:
    """The file that standard input or a descriptor is redirected from, any other path as it is."""
    real = path.resolve()
    return real if str(path.absolute()).startswith(SYSTEM) and real.is_file() else path


def is_pipe(path: Path) -> bool:
    """Whether what a path names can be read only once: a pipe, or a file without a name."""
    if stat.S_ISFIFO(path.stat().st_mode):
        return True
    return str(path.absolute()).startswith(SYSTEM) and not path.resolve().exists()


def copy(path: Path, folder: Path) -> tuple[IO[bytes], str]:
    """Read a pipe to its end into a file without a name, of which a kill leaves nothing.

    Returns:
        The file and the SHA-256 of its content.

    Raises:
        ValueError: nobody writes into the pipe.
        OSError: naming the folder, where it is full.
    """
    print(f"{path}: a pipe, copied into {folder} first", file=sys.stderr, flush=True)
    make_folder(folder)
    digest = hashlib.sha256()
    with os.fdopen(_open(path), "rb", buffering=0) as pipe, contextlib.ExitStack() as stack:
        file = stack.enter_context(tempfile.TemporaryFile(dir=folder))
        while data := pipe.read(COPIED):
            digest.update(data)
            try:
                with naming(folder):
                    file.write(data)
                    file.flush()
            except OSError as error:
                free = shutil.disk_usage(folder).free / 1e6
                error.add_note(
                    f"the copy of {path} had {file.tell() / 1e6:,.0f} MB and is gone, {free:,.0f} "
                    "MB are free there; mend that, or name --output on another disk"
                )
                raise
        stack.pop_all()
    return file, digest.hexdigest()


def name_of(file: IO[bytes]) -> Path:
    """A path by which an open file without a name is opened again."""
    folder = Path("/proc/self/fd")
    return (folder if folder.is_dir() else Path("/dev/fd")) / str(file.fileno())


def _open(path: Path) -> int:
    # Opening a named pipe would wait for a writer for ever.
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    poll = select.poll()
    poll.register(handle, select.POLLIN)
    if not poll.poll(1000 * WAIT_SECONDS):
        try:
            os.read(handle, 1)  # nothing at all without a writer
        except BlockingIOError:
            pass  # a writer that is slow
        else:
            os.close(handle)
            raise ValueError(
                f"{path} is a pipe that nothing has opened for writing in {WAIT_SECONDS} seconds: "
                "start what writes into it"
            )
    os.set_blocking(handle, True)
    return handle
