"""Parent process: a run ends with the process that started it, and that with its ranks."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

from callbacks.processes.stop_requests import EXIT_CODES, under_torchrun
from data.system.processes import die_with

# Process id of the rank that starts the others, for these.
VARIABLE = "RELIGHT_PARENT"
# Process id of the drill that starts a run, for that run alone.
DRILL = "RELIGHT_DRILL"
# Seconds between looks at the ranks, and those that a first rank has to end by itself.
LOOK, PATIENCE = 0.5, 5.0


def die_with_parent() -> None:
    """End with the process that started this one: torchrun's agent, the first rank or a drill.

    This comes first in a process: a parent that is gone already could not be told from another.
    """
    parent, drill = os.environ.get(VARIABLE), os.environ.pop(DRILL, None)
    if drill is not None:
        die_with(int(drill))
    elif under_torchrun():
        agent = os.getppid()
        # torchrun hands nothing over, but makes each rank the leader of a session.
        if os.getsid(0) == os.getpid() and not is_agent(agent):
            os._exit(1)
        die_with(agent)
    elif parent is not None and os.environ.get("LOCAL_RANK", "0") != "0":
        die_with(int(parent))


def is_agent(process: int) -> bool:
    """Whether a process may be torchrun's agent: it has loaded torch, or does not let us look.

    Orphans belong to init, which often does not let us look either.
    """
    place = Path(f"/proc/{process}")
    try:
        return b"torch" in (place / "maps").read_bytes()
    except OSError:
        return process != 1 or b"torch" in (place / "cmdline").read_bytes()


def hand_over_id() -> None:
    """Pass the id of this process to the ranks that it starts."""
    os.environ[VARIABLE] = str(os.getpid())


def lost_rank(ranks: list[subprocess.Popen]) -> tuple[str, int] | None:
    """Return a description of the rank that ended early, and the exit code to use."""
    for number, rank in enumerate(ranks, 1):
        code = rank.poll()
        if code is None or code == 0:
            continue
        how = f"ended with exit code {code}"
        if code < 0:
            how = f"was killed by {signal.Signals(-code).name}"
        if code == -signal.SIGKILL:
            how += ", as the system does when memory runs out"
        words = (
            f"rank {number} (process {rank.pid}) {how}; the same command goes on from the newest "
            "checkpoint"
        )
        return words, code if code in (2, *EXIT_CODES.values()) else 1
    return None


def watch_ranks(ranks: list[subprocess.Popen]) -> None:
    """End this process, the first rank, when one that it started ends before its time.

    A collective that the other one misses may wait for half an hour.
    """

    def watch() -> None:
        while (lost := lost_rank(ranks)) is None:
            time.sleep(LOOK)
        # Mostly this rank fails at the same, or at the lost connection, and says so itself.
        time.sleep(PATIENCE)
        words, code = lost
        print(f"error: {words}", file=sys.stderr, flush=True)
        for rank in ranks:
            rank.kill()
        os._exit(code)

    threading.Thread(target=watch, name="ranks", daemon=True).start()
