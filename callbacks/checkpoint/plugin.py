"""Lightning's checkpoint plugin: writes in a thread, reads the newest intact file of a folder."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from lightning.fabric.plugins import CheckpointIO

from callbacks.checkpoint.files import read_checkpoint, read_newest, write_checkpoint
from callbacks.checkpoint.state import Copies
from callbacks.run.announce import announce
from callbacks.run.trainer import Trainer


class AtomicCheckpointIO(CheckpointIO):
    """CheckpointIO over the functions of callbacks/checkpoint/files.py.

    A save blocks training for a copy; a thread writes it, and the next save waits for the thread.
    `last` is resolved here, on rank 0 alone.
    """

    def __init__(self, trainer: Trainer, check: Callable[[dict[str, Any]], None]) -> None:
        self.trainer = trainer
        self.check = check
        self._copies = Copies()
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._job: Future[None] | None = None
        self._write: Callable[[], None] | None = None

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None
    ) -> None:
        self._write = None
        try:
            self.wait()
            copy = self._copies.of(checkpoint)
        except (OSError, RuntimeError) as error:
            # Reported by `then`: raised here, it would leave the other ranks waiting at a barrier.
            self._job = Future()
            self._job.set_exception(error)
            return
        self._write = partial(write_checkpoint, copy, Path(path))
        self._job = self._thread.submit(self._write)

    def write_again(self, finish: Callable[[BaseException | None], None]) -> None:
        """Write the last copy once more, then call `finish`; do nothing if copying had failed."""
        if self._write is not None:
            self._job = self._thread.submit(self._write)
            self.then(finish)

    def then(self, finish: Callable[[BaseException | None], None]) -> None:
        """Call `finish` at the end of the write in flight, with its error or None."""
        write = self._job
        assert write is not None
        self._job = self._thread.submit(lambda: finish(write.exception()))

    def wait(self) -> None:
        """Wait for the job in flight, and raise its error."""
        job, self._job = self._job, None
        if job is not None:
            job.result()

    def teardown(self) -> None:
        self.wait()

    def load_checkpoint(
        self, path: Any, map_location: Any = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        found: Path | OSError | ValueError = Path(path)
        checkpoint = None
        if found.is_dir():
            if self.trainer.is_global_zero:
                try:
                    found, checkpoint = read_newest(found, announce)
                except (OSError, ValueError) as error:
                    found = error
            found = self.trainer.strategy.broadcast(found)
            if isinstance(found, OSError):
                raise found
            if isinstance(found, ValueError):
                raise ValueError(str(found))
        if checkpoint is None:
            checkpoint = read_checkpoint(found)
        self.check(checkpoint)
        what = "resuming from" if self.trainer.state.fn == "fit" else "evaluating"
        announce(f"{what} {found} at step {checkpoint['global_step']}")
        return checkpoint

    def remove_checkpoint(self, path: Any) -> None:
        Path(path).unlink(missing_ok=True)
