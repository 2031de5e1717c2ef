"""Console output that survives a closed terminal, and console.log with the same lines."""

import contextlib
import os
import shlex
import sys
import time
from collections import deque
from pathlib import Path
from typing import Any, TextIO

FILE = "console.log"
# Lines that wait for the log's file: those of the start, and those that a full disk refuses.
MOST_LINES = 10_000


class Log:
    """Lines of a console, kept until their file is known, then appended to it."""

    def __init__(self) -> None:
        self.path: Path | None = None
        self._open = ""
        self._waiting: deque[str] = deque(maxlen=MOST_LINES)
        self.error: OSError | None = None  # of the last write

    def write(self, text: str) -> None:
        """Add console text, without lines that are updated in place."""
        if not text.startswith("\r"):
            *lines, self._open = (self._open + text).split("\n")
            self.add(*lines)

    def add(self, *lines: str) -> None:
        """Add complete lines, without blank ones."""
        self._waiting += [line for line in lines if line.strip()]
        if self.path is None or not self._waiting:
            return
        text = "".join(f"{line}\n" for line in self._waiting)
        try:
            with self.path.open("ab", buffering=0) as file:
                file.write(text.encode("utf-8", errors="backslashreplace"))
            self._waiting.clear()
            self.error = None
        except OSError as error:
            # A full disk must not end a run; what waits is tried again with the next line.
            self.error = error


class Console:
    """A text stream that goes on when nobody reads it: a closed pipe, a lost terminal, a full disk.

    All text goes to the log too.
    """

    def __init__(self, stream: TextIO, log: Log) -> None:
        self.stream, self.log = stream, log

    def write(self, text: str) -> int:
        """Write if possible; return the length of the text."""
        self.log.write(text)
        with contextlib.suppress(OSError, ValueError):  # the latter where it is closed
            self.stream.write(text)
        return len(text)

    def flush(self) -> None:
        """Flush if possible."""
        with contextlib.suppress(OSError, ValueError):
            self.stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


def keep_log(folder: Path) -> OSError | None:
    """Append what this process says, from its first line on, to the log in a run folder.

    Returns the error where that fails; lines that wait are tried again with the next one.
    """
    failed = None
    for stream in (sys.stdout, sys.stderr):
        log = stream.log if isinstance(stream, Console) else None
        if log is not None and log.path is None:
            command = shlex.join(["lightning", *sys.argv[1:]])
            log._waiting.appendleft(f"--- {time.strftime('%Y-%m-%d %H:%M:%S%z')} {command}")
            log.path = folder / FILE
            log.add()
            failed = log.error
    return failed


def open_standard_streams() -> None:
    """Open /dev/null in place of standard streams that were closed before the start.

    A checkpoint would else get their numbers, and the messages of libraries with them.
    """
    while (number := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(number, True)
    os.close(number)
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(number, "w" if number else "r", closefd=False))


def drop_unread(stream: TextIO) -> None:
    """Flush a stream at exit, and drop output that nobody reads: Python would report an error."""
    try:
        stream.flush()
    except (OSError, ValueError):
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
