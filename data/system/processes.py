"""Child processes: they end with their parent, and stop signals are left to the parent."""

import contextlib
import ctypes
import os
import signal
import sys
import threading
from collections.abc import Iterator

# A terminal, systemd and SLURM send these to all processes of a run.
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)


def die_with(parent: int) -> None:
    """Have the kernel kill this process when its parent ends, however that ends (Linux)."""
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:  # it ended before the call
        os.kill(os.getpid(), signal.SIGKILL)


@contextlib.contextmanager
def signals_held() -> Iterator[None]:
    """Block the stop signals in this thread; processes started meanwhile never receive them."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def start_worker(parent: int, worker_id: int = 0) -> None:
    """Prepare a data worker whose stop signals are blocked: only its parent ends it."""
    die_with(parent)

    def wait_for_parent() -> None:
        while signal.sigwaitinfo({signal.SIGTERM}).si_pid != parent:
            pass
        os._exit(0)

    # multiprocessing ends workers by the parent's SIGTERM, and waits for them when it exits.
    if hasattr(signal, "sigwaitinfo"):
        threading.Thread(target=wait_for_parent, daemon=True).start()
    else:  # macOS
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
