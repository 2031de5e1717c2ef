"""TensorBoard without a seam: one event stream a run, and a page that is laid out."""

import contextlib
import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from lightning.fabric.loggers.logger import rank_zero_experiment
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.utilities import rank_zero_only
from torch.utils.tensorboard.summary import hparams

from callbacks.trainer import announce
from data.atomic import sync

# Curves that belong into one picture, under Custom Scalars.
LAYOUT = {
    "run": {
        "loss": ["Multiline", ["train/loss", "val/loss"]],
        "learning rate": ["Multiline", ["optim/lr"]],
        "gradient norm and where it is clipped": [
            "Multiline",
            ["optim/grad_norm", "optim/clip_at"],
        ],
        "tokens/s": ["Multiline", ["throughput/tokens_per_sec"]],
        "MFU": ["Multiline", ["throughput/mfu"]],
    }
}


class SeamlessTensorBoard(TensorBoardLogger):
    """One event stream for the whole life of a run, without the rows that a kill left behind."""

    def __init__(self, root: Path, plan: Callable[[], str] | None = None) -> None:
        super().__init__(root, name="", version="tensorboard", default_hp_metric=False)
        self._plan = plan
        self._fails = False
        self._step = 0  # of the last figures

    @property
    @rank_zero_experiment
    def experiment(self) -> Any:
        # Lightning asks at set-up, before the position is known, and the answer must purge.
        return super().experiment if "purge_step" in self._kwargs else None

    @rank_zero_only
    def resume_at(self, step: int) -> None:
        """Have the page drop all rows past a step; to be called before the first figure."""
        # Step 0 has the page's own texts, which a start at step 0 writes again.
        self._kwargs["purge_step"] = step + 1 if step else 0
        self._put_in_order()
        if step == 0:
            self.experiment.add_custom_scalars(LAYOUT)
            if self._plan is not None:
                self.show_text("plan", self._plan(), 0)

    @rank_zero_only
    def log_hyperparams(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, params: dict[str, Any] | Namespace, *args: Any, **kwargs: Any
    ) -> None:
        """Show settings beside the validation loss, under HParams."""
        # Lightning's own adds a made-up value to the curve of each figure it is given.
        plain = self._sanitize_params(vars(params) if isinstance(params, Namespace) else params)
        writer = self.experiment._get_file_writer()
        for summary in hparams(plain, {"val/loss": 0.0}):
            writer.add_summary(summary)

    def _files(self) -> list[Path]:
        return list(Path(self.log_dir).glob("events.out.tfevents.*"))

    def _put_in_order(self) -> None:
        # The page reads event files by the time in their names. After a clock was set back the new
        # one would come first, and the purge would be of nothing.
        now = int(time.time())
        late = [path for path in sorted(self._files()) if int(path.name.split(".")[3]) >= now]
        for place, path in enumerate(late):
            parts = path.name.split(".")
            parts[3] = f"{now - len(late) + place:010d}"
            path.rename(path.with_name(".".join(parts)))

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        self._step = self._step if step is None else step
        with self._survived():
            super().log_metrics(metrics, step)

    @rank_zero_only
    def show_text(self, tag: str, text: str, step: int) -> None:
        """Show a text with its lines and indents, under Text."""
        with self._survived():
            # Four spaces keep them.
            lines = "\n".join(f"    {line}" for line in text.splitlines())
            self.experiment.add_text(tag, lines, step)

    @rank_zero_only
    def save(self) -> None:
        """Put what was logged on disk: rows not flushed die with a kill."""
        with self._survived():
            if self._experiment is not None:
                self._experiment.flush()

    @rank_zero_only
    def sync(self) -> None:
        """Return when the saved events outlive a power failure."""
        with self._survived():
            for path in sorted(self._files())[-1:]:
                sync(path)

    @rank_zero_only
    def finalize(self, status: str) -> None:
        with self._survived():
            super().finalize(status)

    @contextlib.contextmanager
    def _survived(self) -> Iterator[None]:
        """A full disk must not end a run: its writer is dead, and the next step has another."""
        try:
            yield
            self._fails = False
        except (OSError, ValueError) as error:
            # Lightning wraps whatever the writer raises.
            cause = error.__cause__ if isinstance(error, ValueError) else error
            if not isinstance(cause, OSError):
                raise
            self._experiment = None
            # What is on the page stays.
            self._kwargs["purge_step"] = self._step + 1
            if not self._fails:
                announce(f"warning: the curves in {self.log_dir} have a gap: {cause}")
            self._fails = True
