"""TensorBoard without a seam: one event stream a run, and a page that is laid out."""

import os
import re
import time
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lightning.fabric.loggers.logger import rank_zero_experiment
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.utilities import rank_zero_only
from torch.utils.tensorboard.summary import hparams

from callbacks.loggers.event_file import EventFile, Page
from callbacks.run.announce import announce
from callbacks.run.folder import set_aside

EVENTS = re.compile(r"events\.out\.tfevents\.(\d+)\.")

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
    """One event stream per run over all its starts, without rows of repeated steps."""

    def __init__(self, root: Path, plan: Callable[[], str] | None = None) -> None:
        super().__init__(root, name="", version="tensorboard", default_hp_metric=False)
        self._folder = root / "tensorboard"
        self._plan = plan
        self._purge_step: int | None = None
        self._events: EventFile | None = None
        self._page: Page | None = None
        self._fails = False

    @property
    def log_dir(self) -> str:
        # Lightning's own expands what looks like a variable or a home folder.
        return str(self._folder)

    @property
    @rank_zero_experiment
    def experiment(self) -> Any:
        # Lightning asks at set-up, before the position is known, and the answer must purge.
        if self._page is None and self._purge_step is not None:
            self._events = EventFile(self._folder, self._tell)
            self._page = Page(self._events, self._purge_step)
        return self._page

    def _tell(self, error: OSError | None) -> None:
        if error is not None and not self._fails:
            announce(
                f"warning: TensorBoard's figures cannot be written: {error}; the run goes on, and "
                "they wait in memory until that is mended"
            )
        self._fails = error is not None

    @rank_zero_only
    def resume_at(self, step: int) -> None:
        """Purge all rows after a step; call it before the first metric."""
        # Step 0 has the page's own texts, which a start at step 0 writes again.
        self._purge_step = step + 1 if step else 0
        try:
            if os.path.lexists(self._folder) and not self._folder.is_dir():
                aside = set_aside(self._folder)
                announce(f"warning: {self._folder} is no folder: set aside as {aside}")
            self._put_in_order()
        except OSError as error:
            self._tell(error)
        if step == 0:
            self.experiment.add_custom_scalars(LAYOUT)
            if self._plan is not None:
                self.show_text("plan", self._plan(), 0)

    @rank_zero_only
    def log_hyperparams(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, params: dict[str, Any] | Namespace, *args: Any, **kwargs: Any
    ) -> None:
        """Show settings beside the validation loss, under HParams."""
        # Lightning's own adds a made-up value to the curve of each metric it is given.
        params = vars(params) if isinstance(params, Namespace) else params
        plain = {
            name: value if isinstance(value, bool | int | float | str) else str(value)
            for name, value in params.items()
        }
        for summary in hparams(plain, {"val/loss": 0.0}):
            self.experiment.file_writer.add_summary(summary)

    def _names(self) -> list[str]:
        return os.listdir(self._folder) if self._folder.exists() else []

    def _put_in_order(self) -> None:
        # The page reads event files by the time in their names. After a clock was set back the new
        # one would come first, and the purge would be of nothing.
        now, found = int(time.time()), [EVENTS.match(path) for path in self._names()]
        late = sorted(match.string for match in found if match and int(match[1]) >= now)
        for place, name in enumerate(late):
            parts = name.split(".")
            parts[3] = f"{now - len(late) + place:010d}"
            (self._folder / name).rename(self._folder / ".".join(parts))

    @rank_zero_only
    def show_text(self, tag: str, text: str, step: int) -> None:
        """Show a text with its lines and indents, under Text."""
        # Markdown keeps lines that are indented by four spaces.
        lines = "\n".join(f"    {line}" for line in text.splitlines())
        self.experiment.add_text(tag, lines, step)

    @rank_zero_only
    def save(self) -> None:
        """Write logged events to disk: events in memory are lost with a kill."""
        if self._events is not None:
            self._events.flush()

    @rank_zero_only
    def sync(self) -> None:
        """Make the saved events durable."""
        if self._events is not None and not self._fails:
            self._events.sync()

    @rank_zero_only
    def finalize(self, status: str) -> None:
        self.save()
        if self._fails:
            announce(f"warning: the curves in {self._folder} end early")
        elif self._events is not None and self._events.lost:
            announce(f"warning: the curves in {self._folder} have gaps")
