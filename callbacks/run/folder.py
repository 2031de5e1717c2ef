"""Run folder: its lock, config.yaml, run.json and contract."""

import contextlib
import hashlib
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from itertools import count
from pathlib import Path
from typing import Any, cast

import torch
from lightning.pytorch import Callback
from lightning.pytorch.cli import SaveConfigCallback
from lightning.pytorch.utilities import rank_zero_only

from callbacks.loggers.trackers import KEY, TrackedRun
from callbacks.processes.console import FILE, keep_log
from callbacks.run.announce import announce
from callbacks.run.steps import is_dry_run
from callbacks.run.trainer import Trainer
from data.system.atomic import replace_text
from data.system.lock import Owner, held
from lm.module import LMModule

PACKAGES = ("relight", "torch", "lightning", "numpy", "tokenizers")


@contextlib.contextmanager
def lock(root: Path) -> Iterator[None]:
    """Hold the run folder for this process, on all nodes that see it.

    A start that writes nothing leaves no empty folder behind.

    Raises:
        ValueError: another process holds it.
    """

    def refuse(owner: Owner) -> None:
        raise ValueError(
            f"{root} is in use by another run ({owner}): two runs must not write to one folder; "
            "stop that one or give another trainer.default_root_dir"
        )

    made = [each for each in (root, *root.parents) if not each.exists()]
    try:
        root.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as error:
        raise ValueError(
            f"trainer.default_root_dir is {root}: {error.filename} is no folder; give another"
        ) from None
    try:
        with held(root, refuse, announce):
            yield
    finally:
        with contextlib.suppress(OSError):  # it is not empty
            for folder in made:
                folder.rmdir()


def set_aside(path: Path) -> Path:
    """Rename a file or folder that something else put into the run folder; return its new path."""
    places = (path.with_name(f"{path.name}.set-aside{(n and f'-{n}') or ''}") for n in count())
    place = next(each for each in places if not os.path.lexists(each))
    path.rename(place)
    return place


def make_room(path: Path) -> None:
    """Set aside anything but a file under the path of a file."""
    if os.path.lexists(path) and not path.is_file():
        announce(f"warning: {path} is no file: set aside as {set_aside(path)}")


def leave(path: Path, text: str) -> None:
    """Write a file that the run does not need; a failure is only a warning."""
    try:
        make_room(path)
        replace_text(path, text)
    except OSError as error:
        announce(f"warning: {path.name} is not written: {error}; the run goes on")


def filesystem_type(path: Path) -> str | None:
    """Return the type of the file system that holds a path, or None without /proc."""
    try:
        mounts = Path("/proc/self/mounts").read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    path = path.resolve()
    points = [(line.split()[1], line.split()[2]) for line in mounts]
    holding = [(len(point), kind) for point, kind in points if path.is_relative_to(point)]
    return max(holding)[1] if holding else None


def volatile_folder(root: Path) -> str | None:
    """Return why a run folder may be lost with the machine, or None."""
    if filesystem_type(root) == "tmpfs":
        return f"{root} is on a tmpfs: it is gone after a reboot"
    if any(root.resolve().is_relative_to(place) for place in ("/tmp", "/var/tmp")):
        return f"{root} is under a temporary folder that systems clean"
    return None


def commit() -> str | None:
    """Return the commit of this checkout, marked if it has local changes."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12"]
    here = Path(__file__).parent
    try:
        result = subprocess.run(command, cwd=here, capture_output=True, text=True, check=False)
    except OSError:  # no git on this machine
        return None
    return result.stdout.strip() or None


class RunConfig(SaveConfigCallback):
    """Writes the resolved configuration of the latest start to the run folder."""

    def setup(self, trainer: Trainer, pl_module: LMModule, stage: str) -> None:
        """Do nothing: a refused start must not change the file."""

    def on_train_start(self, trainer: Trainer, pl_module: LMModule) -> None:
        if trainer.is_global_zero and not is_dry_run(trainer):
            self.save_config(trainer, pl_module, "fit")

    def save_config(self, trainer: Trainer, pl_module: LMModule, stage: str) -> None:
        """Write config.yaml atomically."""
        text = self.parser.dump(self.config, skip_unset=False)
        leave(Path(trainer.default_root_dir) / "config.yaml", text)


class RunRecord(Callback):
    """Writes run.json: versions, commit, contract, and each start."""

    @rank_zero_only
    def on_train_start(self, trainer: Trainer, pl_module: LMModule) -> None:
        if is_dry_run(trainer):
            return
        root = Path(trainer.default_root_dir)
        with contextlib.suppress(OSError):  # the next lines report it
            make_room(root / FILE)
            make_room(root / "run.json")
        if failed := keep_log(root):
            announce(f"warning: {FILE} is not written: {failed}; the run goes on")
        if reason := volatile_folder(root):
            announce(f"warning: {reason}")
        path = root / "run.json"
        starts, tracked = read_record(path)
        start = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "step": trainer.global_step,
            "command": sys.argv,
            "world_size": trainer.world_size,
            "precision": str(trainer.precision),
        }
        record: dict[str, Any] = {
            "versions": versions(),
            "commit": commit(),
            "contract": contract(trainer),
            "starts": [*starts, start],
        }
        for callback in trainer.callbacks:
            tracked = callback.own if isinstance(callback, TrackedRun) else tracked
        if tracked is not None:
            record[KEY] = tracked
        leave(path, json.dumps(record, indent=1) + "\n")
        # The folder alone is then enough to sample from.
        if (tokenizer := trainer.datamodule.tokenizer_path) is not None:
            leave(path.with_name("tokenizer.json"), tokenizer.read_text(encoding="utf-8"))


def read_record(path: Path) -> tuple[list[Any], str | None]:
    """Return the starts in run.json and the tracker's run id; set aside a damaged file."""
    try:
        record = json.loads(path.read_text(encoding="utf-8-sig"))
        starts, tracked = record["starts"], record.get(KEY)
        if not isinstance(starts, list):
            raise TypeError("starts is no list")
        return starts, tracked if isinstance(tracked, str) else None
    except FileNotFoundError:
        return [], None
    except (OSError, ValueError, KeyError, TypeError) as error:
        with contextlib.suppress(OSError):  # to be told when it is written
            announce(
                f"warning: {path} cannot be read ({error}): set aside as {set_aside(path)}; it "
                "begins anew"
            )
        return [], None


def code_fingerprint() -> str:
    """Return a hash of this code, which detects nodes with another checkout."""
    home = Path(__file__).parents[2]
    files = [
        home / "cli.py",
        *(f for part in ("lm", "data", "callbacks") for f in (home / part).rglob("*")),
    ]
    digest = hashlib.sha256()
    for file in sorted(file for file in files if file.suffix in (".py", ".cpp")):
        digest.update(file.read_bytes())
    return digest.hexdigest()[:12]


def versions() -> dict[str, str | None]:
    """Return the versions of Python and of key packages; None if one is not installed."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    return found


def device_name(device: torch.device) -> str:
    """Return the name of a GPU, or a description of another device."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{device.type} ({platform.machine()}, {os.cpu_count()} cores)"


def contract(trainer: Trainer) -> dict[str, Any]:
    """Return the settings that determine a run's numbers, by configuration key.

    The module and the datamodule contribute their part by a `contract()` method.
    """
    parts: dict[str, Any] = {}
    for source in (trainer.lightning_module, getattr(trainer, "datamodule", None)):
        if hasattr(source, "contract"):
            parts |= cast(Any, source).contract()
    return parts | {
        "trainer.max_steps": trainer.max_steps,
        "trainer.gradient_clip_val": trainer.gradient_clip_val,
        "trainer.accumulate_grad_batches": trainer.accumulate_grad_batches,
        "trainer.precision": str(trainer.precision),
        "trainer.world_size": trainer.world_size,
        "trainer.deterministic": torch.are_deterministic_algorithms_enabled(),
        "device": device_name(trainer.strategy.root_device),
        "version of torch": version("torch"),
        "version of lightning": version("lightning"),
    }
