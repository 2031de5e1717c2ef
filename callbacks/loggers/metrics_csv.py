"""metrics.csv: one row per logged step, each step once, however often the run was killed."""

import contextlib
import csv
import io
import os
from argparse import Namespace
from collections import deque
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities import rank_zero_only

from callbacks.run.announce import announce
from callbacks.run.folder import set_aside
from callbacks.run.trainer import Trainer
from data.system.atomic import naming, replace_text, sync

# Rows that wait in memory while the disk refuses them: some 100 MB.
MOST_ROWS = 50_000


def resume_logs(trainer: Trainer) -> None:
    """Drop logged rows after the step that the run resumes from."""
    for logger in trainer.loggers:
        if (resume_at := getattr(logger, "resume_at", None)) is not None:
            resume_at(trainer.global_step)


def save_logs(trainer: Trainer) -> None:
    """Write all logged metrics to disk durably."""
    for logger in trainer.loggers:
        logger.save()
        if (flush := getattr(logger, "sync", None)) is not None:
            flush()


class Table:
    """Valid columns and rows of a metrics.csv.

    Args:
        text: content of the file.
        last: step of the newest row that belongs to the run; later rows are dropped.
    """

    def __init__(self, text: str, last: int) -> None:
        self.columns: list[str] = []
        self.fault: str | None = None
        """The first invalid line and why it is invalid; invalid lines are left out."""
        rows: dict[int, dict[str, str]] = {}
        # Spreadsheets begin UTF-8 with a mark.
        lines = list(io.StringIO(text.removeprefix("\ufeff"), newline=""))
        torn = [lines.pop()] if lines and not lines[-1].endswith(("\n", "\r")) else []
        reader = csv.reader(lines, strict=True)
        try:
            for fields in reader:
                if not self.columns:
                    self.columns = checked_header(fields)
                    continue
                try:
                    row = checked_row(fields, self.columns)
                    if rows.setdefault(int(row["step"]), row) is not row:
                        raise ValueError(f"step {row['step']} is there twice")
                except ValueError as error:
                    self.fault = self.fault or f"line {reader.line_num}: {error}"
            # A kill tears the newest row, whose step is trained again. A row that looks whole
            # and is older was left so by an editor, or its last metric is cut.
            for fields in csv.reader(torn) if self.columns else ():
                with contextlib.suppress(ValueError):
                    if int(checked_row(fields, self.columns)["step"]) <= last:
                        self.fault = self.fault or "its last line has no end"
        except (csv.Error, ValueError) as error:
            self.fault = self.fault or f"line {reader.line_num}: {error}"
        if not rows:
            self.fault = self.fault or "it has no row"
        self.rows = [rows[step] for step in sorted(rows) if step <= last]


def checked_header(fields: list[str]) -> list[str]:
    """Return the columns that a header names.

    Raises:
        ValueError: the line is not a header of metrics.csv.
    """
    if "step" not in fields:
        raise ValueError(f"no column is called step in {','.join(fields)[:60]!r}")
    if len(set(fields)) < len(fields):
        raise ValueError("two columns have one name")
    return fields


def checked_row(fields: list[str], columns: list[str]) -> dict[str, str]:
    """Return the values of a line by column.

    Raises:
        ValueError: the line is not a row of metrics.csv.
    """
    if len(fields) != len(columns):
        raise ValueError(f"{len(fields)} values for {len(columns)} columns")
    row = dict(zip(columns, fields, strict=True))
    if not row["step"].isdecimal():
        raise ValueError(f"step is {row['step']!r}, no whole number")
    for name, value in row.items():
        try:
            float(value or 0)
        except ValueError:
            raise ValueError(f"{name} is {value!r}, no number") from None
    return row


class MetricsCSV(Logger):
    """Logger that merges all metrics of a step into one row.

    A row is on disk once a later step is logged or `save` was called. A metric that appears for
    the first time adds a column, for which the file is rewritten. A file that another program
    changed is set aside where a line of it is no row, and its other rows go on in a new file.
    """

    def __init__(self, root: Path) -> None:
        super().__init__()
        self.path = root / "metrics.csv"
        self._columns = ["step"]
        self._row: dict[str, Any] = {}
        self._last: int | None = None  # step of the last row on disk
        # Rows that could not be written yet; the oldest make room for new ones.
        self._waiting: deque[dict[str, Any]] = deque(maxlen=MOST_ROWS)
        self._lost = 0
        self._left: Any = None  # the file's state after our last write, None where there is none
        self._fails = False

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
        self._row = {}
        self._waiting.clear()
        try:
            self._load(step)
        except OSError as error:
            self._left = ()
            self._say_waiting(error)

    @rank_zero_only
    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        if self._row and self._row["step"] != step:
            self.save()
        self._row |= {"step": step} | metrics

    @rank_zero_only
    def save(self) -> None:
        """Put the row of the current step on disk."""
        if self._row:
            self._lost += len(self._waiting) == MOST_ROWS
            self._waiting.append(self._row)
            self._row = {}
        try:
            while self._waiting:
                self._put(self._waiting[0])
                self._waiting.popleft()
            self._fails = False
        except OSError as error:
            # A full disk must not end a run: what follows may find room again.
            self._say_waiting(error)

    @rank_zero_only
    def sync(self) -> None:
        """Return when the saved rows outlive a power failure."""
        if self._fails or self._left is None:
            return
        try:
            sync(self.path)
        except OSError as error:
            self._say_waiting(error)

    def finalize(self, status: str) -> None:
        self.save()
        if missing := self._lost + len(self._waiting):
            announce(f"warning: {missing} rows are missing in {self.path}")

    def _say_waiting(self, error: OSError) -> None:
        if not self._fails:
            announce(
                f"warning: metrics.csv cannot be written: {error}; the run goes on, and its rows "
                "wait in memory until that is mended"
            )
        self._fails = True

    def _put(self, row: dict[str, Any]) -> None:
        if self._state() != self._left:
            self._load(row["step"])
        new = [name for name in row if name not in self._columns]
        if new or row["step"] == self._last or self._left is None:
            rows = [] if self._left is None else Table(self._text(), row["step"]).rows
            if rows and int(rows[-1]["step"]) == row["step"]:
                row = {k: v for k, v in rows.pop().items() if v != ""} | row
            self._write([*rows, row], [*self._columns, *new])
        else:
            self._append(row)
        self._last = row["step"]

    def _load(self, last: int) -> None:
        """Load the rows up to a step from an existing file."""
        text, table, fault = None, Table("", last), None
        try:
            if not self.path.is_file() and os.path.lexists(self.path):
                raise ValueError("it is no file")
            text = self._text()
            table = Table(text, last)
            fault = table.fault
        except FileNotFoundError:
            pass
        except (PermissionError, ValueError) as error:
            fault = str(error)
        if fault:
            aside = set_aside(self.path)
            announce(
                f"warning: {self.path} is not as a run leaves it ({fault}): set aside as {aside}; "
                f"{len(table.rows)} rows of it go on in a new one"
            )
        self._last = int(table.rows[-1]["step"]) if table.rows else None
        self._columns = table.columns if table.rows else ["step"]
        if not table.rows:
            self.path.unlink(missing_ok=True)
            self._left = None
        elif fault or text != self._as_text(table.rows, self._columns):
            self._write(table.rows, self._columns)
        else:
            self._left = self._state()

    def _state(self) -> Any:
        try:
            found = self.path.stat()
        except FileNotFoundError:
            return None
        return found.st_ino, found.st_size, found.st_mtime_ns

    def _text(self) -> str:
        return self.path.read_bytes().decode("utf-8")

    def _as_text(self, rows: list[dict[str, Any]], columns: list[str]) -> str:
        text = io.StringIO()
        writer = csv.DictWriter(text, columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
        return text.getvalue()

    def _write(self, rows: list[dict[str, Any]], columns: list[str]) -> None:
        replace_text(self.path, self._as_text(rows, columns))
        self._columns, self._left = columns, self._state()

    def _append(self, row: dict[str, Any]) -> None:
        size = self.path.stat().st_size
        try:
            with naming(self.path), self.path.open("a", encoding="utf-8", newline="") as file:
                csv.DictWriter(file, self._columns, lineterminator="\n").writerow(row)
        except OSError:
            self._left = ()  # to be read again
            os.truncate(self.path, size)  # of half a row
            raise
        self._left = self._state()
