"""metrics.csv: one row a logged step, each step once, however often the run was killed."""

import csv
import io
import os
from argparse import Namespace
from pathlib import Path
from typing import Any, cast

from lightning.pytorch import Trainer
from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities import rank_zero_only

from callbacks.trainer import announce
from data.atomic import replace_text, sync


def resume_logs(trainer: Trainer) -> None:
    """Have the loggers forget what lies past the step that the run goes on from."""
    for logger in trainer.loggers:
        if hasattr(logger, "resume_at"):
            cast(Any, logger).resume_at(trainer.global_step)


def save_logs(trainer: Trainer) -> None:
    """Have the loggers put their figures on disk: what follows may rely on them."""
    for logger in trainer.loggers:
        logger.save()
        if hasattr(logger, "sync"):
            cast(Any, logger).sync()


class MetricsCSV(Logger):
    """Logger that merges all figures of a step into one row.

    A row is on disk once a later step is logged or `save` was called. A figure that appears for
    the first time adds a column, for which the file is rewritten.
    """

    def __init__(self, root: Path) -> None:
        super().__init__()
        self.path = root / "metrics.csv"
        self._columns = ["step"]
        self._row: dict[str, Any] = {}
        self._last: int | None = None  # step of the last row on disk
        self._waiting: list[dict[str, Any]] = []  # rows that could not be written yet

    @property
    def name(self) -> str:
        return "csv"

    @property
    def version(self) -> str:
        return ""

    def log_hyperparams(
        self, params: dict[str, Any] | Namespace, *args: Any, **kwargs: Any
    ) -> None:
        """Nothing: they stand in config.yaml."""

    @rank_zero_only
    def resume_at(self, step: int) -> None:
        """Forget the rows past a step: they will be trained again. A torn last line goes too."""
        self._row, self._waiting = {}, []
        kept = [row for row in self._read() if int(row["step"]) <= step]
        self._last = int(kept[-1]["step"]) if kept else None
        if kept:
            self._write(kept, self._columns)
        else:
            self._columns = ["step"]
            self.path.unlink(missing_ok=True)

    def _read(self) -> list[dict[str, Any]]:
        if not self.path.exists():
            return []
        with self.path.open(encoding="utf-8", newline="") as file:
            lines = [line for line in file if line.endswith("\n")]
        reader = csv.DictReader(lines)
        rows = [row for row in reader if None not in row.values() and row["step"].isdecimal()]
        self._columns = list(reader.fieldnames or ["step"])
        return rows

    def _write(self, rows: list[dict[str, Any]], columns: list[str]) -> None:
        text = io.StringIO()
        writer = csv.DictWriter(text, columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
        replace_text(self.path, text.getvalue())
        self._columns = columns

    @rank_zero_only
    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        if self._row and self._row["step"] != step:
            self.save()
        self._row |= {"step": step} | metrics

    @rank_zero_only
    def save(self) -> None:
        """Put the row of the current step on disk."""
        if self._row:
            self._waiting.append(self._row)
            self._row = {}
        try:
            while self._waiting:
                self._put(self._waiting[0])
                self._last = self._waiting.pop(0)["step"]
        except OSError as error:
            # A full disk must not end a run: what follows may find room again.
            announce(f"warning: {len(self._waiting)} rows not written to {self.path} yet: {error}")

    @rank_zero_only
    def sync(self) -> None:
        """Return when the saved rows outlive a power failure."""
        try:
            sync(self.path)
        except FileNotFoundError:
            pass  # nothing was logged yet
        except OSError as error:
            announce(f"warning: {self.path} may lose rows in a power failure: {error}")

    def _put(self, row: dict[str, Any]) -> None:
        new = [name for name in row if name not in self._columns]
        if new or row["step"] == self._last or not self.path.exists():
            rows = self._read()
            if rows and int(rows[-1]["step"]) == row["step"]:
                row = {k: v for k, v in rows.pop().items() if v != ""} | row
            self._write([*rows, row], [*self._columns, *new])
            return
        size = self.path.stat().st_size
        try:
            with self.path.open("a", encoding="utf-8", newline="") as file:
                csv.DictWriter(file, self._columns, lineterminator="\n").writerow(row)
        except OSError:
            os.truncate(self.path, size)  # of half a row
            raise

    def finalize(self, status: str) -> None:
        self.save()
