"""metrics.csv: one row a logged step, each step once, however often the run was killed."""

import csv
import io
import time
from argparse import Namespace
from pathlib import Path
from typing import Any, cast

from lightning.fabric.loggers.logger import rank_zero_experiment
from lightning.pytorch import Trainer
from lightning.pytorch.loggers import Logger, TensorBoardLogger
from lightning.pytorch.utilities import rank_zero_only

from callbacks.run_folder import replace_text


def resume_logs(trainer: Trainer) -> None:
    """Have the loggers forget what lies past the step that the run goes on from."""
    for logger in trainer.loggers:
        if hasattr(logger, "resume_at"):
            cast(Any, logger).resume_at(trainer.global_step)


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
        kept = [row for row in self._read() if int(row["step"]) <= step]
        self._last = int(kept[-1]["step"]) if kept else None
        if kept:
            self._write(kept)
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

    def _write(self, rows: list[dict[str, Any]]) -> None:
        text = io.StringIO()
        writer = csv.DictWriter(text, self._columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
        replace_text(self.path, text.getvalue())

    @rank_zero_only
    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        if self._row and self._row["step"] != step:
            self.save()
        self._row |= {"step": step} | metrics

    @rank_zero_only
    def save(self) -> None:
        """Put the row of the current step on disk."""
        if not self._row:
            return
        new = [name for name in self._row if name not in self._columns]
        again = self._row["step"] == self._last
        if new or again or not self.path.exists():
            rows = self._read()
            if again:
                self._row = {k: v for k, v in rows.pop().items() if v != ""} | self._row
            self._columns += new
            self._write([*rows, self._row])
        else:
            with self.path.open("a", encoding="utf-8", newline="") as file:
                csv.DictWriter(file, self._columns, lineterminator="\n").writerow(self._row)
        self._last, self._row = self._row["step"], {}

    def finalize(self, status: str) -> None:
        self.save()


class SeamlessTensorBoard(TensorBoardLogger):
    """One event stream for the whole life of a run, without the rows that a kill left behind."""

    def __init__(self, root: Path) -> None:
        super().__init__(root, name="", version="tensorboard")

    @property
    @rank_zero_experiment
    def experiment(self) -> Any:
        # Lightning asks at set-up, before the position is known, and the answer must purge.
        return super().experiment if "purge_step" in self._kwargs else None

    @rank_zero_only
    def resume_at(self, step: int) -> None:
        """Have the page drop all rows past a step; to be called before the first figure."""
        self._kwargs["purge_step"] = step + 1
        # The page reads event files by the time in their names. After a clock was set back the new
        # one would come first, and the purge would be of nothing.
        now = int(time.time())
        files = sorted(Path(self.log_dir).glob("events.out.tfevents.*"))
        late = [path for path in files if int(path.name.split(".")[3]) >= now]
        for place, path in enumerate(late):
            parts = path.name.split(".")
            parts[3] = f"{now - len(late) + place:010d}"
            path.rename(path.with_name(".".join(parts)))

    @rank_zero_only
    def save(self) -> None:
        """Put what was logged on disk: rows not flushed die with a kill."""
        if self._experiment is not None:
            self._experiment.flush()
