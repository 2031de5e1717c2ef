"""Errors of a command: one line and an exit code for causes outside this code."""

import os
import sys
import traceback
from opcode import opmap
from pathlib import Path
from types import TracebackType

HOME = Path(__file__).resolve().parents[2]
PARTS = ("cli.py", "callbacks", "data", "lm")
WORKER_LOST = (
    "a process that reads data was killed, perhaps because memory ran out: lower data.num_workers "
    "or free memory, and give the same command again, which goes on from the newest checkpoint"
)


def report(error: Exception) -> int:
    """Print an error and return the exit code: 2 for a mistake of the user, else 1."""
    by_user = isinstance(error, ValueError) and raised_here(error)
    of_run = isinstance(error, OSError) or (isinstance(error, RuntimeError) and raised_here(error))
    # Lightning's word for a mistake in the Trainer's arguments; looked up without an import.
    by_user = by_user or type(error).__name__ == "MisconfigurationException"
    # EarlyStopping of a metric that is not logged, DeviceStatsMonitor without psutil.
    by_user = by_user or raised_by(error, "lightning.pytorch.callbacks")
    # What a callback knows to do about an error of PyTorch's, whose own text runs to pages.
    notes = getattr(error, "__notes__", [])
    if type(error).__module__.partition(".")[0] in ("wandb", "swanlab"):
        # Nobody is logged in, or no network is there.
        notes = ["tracker.offline true keeps figures here, tracker.name null does without"]
    if isinstance(error, RuntimeError) and str(error).startswith("DataLoader worker"):
        notes = [WORKER_LOST]
    peers, lost = None, False
    if "torch.distributed" in sys.modules:
        from callbacks.processes.peers import is_lost, started_with_others

        peers = started_with_others()
        lost = peers is not None and is_lost(error)
    if os.environ.get("RELIGHT_TRACEBACK") == "1" or not (by_user or of_run or notes or lost):
        traceback.print_exception(error)
    text = str(error).strip() or type(error).__name__
    text = text.splitlines()[0] if notes else " ".join(text.split())
    lines, code = "\n".join([f"error: {text}", *notes]), 2 if by_user else 1
    if peers is not None:
        return peers.settle(lines, code, lost)
    print(lines, file=sys.stderr)
    return code


def raised_by(error: Exception, package: str) -> bool:
    """Whether a `raise` in a module of a package made the error."""
    place = last_frame(error)
    if place is None or not f"{place.tb_frame.f_globals.get('__name__')}.".startswith(
        f"{package}."
    ):
        return False
    return place.tb_frame.f_code.co_code[place.tb_lasti] == opmap["RAISE_VARARGS"]


def last_frame(error: Exception) -> TracebackType | None:
    """Return the place that an error was raised at."""
    place = error.__traceback__
    while place is not None and place.tb_next is not None:
        place = place.tb_next
    return place


def raised_here(error: Exception) -> bool:
    """Whether a `raise` of our own code made the error, rather than something that it called."""
    place = last_frame(error)
    if place is None:
        return False
    code = place.tb_frame.f_code
    path = Path(code.co_filename).resolve()
    if not path.is_relative_to(HOME) or path.relative_to(HOME).parts[0] not in PARTS:
        return False
    # The instruction tells; source lines may have been edited since the start.
    return code.co_code[place.tb_lasti] == opmap["RAISE_VARARGS"]
