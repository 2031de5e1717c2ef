"""Moments at which a fire drill has the process killed; inert unless RELIGHT_KILL_AT is set."""

import os
import signal
import threading
from collections import Counter
from typing import IO, Any, cast

from lightning.pytorch import Callback

from callbacks.run.steps import at_step_edge
from callbacks.run.trainer import Trainer
from lm.module import LMModule

VARIABLE = "RELIGHT_KILL_AT"
MOMENTS = (
    "inside accumulation",
    "during validation",
    "while writing",
    "start-up",
    "before fsync",
    "before replace",
    "before retention",
)

SAVED = "before retention"

_reached: Counter[str] = Counter()
_saved = threading.Event()


def reach(moment: str) -> None:
    """Die by SIGKILL when this is the moment, and the time of reaching it, that was asked for.

    RELIGHT_KILL_AT is `<moment>:<n>`, for the n-th time in this process, or `<moment>:<n>:after a
    save`, counted from there. Only the first process of several dies so, and takes the others
    with it.
    """
    asked = os.environ.get(VARIABLE)
    if asked is None or os.environ.get("LOCAL_RANK", "0") != "0":
        return
    name, count, *later = asked.split(":")
    if moment == SAVED:
        _saved.set()
    elif later and not _saved.is_set():
        return
    _reached[moment] += 1
    if name == moment and _reached[moment] == int(count):
        os.kill(os.getpid(), signal.SIGKILL)


class Watched:
    """A file that reaches `while writing` after each part of what is written."""

    def __init__(self, file: IO[bytes]) -> None:
        self.file = file

    def write(self, data: Any) -> int:
        """Write through to the file."""
        count = self.file.write(data)
        self.file.flush()
        reach("while writing")
        return count

    def flush(self) -> None:
        """Flush the file."""
        self.file.flush()


def watched(file: IO[bytes]) -> IO[bytes]:
    """The file itself, or in a drill one that can be interrupted."""
    return cast(IO[bytes], Watched(file)) if VARIABLE in os.environ else file


class Moments(Callback):
    """Reaches the moments that lie in the training loop."""

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LMModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if not at_step_edge(trainer, batch_idx):
            reach("inside accumulation")

    def on_validation_batch_end(
        self,
        trainer: Trainer,
        pl_module: LMModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        reach("during validation")
