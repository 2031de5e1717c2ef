"""Checkpoints that are whole or not there, and the state a run resumes from."""

import errno
import functools
import os
import pickle
import random
import re
import shutil
import time
import zipfile
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from lightning.fabric.plugins import CheckpointIO
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint
from torch import Tensor

from callbacks.metrics_csv import resume_logs
from callbacks.moments import reach, watched
from callbacks.run_folder import contract
from callbacks.trainer import announce, at_step_edge, is_dry_run, validation_follows

FOLDER = "checkpoints"
NAME = re.compile(r"step-(\d+)\.ckpt")
TEMPORARY = ".tmp-"

# A resumed run must agree in these and in what the datamodule refuses; other differences are
# announced, and the new value holds.
FIXED = ("model.config.", "seed_everything")


def file_name(step: int) -> str:
    """Name of a step's file, as `NAME` reads it."""
    return f"step-{step:08d}.ckpt"


def checkpoints(folder: Path) -> list[tuple[int, Path]]:
    """Steps and files of a run folder, or of the checkpoint folder itself, newest first."""
    folder = folder / FOLDER if (folder / FOLDER).is_dir() else folder
    if not folder.is_dir():
        return []
    found = [(NAME.fullmatch(path.name), path) for path in folder.iterdir()]
    return sorted(((int(match[1]), path) for match, path in found if match), reverse=True)


def damage(path: Path) -> str | None:
    """Why a checkpoint file is not whole, or None.

    Reads all of it and compares the CRC32 that torch.save stores with each record, which
    torch.load does not.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            bad = archive.testzip()
        return f"record {bad} does not match its checksum" if bad else None
    except zipfile.BadZipFile as error:
        size = path.stat().st_size
        return "it is empty" if size == 0 else f"truncated or corrupt at {size} bytes ({error})"
    except (OSError, EOFError, RuntimeError, NotImplementedError) as error:
        return f"cannot be read ({error})"


def newest_whole(folder: Path, say: Callable[[str], None]) -> Path:
    """Newest whole checkpoint of a folder by step number; damaged newer ones are named.

    Raises:
        ValueError: there is none, or all are damaged.
    """
    faults = []
    for _, path in checkpoints(folder):
        fault = damage(path)
        if fault is None:
            for line in faults:
                say(f"warning: passed over {line}")
            return path
        faults.append(f"{path}: {fault}")
    if not faults:
        raise ValueError(f"{folder} holds no checkpoint (step-00000000.ckpt …); train first")
    raise ValueError(
        f"all {len(faults)} checkpoints of {folder} are damaged ({'; '.join(faults)}); remove them "
        "to start at step 0, or bring back a sound copy"
    )


def resolve(ckpt_path: str | None, root: Path, starts: bool = False) -> Path | None:
    """What a run's `ckpt_path` stands for: a folder whose newest whole file is meant, or a file.

    Args:
        ckpt_path: `last`, `best`, a path, or None for a new run.
        root: The run's folder.
        starts: Whether `last` in a folder without checkpoints is a first start, which is None.

    Raises:
        ValueError: nothing is there, or a new run is asked for where one already is.
    """
    held = checkpoints(root)
    if ckpt_path is None:
        if held:
            raise ValueError(
                f"{root} already holds checkpoints (step {held[0][0]}) and ckpt_path is null: "
                "resume by --ckpt_path last, or give another trainer.default_root_dir"
            )
        return None
    if ckpt_path not in ("last", "best"):
        if not Path(ckpt_path).exists():
            raise ValueError(
                f"ckpt_path {ckpt_path} does not exist; give last, best, a run folder or a file"
            )
        place = Path(ckpt_path).resolve()
        if starts and held and root.resolve() not in (place, *place.parents):
            raise ValueError(
                f"ckpt_path {ckpt_path} is of another run, and {root} already holds checkpoints of "
                "its own; give another trainer.default_root_dir"
            )
        return Path(ckpt_path)
    if not held:
        if starts and ckpt_path == "last":
            return None
        raise ValueError(f"{root} holds no checkpoint; train first, or name one by --ckpt_path")
    if ckpt_path == "last":
        return root
    newest = read_checkpoint(newest_whole(root, announce))
    best = newest["callbacks"]["AtomicCheckpoint"]["best"]
    if not best:
        raise ValueError(f"{root} has no best checkpoint: nothing was validated yet")
    return held[0][1].with_name(file_name(best["step"]))


def read_checkpoint(path: Path) -> dict[str, Any]:
    """Contents of a checkpoint on the CPU; nothing in the file is ever executed.

    Raises:
        ValueError: the file is missing, damaged or holds more than tensors and plain types.
    """
    if not path.is_file():
        raise ValueError(f"{path} does not exist; give a run folder or a checkpoint file")
    if fault := damage(path):
        others = [other for _, other in checkpoints(path.parent) if damage(other) is None]
        way_out = f"the newest sound one is {others[0]}" if others else "no sound one is beside it"
        raise ValueError(f"{path} is not a whole checkpoint: {fault}; {way_out}")
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        name = re.search(r"GLOBAL (\S+)", str(error))
        raise ValueError(
            f"{path} is untrusted: it holds {name[1] if name else 'objects'} beside tensors and "
            "plain types, so loading could run foreign code; export its weights where it was made"
        ) from None
    except RuntimeError as error:
        raise ValueError(
            f"{path} is not a checkpoint: torch cannot read it ({error}); give one made by fit"
        ) from None
    if not isinstance(content, dict) or "state_dict" not in content:
        raise ValueError(f"{path} is not a checkpoint: it has no state_dict; give one made by fit")
    return content


def tensor_bytes(value: Any) -> int:
    """Bytes of all tensors in nested plain containers."""
    if isinstance(value, Tensor):
        return value.nbytes
    if isinstance(value, dict):
        return sum(map(tensor_bytes, value.values()))
    return sum(map(tensor_bytes, value)) if isinstance(value, list | tuple) else 0


def replace(temporary: Path, path: Path) -> None:
    """os.replace, again after a moment where another process has the file open (Windows)."""
    for wait in (0.1, 0.5):
        try:
            return os.replace(temporary, path)
        except PermissionError:
            time.sleep(wait)
    return os.replace(temporary, path)


def write_checkpoint(checkpoint: dict[str, Any], path: Path) -> None:
    """Make the file appear whole under its final name, durably, or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    needed, free = tensor_bytes(checkpoint), shutil.disk_usage(path.parent).free
    if free < needed:
        raise OSError(
            errno.ENOSPC,
            f"No space left: {needed / 1e6:.0f} MB needed, {free / 1e6:.0f} MB free",
            str(path),
        )
    # In the same folder: only there is the replacement one atomic step, wherever TMPDIR is.
    temporary = path.with_name(f"{path.name}{TEMPORARY}{os.getpid()}")
    try:
        with temporary.open("wb") as file:
            torch.save(checkpoint, watched(file))
            file.flush()
            reach("before fsync")
            os.fsync(file.fileno())
        reach("before replace")
        replace(temporary, path)
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        if isinstance(error, RuntimeError) and isinstance(error.__context__, OSError):
            # torch's writer hides why the file system refused behind an error of its own.
            raise error.__context__ from None
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


class Copies:
    """Copies of nested plain containers; their tensors lie in buffers that are used again.

    A copy into fresh memory takes three times as long, for its page faults.
    """

    def __init__(self) -> None:
        self._buffers: dict[tuple, Tensor] = {}

    def of(self, value: Any, *place: Any) -> Any:
        """The value as it is now, on the CPU; the copy before it is overwritten."""
        if isinstance(value, Tensor):
            buffer = self._buffers.get(place)
            if buffer is None or (buffer.shape, buffer.dtype) != (value.shape, value.dtype):
                buffer = self._buffers[place] = torch.empty_like(value, device="cpu")
            return buffer.copy_(value)
        if isinstance(value, dict):
            return {key: self.of(item, *place, key) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return type(value)(self.of(item, *place, i) for i, item in enumerate(value))
        return value


class AtomicCheckpointIO(CheckpointIO):
    """Lightning's way to the functions above.

    A save holds up training for a copy; one thread writes it, and a next save waits for it.
    `last` is resolved here, on rank 0 alone.
    """

    def __init__(self, trainer: Trainer, check: Callable[[dict[str, Any]], None]) -> None:
        self.trainer = trainer
        self.check = check
        self._copies = Copies()
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._job: Future[None] | None = None

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None
    ) -> None:
        try:
            self.wait()
            copy = self._copies.of(checkpoint)
        except (OSError, RuntimeError) as error:
            # Told by `then`: raised here, it would leave the other ranks waiting at a barrier.
            self._job = Future()
            self._job.set_exception(error)
            return
        self._job = self._thread.submit(write_checkpoint, copy, Path(path))

    def then(self, finish: Callable[[BaseException | None], None]) -> None:
        """Call with the error of the write in flight, or None, when it is over."""
        write = self._job
        assert write is not None
        self._job = self._thread.submit(lambda: finish(write.exception()))

    def wait(self) -> None:
        """Return when nothing is in flight; raises what it raised."""
        job, self._job = self._job, None
        if job is not None:
            job.result()

    def teardown(self) -> None:
        self.wait()

    def load_checkpoint(
        self, path: Any, map_location: Any = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        found: Path | ValueError = Path(path)
        if found.is_dir():
            if self.trainer.is_global_zero:
                try:
                    found = newest_whole(found, announce)
                except ValueError as error:
                    found = error
            found = self.trainer.strategy.broadcast(found)
            if isinstance(found, ValueError):
                raise ValueError(str(found))
        checkpoint = read_checkpoint(found)
        self.check(checkpoint)
        what = "resuming from" if self.trainer.state.fn == "fit" else "evaluating"
        announce(f"{what} {found} at step {checkpoint['global_step']}")
        return checkpoint

    def remove_checkpoint(self, path: Any) -> None:
        Path(path).unlink(missing_ok=True)


def random_states() -> dict[str, Any]:
    """States of the generators that users' own code may draw from, as plain types."""
    numpy_state = cast(tuple, np.random.get_state())
    return {
        "python": random.getstate(),
        "numpy": [numpy_state[0], numpy_state[1].tolist(), *numpy_state[2:]],
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
    }


def restore_random_states(states: dict[str, Any]) -> None:
    """Put back what `random_states` took."""
    version, internal, gauss = states["python"]
    random.setstate((version, tuple(internal), gauss))
    name, keys, *rest = states["numpy"]
    np.random.set_state((name, np.array(keys, dtype=np.uint32), *rest))
    torch.set_rng_state(states["torch"])
    if len(states["cuda"]) == torch.cuda.device_count() and states["cuda"]:
        torch.cuda.set_rng_state_all(states["cuda"])


class AtomicCheckpoint(Checkpoint):
    """Saves at step edges, keeps a bounded number of files, and checks what a run resumes from."""

    def __init__(
        self,
        *,
        every_n_steps: int = 1000,
        every_minutes: float | None = None,
        keep_last: int = 3,
        keep_every: int | None = None,
    ) -> None:
        """Say when to save and what to keep.

        Args:
            every_n_steps: Optimizer steps between saves. The last step and each new best
                validation loss are saved too.
            every_minutes: Save too when so many minutes have gone by since the last save.
            keep_last: Newest files kept, beside the best by validation loss.
            keep_every: Keep the files of every so many steps for good.
        """
        for name, value in (("every_n_steps", every_n_steps), ("keep_last", keep_last)):
            if value < 1:
                raise ValueError(f"checkpoint.{name} is {value}: must be at least 1")
        if keep_every is not None and keep_every < 1:
            raise ValueError(f"checkpoint.keep_every is {keep_every}: must be at least 1, or null")
        if every_minutes is not None and not every_minutes > 0:
            raise ValueError(f"checkpoint.every_minutes is {every_minutes}: must be above 0")
        self.every_n_steps = every_n_steps
        self.every_minutes = every_minutes
        self._now = time.monotonic
        self._saved_at = self._now()
        self.keep_last = keep_last
        self.keep_every = keep_every
        self.best: dict[str, float] = {}
        self._saved_step = -1
        self._validating = False
        self._validation_due_at = -1
        self._random_states: list[dict[str, Any]] = []
        self._states_before_validation: dict[str, Any] = {}
        self._kept_best: float | None = None
        self._failure: str | None = None

    # Saving

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        trainer.strategy.checkpoint_io = AtomicCheckpointIO(
            trainer, lambda checkpoint: self.check(trainer, checkpoint)
        )
        if stage == "fit" and trainer.is_global_zero and not is_dry_run(trainer):
            for stale in Path(trainer.default_root_dir, FOLDER).glob(f"*{TEMPORARY}*"):
                stale.unlink(missing_ok=True)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # A kill after the last write of a run, and before its retention, leaves one file too many.
        if trainer.is_global_zero and self._saved_step > 0:
            self._retain(Path(trainer.default_root_dir, FOLDER), self.best.get("step"))

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if not at_step_edge(trainer, batch_idx):
            return
        if validation_follows(trainer, batch_idx):
            # Beginning to validate draws from them, and a validation cut short begins again.
            self._states_before_validation = random_states()
            return
        if self._due(trainer):
            self.save_now(trainer)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._validating = True

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._validating = False
        # A checkpoint of a step whose validation is due comes after it: a kill between the two
        # would lose the validation for good.
        if trainer.state.fn != "fit":
            return
        loss = cast(Any, pl_module).validation_figures["val/loss"]
        new_best = loss < self.best.get("loss", float("inf"))
        if new_best:
            self.best = {"loss": loss, "step": trainer.global_step}
        if new_best or self._due(trainer):
            self.save_now(trainer, verify=new_best)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        failure = self.wait(trainer)
        if failure or self._saved_step != trainer.global_step > 0:
            self._saved_step = -1
            self.save_now(trainer)
            failure = self.wait(trainer)
        if failure:
            raise RuntimeError(f"the last checkpoint could not be written: {failure}")

    def make_up_validation(self, trainer: Trainer) -> None:
        """Run the last validation of a run, where a signal cut it short."""
        if self._validation_due_at == trainer.global_step and trainer.enable_validation:
            self._validation_due_at = -1
            resume_logs(trainer)
            trainer.validating = True
            trainer.fit_loop.epoch_loop.val_loop.run()
            trainer.training = True
            self.on_train_end(trainer, trainer.lightning_module)

    def _due(self, trainer: Trainer) -> bool:
        step = trainer.global_step
        if step % self.every_n_steps == 0 or step == trainer.max_steps:
            return True
        if self.every_minutes is None:
            return False
        # Clocks differ between ranks: the first one's holds for all.
        over = trainer.is_global_zero and self._now() - self._saved_at >= 60 * self.every_minutes
        return bool(cast(Any, trainer).largest(int(over)))

    def save_now(self, trainer: Trainer, verify: bool = False) -> None:
        """Begin to write the state of the step just finished, unless that was done already.

        Returns when the state is copied; `wait` returns when it is on disk.
        """
        step = trainer.global_step
        if is_dry_run(trainer) or step == self._saved_step:
            return
        # What the loggers hold of this step must not be lost with a kill after it.
        for logger in trainer.loggers:
            logger.save()
        path = Path(trainer.default_root_dir, FOLDER, file_name(step))
        self._saved_step, self._saved_at = step, self._now()
        verify = verify or step == trainer.max_steps
        try:
            trainer.save_checkpoint(path)
        except (OSError, RuntimeError) as error:
            self._finish(path, verify, error)
            return
        if trainer.is_global_zero:
            finish = functools.partial(self._finish, path, verify, best=self.best.get("step"))
            cast(AtomicCheckpointIO, trainer.strategy.checkpoint_io).then(finish)

    def wait(self, trainer: Trainer) -> str | None:
        """Return when the write in flight is over, on all ranks, with its failure or None."""
        cast(AtomicCheckpointIO, trainer.strategy.checkpoint_io).wait()
        return trainer.strategy.broadcast(self._failure)

    def _finish(
        self, path: Path, verify: bool, error: BaseException | None, best: float | None = None
    ) -> None:
        """After a write: check it where asked, then drop what is not kept."""
        fault = str(error) if error else damage(path) if verify else None
        # A failed write costs the file and not the run; the last step's is tried once more.
        self._failure = f"{path}: {fault}" if fault else None
        if self._failure:
            announce(f"error: checkpoint not saved: {self._failure}")
            return
        reach("before retention")
        try:
            self._retain(path.parent, best)
        except OSError as unkept:
            announce(f"warning: an older checkpoint could not be removed: {unkept}")

    def _retain(self, folder: Path, best: float | None) -> None:
        held = checkpoints(folder)
        # The best before it stays until the best itself is on disk.
        if best in [step for step, _ in held]:
            self._kept_best = best
        for place, (step, path) in enumerate(held):
            forever = self.keep_every is not None and step % self.keep_every == 0
            if place >= self.keep_last and step != self._kept_best and not forever:
                path.unlink(missing_ok=True)

    # What a checkpoint holds beside Lightning's own

    def state_dict(self) -> dict[str, Any]:
        return {"best": dict(self.best)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.best = dict(state_dict["best"])

    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        own = self._states_before_validation if self._validating else random_states()
        states: list[Any] = [own]
        if trainer.world_size > 1:
            states = [None] * trainer.world_size
            torch.distributed.all_gather_object(states, own)
        checkpoint["random_states"] = states
        checkpoint["contract"] = contract(trainer)
        checkpoint["validation_due"] = self._validating

    # Resuming

    def check(self, trainer: Trainer, checkpoint: dict[str, Any]) -> None:
        """Compare a checkpoint's contract with this run's: differences are refused or announced.

        Raises:
            ValueError: the model, the data, their order or the seed differ; names every one.
        """
        if "contract" not in checkpoint:
            raise ValueError("the checkpoint has no contract: it was not made by fit")
        fits = trainer.state.fn == "fit"
        data = cast(Any, trainer).datamodule
        if fits:
            # First of all: the length of the run, and with it the schedule, rests on the position.
            data.load_state_dict(checkpoint[type(data).__qualname__])
        fixed = FIXED if fits else (*FIXED, "tokenizer fingerprint")
        old, new = checkpoint["contract"], contract(trainer)
        differ = [key for key in old if key in new and old[key] != new[key]]
        faults = [
            f"{key} was {old[key]} and is {new[key]} now" for key in differ if key.startswith(fixed)
        ]
        if fits:
            faults += data.refused_changes(old)
        if faults:
            raise ValueError(
                f"the checkpoint belongs to another run: {'; '.join(faults)}; go back to the old "
                "values, or start anew in another trainer.default_root_dir"
            )
        if fits:
            for key in differ:
                announce(f"changed since the checkpoint: {key} {old[key]} -> {new[key]}")
        self._random_states = checkpoint["random_states"]

    def on_load_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        if trainer.state.fn != "fit":
            return
        step, loops = checkpoint["global_step"], checkpoint["loops"]["fit_loop"]
        due = checkpoint.get("validation_due", False)
        # With its validation the step's file is written again.
        self._saved_step, self._validation_due_at = (-1, step) if due else (step, -1)
        if trainer.is_global_zero:
            self._set_aside(Path(trainer.default_root_dir, FOLDER), step)
        # Lightning counts micro-batches: with another accumulate the same step is another count.
        progress = loops["epoch_loop.batch_progress"]
        was = checkpoint["contract"]["trainer.accumulate_grad_batches"]
        done = step * trainer.accumulate_grad_batches
        for counts in (progress["total"], progress["current"]):
            for name, count in counts.items():
                counts[name] = done + count - step * was
        # The last batch of a run that was lengthened since is not the last any more.
        progress["is_last_batch"] = False
        # One micro-batch begun and not finished: Lightning's sign that a validation is due.
        progress = loops["epoch_loop.val_loop.batch_progress"]
        cut_short = progress["current"]["completed"] if due else 0
        for counts in (progress["total"], progress["current"]):
            whole = counts["completed"] - cut_short
            counts |= {"ready": whole + due, "started": whole + due}
            counts |= {"processed": whole, "completed": whole}

    def _set_aside(self, folder: Path, resumed: int) -> None:
        """Rename what is newer than the step resumed from: damaged, or of a way not taken.

        Else `last` would mean it again, and retention would count it as the newest.
        """
        for step, path in checkpoints(folder):
            if step > resumed:
                path.rename(path.with_name(f"{path.name}.set-aside"))
                announce(f"set aside {path}: newer than the step that the run goes on from")

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # After all set-up, which draws random numbers of its own.
        if trainer.global_rank < len(self._random_states):
            restore_random_states(self._random_states[trainer.global_rank])
        self._states_before_validation = random_states()
