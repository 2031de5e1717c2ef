"""Experiment trackers beside TensorBoard and metrics.csv: one run of theirs for the whole run."""

import importlib.util
import json
import secrets
import string
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from lightning.pytorch import Callback
from lightning.pytorch.loggers import Logger

from callbacks.checkpoint.files import checkpoints, read_checkpoint
from callbacks.run.trainer import Trainer
from lm.module import LMModule

KEY = "tracker_id"
CHARACTERS = string.ascii_lowercase + string.digits


@dataclass(frozen=True, kw_only=True)
class Tracker:
    """Where else metrics go."""

    name: Literal["wandb", "swanlab"] | None = None
    """Weights & Biases or SwanLab, each a package to install. Unset: none."""
    project: str = "relight"
    """Project that the run is shown in."""
    run: str | None = None
    """Name of the run there. Unset: that of its folder."""
    offline: bool = False
    """Keep everything on this machine, to be sent later by the tracker's own command."""


def run_id(root: Path) -> str:
    """The tracker's name for a run: that of its earlier starts, or a new one."""
    try:
        known = json.loads((root / "run.json").read_text(encoding="utf-8")).get(KEY)
    except (OSError, ValueError, AttributeError):
        known = None
    if not isinstance(known, str):
        known = None
        for _, path in checkpoints(root)[:1]:
            try:
                known = read_checkpoint(path).get(KEY)
            except (OSError, ValueError):  # damaged; the resume says so
                known = None
    # As long and as plain as both trackers take.
    return known or "".join(secrets.choice(CHARACTERS) for _ in range(21))


def make_logger(settings: Tracker, root: Path, own: str) -> Logger:
    """The tracker's logger, which goes on with the run of that name if there is one.

    Raises:
        ValueError: its package is not installed.
    """
    assert settings.name is not None
    if importlib.util.find_spec(settings.name) is None:
        raise ValueError(
            f"tracker.name is {settings.name}, but that package is not installed: pip install "
            f"-e '.[{settings.name}]', or leave tracker.name out"
        )
    root.mkdir(parents=True, exist_ok=True)
    name = settings.run or root.resolve().name
    if settings.name == "wandb":
        from lightning.pytorch.loggers import WandbLogger

        return WandbLogger(
            name=name,
            save_dir=root,
            project=settings.project,
            id=own,
            offline=settings.offline,
            resume="allow",
        )
    from swanlab.integration.pytorch_lightning import (  # pyright: ignore[reportMissingImports]
        SwanLabLogger,
    )

    return SwanLabLogger(
        project=settings.project,
        experiment_name=name,
        logdir=str(root / "swanlab"),
        mode="offline" if settings.offline else "cloud",
        id=own,
        resume="allow",
    )


class TrackedRun(Callback):
    """Keeps the tracker's name for the run in its checkpoints; run.json has it too."""

    def __init__(self, own: str) -> None:
        self.own = own

    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: LMModule, checkpoint: dict[str, Any]
    ) -> None:
        checkpoint[KEY] = self.own
