"""TensorBoard's event file, written without a thread; events that find no room wait in memory."""

import itertools
import os
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

from tensorboard.compat.proto import event_pb2
from tensorboard.summary.writer.record_writer import RecordWriter
from torch.utils.tensorboard import FileWriter

from callbacks.run.patches import PatchedSummaryWriter
from data.system.atomic import make_folder, naming, sync

FLUSH_SECONDS = 30.0
# Bytes of events that wait in memory while the disk refuses them; later ones are lost.
MOST_BYTES = 100_000_000

_number = itertools.count()
_proto: Any = event_pb2  # its classes are made at import


class EventFile:
    """One event file of a folder; the interface is that of TensorBoard's `EventFileWriter`.

    TensorBoard's own writes in a thread, which ends with a traceback when the disk is full, and
    all that it held is lost.

    Args:
        told: called after each write with its error, or None.
    """

    def __init__(self, folder: Path, told: Callable[[OSError | None], None]) -> None:
        self.folder, self.told = folder, told
        # TensorBoard reads the files in the order of these names.
        name = f"{int(time.time()):010d}.{platform.node()}.{os.getpid()}.{next(_number)}"
        self.path = folder / f"events.out.tfevents.{name}"
        self._records = RecordWriter(self)
        self._waiting = bytearray()
        self._size = 0  # of what is whole in the file
        self.lost = 0  # records
        self._flushed = 0.0
        self.add_event(_proto.Event(wall_time=time.time(), file_version="brain.Event:2"))

    def get_logdir(self) -> str:
        """Folder of the file."""
        return str(self.folder)

    def add_event(self, event: Any) -> None:
        """Queue an event; write the queue if the last write is some seconds ago."""
        self._records.write(event.SerializeToString())
        if time.monotonic() - self._flushed > FLUSH_SECONDS:
            self.flush()

    def write(self, data: bytes) -> None:
        """Queue the bytes of a record; drop them if the queue is full."""
        if len(self._waiting) < MOST_BYTES:
            self._waiting += data
        else:
            self.lost += 1

    def flush(self) -> None:
        """Write the queue; after a failed write it stays for the next one."""
        self._flushed = time.monotonic()
        try:
            make_folder(self.folder)
            mode = "r+b" if self._size and self.path.exists() else "wb"
            with naming(self.path), self.path.open(mode) as file:
                # Overwrites a partial record of a failed write.
                start = file.seek(self._size if mode == "r+b" else 0)
                file.write(self._waiting)
            # Known when the file is closed without an error.
            self._size = start + len(self._waiting)
            self._waiting.clear()
            self.told(None)
        except OSError as error:
            self.told(error)

    def sync(self) -> None:
        """Make the written events durable."""
        try:
            sync(self.path)
        except OSError as error:
            self.told(error)

    def close(self) -> None:
        """Write the queue; later events are accepted too."""
        self.flush()


class Writer(FileWriter):
    """PyTorch's `FileWriter` over an `EventFile`; its own constructor would start a thread."""

    def __init__(self, events: EventFile) -> None:
        self.event_writer = cast(Any, events)


class Page(PatchedSummaryWriter):
    """PyTorch's `SummaryWriter` over an `EventFile`, which hides older rows from a step on."""

    def __init__(self, events: EventFile, purge_step: int) -> None:
        super().__init__(Writer(events), purge_step)
        begins = _proto.SessionLog(status=_proto.SessionLog.START)
        for event in (
            _proto.Event(step=purge_step, file_version="brain.Event:2"),
            _proto.Event(step=purge_step, session_log=begins),
        ):
            events.add_event(event)
