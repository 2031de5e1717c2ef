"""Stop requests: signals that ask a process to stop, and exit codes."""

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

# Exit codes of a program that was asked to stop; SIGUSR1 is a scheduler's early SIGTERM.
EXIT_CODES = {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGUSR1: 143}

# Seconds within which the same signal again is the same request: torchrun, srun, timeout and
# systemd pass on what the process has received already.
REPEAT = 5.0
# No launcher takes so long to pass on a Ctrl-C, and no person presses it twice so fast.
REPEATED_INTERRUPT = 0.3
# Seconds until a native call that does not return to Python counts as blocking signals.
DEAF = 1.0


def under_torchrun() -> bool:
    """Whether torchrun's agent started this process."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def exit_codes() -> dict[signal.Signals, int]:
    """Signals that ask this process to stop, with their exit codes.

    A lost terminal (SIGHUP) is one under torchrun alone, whose agent kills all ranks after it.
    """
    return EXIT_CODES | ({signal.SIGHUP: 129} if under_torchrun() else {})


def leave_now(number: int) -> None:
    """Exit without clean-up, with the exit code of a signal."""
    leave(exit_codes().get(signal.Signals(number), 128 + number))


def leave(code: int) -> None:
    """Exit with a code; the code of SIGINT by the signal itself."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    if code == EXIT_CODES[signal.SIGINT]:
        die_of_interrupt()
    os._exit(code)


def die_of_interrupt() -> None:
    """Die of SIGINT itself: a shell shows 130, and ends the loop that the program runs in."""
    import ctypes

    # Python's own function works in the main thread alone.
    ctypes.CDLL(None).signal(int(signal.SIGINT), None)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
    os.kill(os.getpid(), signal.SIGINT)


class StopRequests:
    """Context in which stop signals are requests.

    The first one leaves by `SystemExit`, unless `saves` is set: then it waits in `received` for
    training to answer it. A second one leaves at once, also while a native call keeps Python
    from its handlers: a thread of its own receives it.
    """

    def __init__(
        self,
        leave: Callable[[int], Any] = leave_now,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._leave, self._now = leave, now
        self._codes: dict[signal.Signals, int] = {}
        self._before: dict[signal.Signals, Any] = {}
        self._heard = threading.Event()
        self.received = 0
        self.saves = False
        self.began = time.monotonic()
        """When the program began."""

    def __enter__(self) -> "StopRequests":
        self.received, self.saves, self._codes = 0, False, exit_codes()
        self.began = time.monotonic()
        self._heard = threading.Event()
        self._mask = signal.pthread_sigmask(signal.SIG_BLOCK, ())
        self._before = {number: signal.signal(number, self._handle) for number in self._codes}
        read, self._write = os.pipe()
        os.set_blocking(self._write, False)
        self._wakeup_before = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        threading.Thread(target=self._watch, args=(read, self._heard), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        # An error inside a batch leaves the signals blocked.
        signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)
        for number, handler in self._before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._wakeup_before)
        self._heard.set()
        os.close(self._write)

    def code(self, number: int) -> int:
        """Return the exit code of a signal."""
        return self._codes.get(signal.Signals(number), 0)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self._heard.set()
        if not self.received:
            self.received = number
            if not self.saves:
                raise SystemExit(self.code(number))

    def _watch(self, pipe: int, heard: threading.Event) -> None:
        first = since = 0
        while byte := os.read(pipe, 1):
            number = byte[0]
            if number not in self._codes:
                continue
            if not first:
                first, since = number, self._now()
                if not self.saves and not heard.wait(DEAF):
                    self._leave(first)
            elif not self._repeats(number, first, self._now() - since):
                self._say_that_nothing_is_saved(number)
                self._leave(first)
        os.close(pipe)

    def _repeats(self, number: int, first: int, seconds: float) -> bool:
        interrupt = number == signal.SIGINT and not under_torchrun()
        return number == first and seconds < (REPEATED_INTERRUPT if interrupt else REPEAT)

    def _say_that_nothing_is_saved(self, number: int) -> None:
        line = (
            f"\n{signal.Signals(number).name}, the second signal: left at once; the same command "
            "goes on from the newest checkpoint"
        )
        # One process of a node speaks, and a console that does not take it must not keep it.
        rank = os.environ.get("LOCAL_RANK") or os.environ.get("SLURM_LOCALID", "0")
        if self.saves and rank == "0":
            said = threading.Thread(target=print, args=(line,), kwargs={"file": sys.stderr})
            said.daemon = True
            said.start()
            said.join(DEAF)


# The wake-up pipe is inherited, and what another process receives is not for this one.
os.register_at_fork(after_in_child=lambda: signal.set_wakeup_fd(-1))


stop = StopRequests()
"""The stop requests of this process: signals belong to the process as a whole."""
