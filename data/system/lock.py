"""Lock on a folder: one process holds it, also among the nodes that share a file system."""

import contextlib
import errno
import fcntl
import json
import os
import platform
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TextIO

from data.system.atomic import make_folder, naming

NAME = ".lock"
BEAT = 10.0
"""Seconds between two signs of life that an owner gives in the lock file's time."""
SILENCE = 60.0
"""Seconds without such a sign after which an owner on another node counts as dead."""
# Lustre mounted without flock, NFS without a lock daemon, and others.
UNSUPPORTED = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK, errno.EINVAL)


def _print(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def boot() -> str:
    """Name of this boot of this kernel; the host's name where the system has none."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return platform.node()


def started(process: int) -> str:
    """Namespace of a running process, and its start in ticks of the kernel; else empty."""
    try:
        stat = Path(f"/proc/{process}/stat").read_text(encoding="utf-8", errors="replace")
        # The name before the parenthesis may hold spaces.
        fields = stat.rpartition(")")[2].split()
        running = fields[0] not in "ZX"
        return f"{os.readlink('/proc/self/ns/pid')} {fields[19]}" if running else ""
    except OSError:
        return ""


@dataclass(frozen=True, kw_only=True)
class Owner:
    """The process that a lock file names."""

    process: int | None = None
    host: str = ""
    boot: str = ""
    started: str = ""

    @classmethod
    def this_process(cls) -> "Owner":
        number = os.getpid()
        return cls(process=number, host=platform.node(), boot=boot(), started=started(number))

    @classmethod
    def read(cls, file: TextIO) -> "Owner":
        """The owner that a lock file names, unknown where it is damaged."""
        try:
            content = json.loads(file.read())
            return cls(process=content) if isinstance(content, int) else cls(**content)
        except (ValueError, TypeError):
            return cls()

    def __str__(self) -> str:
        number = "unknown" if self.process is None else str(self.process)
        return f"process {number}" if self.is_near else f"process {number} on {self.host}"

    @property
    def is_near(self) -> bool:
        """Whether it runs on this kernel, which then knows what files it has locked."""
        return self.boot in ("", boot())

    @property
    def lives(self) -> bool | None:
        """Whether the process runs, None where this process cannot see it."""
        here = self.started.partition(" ")[0] == started(os.getpid()).partition(" ")[0]
        if self.process is None or not (self.is_near and here and self.started):
            return None
        return started(self.process) == self.started


@contextlib.contextmanager
def held(
    folder: Path, busy: Callable[[Owner], None], say: Callable[[str], None] = _print
) -> Iterator[None]:
    """Hold the lock of a folder, which is made if it is missing.

    The lock is a file, created exclusively, that names its owner. An owner on this machine is
    judged by `flock`, which the kernel drops when the process ends, and where the file system has
    none by its process number; an owner on another node by the file's time, which it renews.

    Args:
        busy: called with a living owner; it raises, or returns to have the lock waited for.
        say: called with a line when the wait for an owner's sign of life begins.
    """
    make_folder(folder)
    path = folder / NAME
    text = json.dumps(asdict(Owner.this_process())) + "\n"
    while (file := _create(path, text)) is None:
        owner = _living_owner(path, say)
        if owner is not None:
            busy(owner)
            time.sleep(0.2)
    # Workers that outlive a kill by a moment must not keep the folder taken.
    os.register_at_fork(after_in_child=file.close)
    over = threading.Event()
    beat = threading.Thread(target=_beat, args=(path, text, over), daemon=True, name="lock")
    beat.start()
    try:
        yield
    finally:
        over.set()
        beat.join()
        with contextlib.suppress(OSError):
            if path.read_text(encoding="utf-8") == text:
                path.unlink()
        file.close()


def _create(path: Path, text: str) -> TextIO | None:
    """The lock file, new and ours; None where there is one."""
    try:
        file = path.open("x", encoding="utf-8")
    except FileExistsError:
        if path.is_dir():
            raise ValueError(f"{path} is a folder: the lock is a file there; remove it") from None
        return None
    try:
        _flock(file)
        with naming(path):
            file.write(text)
            file.flush()
    except OSError:
        path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            file.close()
        raise
    return file


def _flock(file: TextIO) -> bool:
    """Whether the file system can lock, and did.

    Raises:
        BlockingIOError: another process holds it.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise
    except OSError as error:
        if error.errno not in UNSUPPORTED:
            raise
        return False
    return True


def _living_owner(path: Path, say: Callable[[str], None]) -> Owner | None:
    """The owner that a lock file names; None where it is free now, a dead owner's file removed."""
    try:
        with path.open("r+", encoding="utf-8") as file:
            inode = os.fstat(file.fileno()).st_ino
            owner = Owner.read(file)
            if owner.process is None and time.time() - os.fstat(file.fileno()).st_mtime < 1:
                return owner  # it is being written
            try:
                lives = False if _flock(file) and owner.is_near else owner.lives
            except BlockingIOError:
                return owner
            if lives or (lives is None and _gives_sign(path, owner, say)):
                return owner
            _remove(path, inode)
    except FileNotFoundError:
        pass
    return None


def _gives_sign(path: Path, owner: Owner, say: Callable[[str], None]) -> bool:
    """Whether the lock file's time, or the file, changes while it is watched."""
    first = _stamp(path)
    # The clocks of two nodes differ by less.
    if time.time() - first[1] / 1e9 > 60 * SILENCE:
        return False
    say(f"{path.parent} was in use by {owner}: waiting up to {SILENCE:.0f} s for a sign of it")
    end = time.monotonic() + SILENCE
    while time.monotonic() < end:
        time.sleep(min(1.0, SILENCE / 10))
        if _stamp(path) != first:
            return True
    return False


def _stamp(path: Path) -> tuple[int, int]:
    # Opened, because NFS asks its server then, and answers a stat from memory.
    with path.open("rb") as file:
        found = os.fstat(file.fileno())
    return found.st_ino, found.st_mtime_ns


def _remove(path: Path, inode: int) -> None:
    """Remove a dead owner's file, and no other that came into its place."""
    aside = path.with_name(f"{NAME}.{os.getpid()}")
    path.rename(aside)
    if aside.stat().st_ino == inode:
        aside.unlink()
    else:
        aside.rename(path)


def _beat(path: Path, text: str, over: threading.Event) -> None:
    """Renew the lock file's time; end the process when the lock is another's."""
    while not over.wait(BEAT):
        try:
            found = path.read_text(encoding="utf-8")
            if found == text:
                os.utime(path)
            elif found:
                _print(
                    f"error: {path.parent} was taken over by another process: this one gave no "
                    f"sign for {SILENCE:.0f} s, and ends at once so that it overwrites nothing"
                )
                os._exit(1)
        except OSError:
            continue  # the next time, perhaps
