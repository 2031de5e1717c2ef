"""Checkpoints: whole or not there, found again, bounded in number, and safe to read."""

import errno
import io
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from callbacks.checkpoint.callback import AtomicCheckpoint
from callbacks.checkpoint.ckpt_path import resolve
from callbacks.checkpoint.files import (
    checkpoints,
    damage,
    read_checkpoint,
    read_newest,
    tensor_bytes,
    write_checkpoint,
)
from callbacks.checkpoint.plugin import AtomicCheckpointIO
from callbacks.checkpoint.state import random_states, restore_random_states
from callbacks.processes.stop_requests import StopRequests
from callbacks.stop_signals import StopSignals

ROOT = Path(__file__).parent.parent
WEIGHT = torch.arange(1000.0)
NO_MODULE: Any = None


def content(step: int = 0, best: dict[str, float] | None = None) -> dict[str, Any]:
    return {
        "global_step": step,
        "state_dict": {"net.weight": WEIGHT},
        "callbacks": {"AtomicCheckpoint": {"best": best or {}}},
    }


def save(root: Path, step: int, best: dict[str, float] | None = None) -> Path:
    path = root / "checkpoints" / f"step-{step:08d}.ckpt"
    write_checkpoint(content(step, best), path)
    return path


def touch(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).touch()


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def empty(path: Path) -> None:
    path.write_bytes(b"")


def flip_bit(path: Path) -> None:
    """Flip one bit of the weight's own bytes."""
    data = bytearray(path.read_bytes())
    place = data.index(WEIGHT.numpy().tobytes())
    data[place + 2001] ^= 1
    path.write_bytes(data)


DAMAGES = [
    (truncate, "truncated or corrupt at "),
    (empty, "it is empty"),
    (flip_bit, "does not match its checksum"),
]


def unexpected(what: Any) -> None:
    pytest.fail(f"unexpected: {what}")


def any_trainer(stand_in: Any) -> Any:
    return stand_in


class Saver:
    """What AtomicCheckpoint asks of a Trainer while it saves."""

    def __init__(self, root: Path, max_steps: int = 100) -> None:
        self.default_root_dir = str(root)
        self.max_steps = max_steps
        self.global_step = 0
        self.accumulate_grad_batches = 1
        self.val_check_batch = 10**9
        self.enable_validation = self.is_global_zero = True
        self.fast_dev_run = 0
        self.should_stop = False
        self.global_rank, self.world_size = 0, 1
        self.callbacks: list[Any] = []
        self.loggers: list[Any] = []
        self.state = SimpleNamespace(fn="fit")
        self.lightning_module: Any = SimpleNamespace(skipped_in_row=0)
        self.strategy = SimpleNamespace(
            root_device=torch.device("cpu"),
            broadcast=lambda value: value,
            checkpoint_io=AtomicCheckpointIO(any_trainer(self), print),
        )
        self.most_files = 0
        self.error: Exception | None = None

    def save_checkpoint(self, path: Path) -> None:
        if self.error:
            raise self.error
        io = self.strategy.checkpoint_io
        io.save_checkpoint(self.content(), path)
        io.then(lambda _: self.count_files(path.parent))

    def content(self) -> dict[str, Any]:
        return content(self.global_step)

    def count_files(self, folder: Path) -> None:
        self.most_files = max(self.most_files, len(checkpoints(folder)))

    def largest(self, number: int) -> int:
        return number

    @property
    def kept(self) -> list[int]:
        return [step for step, _ in checkpoints(Path(self.default_root_dir))]


def train(callback: AtomicCheckpoint, trainer: Any, *steps: int) -> None:
    """End these steps, each of one micro-batch."""
    for step in steps:
        trainer.global_step = step
        callback.on_train_batch_end(trainer, NO_MODULE, None, None, step - 1)
        callback.wait(trainer)


def validate(callback: AtomicCheckpoint, trainer: Any, step: int, loss: float) -> None:
    trainer.global_step = step
    module: Any = SimpleNamespace(validation_metrics={"val/loss": loss})
    callback.on_validation_end(trainer, module)
    callback.wait(trainer)


# Writing


def test_written_checkpoint_is_read_back(tmp_path):
    path = save(tmp_path, 5)
    assert read_checkpoint(path)["global_step"] == 5
    assert torch.equal(read_checkpoint(path)["state_dict"]["net.weight"], WEIGHT)


def test_second_save_under_one_name_replaces_the_first(tmp_path):
    path = tmp_path / "step-5.ckpt"
    write_checkpoint(content(1), path)
    write_checkpoint(content(2), path)
    assert read_checkpoint(path)["global_step"] == 2
    assert list(tmp_path.iterdir()) == [path]


def failing_replace(*_: Any) -> None:
    raise OSError(errno.EIO, "Input/output error")


def test_failed_replacement_leaves_the_old_file_whole_and_no_temporary(tmp_path, monkeypatch):
    path = tmp_path / "step-5.ckpt"
    write_checkpoint(content(1), path)
    monkeypatch.setattr(os, "replace", failing_replace)
    with pytest.raises(OSError, match="Input/output error"):
        write_checkpoint(content(2), path)
    assert read_checkpoint(path)["global_step"] == 1
    assert list(tmp_path.iterdir()) == [path]


def test_unserialisable_content_leaves_the_old_file_whole_and_no_temporary(tmp_path):
    path = tmp_path / "step-5.ckpt"
    write_checkpoint(content(1), path)
    with pytest.raises((AttributeError, TypeError), match="pickle"):
        write_checkpoint(content(2) | {"bad": lambda: None}, path)
    assert read_checkpoint(path)["global_step"] == 1
    assert list(tmp_path.iterdir()) == [path]


WRITE_LARGE = """
import sys, torch
from pathlib import Path
from callbacks.checkpoint.files import write_checkpoint
try:
    write_checkpoint({"state_dict": {"w": torch.zeros(100_000)}}, Path(sys.argv[1]))
except Exception as error:
    sys.exit(str(error))
"""


def test_limit_on_the_file_size_leaves_the_old_file_whole_and_says_so(tmp_path):
    path = save(tmp_path, 5)
    before = path.read_bytes()
    command = ["bash", "-c", 'ulimit -f 64; exec "$@"', "-", sys.executable, "-c", WRITE_LARGE]
    result = subprocess.run([*command, path], cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 1
    assert "File too large" in result.stderr
    assert (path.read_bytes(), list(path.parent.iterdir())) == (before, [path])


def test_too_little_free_space_writes_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=2_000_000))
    path = tmp_path / "step-1.ckpt"
    large = {"state_dict": {"w": torch.empty(750_000)}}
    with pytest.raises(OSError, match=r"No space left: 3\.00 MB needed, 2\.00 MB free") as refusal:
        write_checkpoint(large, path)
    assert (refusal.value.errno, refusal.value.filename) == (errno.ENOSPC, str(path))
    assert list(tmp_path.iterdir()) == []


def test_needed_space_counts_the_tensors_of_nested_containers():
    state = {"a": torch.zeros(3), "b": [{"c": torch.zeros(5)}, (torch.zeros(7), "text", 1)]}
    assert tensor_bytes(state) == 4 * (3 + 5 + 7)


def test_missing_temporary_folder_of_the_system_does_not_matter(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path / "nowhere"))
    monkeypatch.setattr(tempfile, "tempdir", None)
    assert damage(save(tmp_path, 5)) is None


# Finding


def test_order_is_by_number_and_other_names_are_left_out(tmp_path):
    names = ["step-9.ckpt", "step-00000010.ckpt", "step-x.ckpt", "step-11.ckpt.tmp-7", "other"]
    touch(tmp_path, *names)
    assert [step for step, _ in checkpoints(tmp_path)] == [10, 9]


def test_newest_whole_is_step_10_after_step_9(tmp_path):
    write_checkpoint(content(9), tmp_path / "step-9.ckpt")
    write_checkpoint(content(10), tmp_path / "step-10.ckpt")
    assert read_newest(tmp_path, unexpected)[0] == tmp_path / "step-10.ckpt"


def test_newest_is_by_step_whatever_the_times_of_the_files(tmp_path):
    for step in (2, 4, 6):
        os.utime(save(tmp_path, step), (1e9 - step, 1e9 - step))
    assert read_newest(tmp_path, unexpected)[0].name == "step-00000006.ckpt"
    assert resolve("last", tmp_path) == tmp_path


def test_run_folder_and_its_checkpoint_folder_name_the_same_files(tmp_path):
    path = save(tmp_path, 3)
    assert checkpoints(tmp_path) == checkpoints(tmp_path / "checkpoints") == [(3, path)]
    assert checkpoints(tmp_path / "nowhere") == []


@pytest.mark.parametrize(("harm", "text"), DAMAGES)
def test_damaged_newest_file_is_named_and_passed_over(tmp_path, harm, text):
    sound, damaged = save(tmp_path, 4), save(tmp_path, 6)
    harm(damaged)
    said: list[str] = []
    assert read_newest(tmp_path, said.append)[0] == sound
    assert len(said) == 1
    assert said[0].startswith(f"warning: passed over {damaged}: ")
    assert text in said[0]


UNREADABLE = Path("/proc/self/mem")  # a file that gives EIO


def test_read_error_is_no_damage(tmp_path):
    save(tmp_path, 4).with_name("step-00000006.ckpt").symlink_to(UNREADABLE)
    path = tmp_path / "checkpoints" / "step-00000006.ckpt"
    for read in (lambda: read_newest(tmp_path, unexpected), lambda: read_checkpoint(path)):
        with pytest.raises(OSError, match="Input/output error") as refusal:
            read()
        assert str(refusal.value) == (
            "[Errno 5] Input/output error: the file may be intact, so no other is used; make it "
            f"readable and try again: '{path}'"
        )


class BadEnd(io.FileIO):
    """A file on a disk that cannot read its last kilobytes."""

    def readinto(self, buffer: Any) -> int | None:
        if self.tell() > os.fstat(self.fileno()).st_size - 4096:
            raise OSError(errno.EIO, "Input/output error")
        return super().readinto(buffer)

    def readall(self) -> bytes:
        raise OSError(errno.EIO, "Input/output error")


def test_every_changed_byte_of_the_directory_at_the_end_is_damage_or_harmless(tmp_path):
    path = save(tmp_path, 4)
    content = path.read_bytes()
    for place in range(len(content) - 700, len(content)):
        for mask in (1, 0x80):
            path.write_bytes(
                content[:place] + bytes([content[place] ^ mask]) + content[place + 1 :]
            )
            damage(path)  # a corrupt file is no error of the system


def test_read_error_at_the_end_of_a_file_is_no_damage(tmp_path, monkeypatch):
    path = save(tmp_path, 4)
    monkeypatch.setattr(Path, "open", lambda path, _: io.BufferedReader(BadEnd(path)))
    with pytest.raises(OSError, match="Input/output error: the file may be intact"):
        damage(path)


@pytest.mark.parametrize(
    ("target", "error"),
    [
        ("gone/away.ckpt", "[Errno 2] No such file or directory"),
        ("step-00000006.ckpt", "[Errno 40] Too many levels of symbolic links"),
    ],
)
def test_link_that_leads_nowhere_is_named_with_the_way_out(tmp_path, target, error):
    path = save(tmp_path, 4).with_name("step-00000006.ckpt")
    path.symlink_to(target)
    with pytest.raises(OSError, match="link") as refusal:
        read_newest(tmp_path, unexpected)
    assert str(refusal.value) == (
        f"{error}: it is a link to {target}; bring that file back, or remove the link: '{path}'"
    )
    path.unlink()
    assert read_newest(tmp_path, unexpected)[0].name == "step-00000004.ckpt"


@pytest.mark.parametrize(
    ("make", "fault"), [(os.mkdir, "it is a folder"), (os.mkfifo, "it is no regular file")]
)
def test_what_is_no_file_is_passed_over_and_told(tmp_path, make, fault):
    sound = save(tmp_path, 4)
    other = sound.with_name("step-00000006.ckpt")
    make(other)
    said: list[str] = []
    assert read_newest(tmp_path, said.append)[0] == sound
    assert said == [f"warning: passed over {other}: {fault}"]


def test_file_in_the_place_of_the_checkpoints_is_refused_before_training(
    run_yaml, lightning, tmp_path
):
    root = tmp_path / "run"
    root.mkdir()
    (root / "checkpoints").touch()
    code, _, err = lightning("fit", "--config", run_yaml())
    assert (code, err.splitlines()[-1]) == (
        2,
        f"error: {root}/checkpoints is a file: checkpoints are written to a folder of that name; "
        "rename it, or give another trainer.default_root_dir",
    )


def test_read_error_changes_no_file_and_ends_the_start(run_yaml, lightning, tmp_path):
    config = run_yaml({"trainer.max_steps": 4})
    assert lightning("fit", "--config", config)[0] == 0
    newest = tmp_path / "run" / "checkpoints" / "step-00000006.ckpt"
    newest.symlink_to(UNREADABLE)
    before = sorted((path.name, path.lstat().st_mtime_ns) for path in newest.parent.iterdir())
    code, _, err = lightning("fit", "--config", config, "--trainer.max_steps", 8)
    assert (code, err.splitlines()[-1].count("Input/output error")) == (1, 1)
    assert before == sorted((p.name, p.lstat().st_mtime_ns) for p in newest.parent.iterdir())


def test_folder_in_place_of_a_checkpoint_is_passed_over(tmp_path):
    sound = save(tmp_path, 4)
    sound.with_name("step-00000006.ckpt").mkdir()
    assert read_newest(tmp_path, lambda _: None)[0] == sound


def test_only_damaged_files_are_an_error_that_names_each(tmp_path):
    paths = [save(tmp_path, step) for step in (2, 4, 6)]
    truncate(paths[0])
    empty(paths[1])
    flip_bit(paths[2])
    with pytest.raises(
        ValueError, match=f"^all 3 checkpoints of {tmp_path} are damaged"
    ) as refusal:
        read_newest(tmp_path, unexpected)
    assert [str(path) in str(refusal.value) for path in paths] == [True] * 3
    assert str(refusal.value).endswith(
        "); remove them to start at step 0, or bring back an intact copy"
    )


def test_folder_without_a_checkpoint_is_an_error(tmp_path):
    with pytest.raises(ValueError, match="train first") as refusal:
        read_newest(tmp_path, unexpected)
    assert str(refusal.value) == (
        f"{tmp_path} holds no checkpoint (step-00000000.ckpt …); train first"
    )


# What ckpt_path stands for


def test_last_in_an_empty_folder_starts(tmp_path):
    assert resolve("last", tmp_path, starts=True) is None


def test_file_of_another_run_is_refused_where_a_run_already_is(tmp_path):
    other, _ = save(tmp_path / "other", 4), save(tmp_path / "run", 2)
    with pytest.raises(ValueError, match="is of another run") as refusal:
        resolve(str(other), tmp_path / "run", starts=True)
    assert str(refusal.value) == (
        f"ckpt_path {other} is of another run, and {tmp_path / 'run'} already holds checkpoints of "
        "its own; give another trainer.default_root_dir"
    )
    assert resolve(str(other), tmp_path / "new", starts=True) == other


@pytest.mark.parametrize(("ckpt_path", "starts"), [("last", False), ("best", True)])
def test_checkpoint_that_must_be_there_is_an_error_in_an_empty_folder(tmp_path, ckpt_path, starts):
    with pytest.raises(ValueError, match="holds no checkpoint") as refusal:
        resolve(ckpt_path, tmp_path, starts)
    assert str(refusal.value) == (
        f"{tmp_path} holds no checkpoint; train first, or name one by --ckpt_path"
    )


def test_last_is_the_folder_whose_newest_whole_file_is_meant(tmp_path):
    save(tmp_path, 5)
    assert resolve("last", tmp_path, starts=True) == tmp_path


def test_null_starts_a_new_run(tmp_path):
    assert resolve(None, tmp_path, starts=True) is None


def test_null_where_a_run_already_is_gets_refused(tmp_path):
    save(tmp_path, 5)
    with pytest.raises(ValueError, match="already holds checkpoints") as refusal:
        resolve(None, tmp_path, starts=True)
    assert str(refusal.value) == (
        f"{tmp_path} already holds checkpoints (step 5) and ckpt_path is null: resume by "
        "--ckpt_path last, or give another trainer.default_root_dir"
    )


def test_best_is_the_file_that_the_newest_whole_one_records(tmp_path):
    save(tmp_path, 3)
    save(tmp_path, 5, best={"loss": 1.5, "step": 3})
    empty(save(tmp_path, 7))
    assert resolve("best", tmp_path) == tmp_path / "checkpoints" / "step-00000003.ckpt"


def test_run_that_is_asked_to_stop_saves_its_last_step_before_others_end_it(tmp_path):
    # Callbacks may change the weights in on_train_end, as those that average them do.
    trainer, callback = Saver(tmp_path), AtomicCheckpoint(every_n_steps=50)
    trainer.should_stop = True
    train(callback, trainer, 3)
    assert trainer.kept == [3]


def test_best_before_any_validation_is_an_error(tmp_path):
    save(tmp_path, 5)
    with pytest.raises(ValueError, match="no best checkpoint") as refusal:
        resolve("best", tmp_path)
    assert str(refusal.value) == f"{tmp_path} has no best checkpoint: nothing was validated yet"


def test_existing_path_stands_for_itself(tmp_path):
    path = save(tmp_path / "other", 5)
    assert resolve(str(path), tmp_path) == path


def test_unknown_path_is_an_error(tmp_path):
    with pytest.raises(ValueError, match="does not exist") as refusal:
        resolve("runs/typo", tmp_path)
    assert str(refusal.value) == (
        "ckpt_path runs/typo does not exist; give last, best, a run folder or a file"
    )


# Reading


def test_missing_file_is_an_error(tmp_path):
    path = tmp_path / "step-5.ckpt"
    with pytest.raises(ValueError, match="does not exist") as refusal:
        read_checkpoint(path)
    assert str(refusal.value) == f"{path} does not exist; give a run folder or a checkpoint file"


@pytest.mark.parametrize(("harm", "text"), DAMAGES)
def test_damaged_file_is_refused_and_the_newest_sound_one_named(tmp_path, harm, text):
    save(tmp_path, 2)
    sound, damaged = save(tmp_path, 4), save(tmp_path, 6)
    harm(damaged)
    with pytest.raises(ValueError, match=text) as refusal:
        read_checkpoint(damaged)
    assert str(refusal.value).startswith(f"{damaged} cannot be used: ")
    assert str(refusal.value).endswith(f"; the newest intact one is {sound}")


def test_damaged_file_without_a_sound_one_beside_it_says_so(tmp_path):
    damaged = save(tmp_path, 6)
    truncate(damaged)
    with pytest.raises(ValueError, match=r"; no intact one is beside it$"):
        read_checkpoint(damaged)


class Foreign:
    """Makes a folder when it is unpickled."""

    def __init__(self, proof: Path) -> None:
        self.proof = proof

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.mkdir, (str(self.proof),)


def test_foreign_pickle_is_refused_by_name_and_not_executed(tmp_path):
    path, proof = tmp_path / "step-5.ckpt", tmp_path / "proof"
    torch.save({"state_dict": {}, "extra": Foreign(proof)}, path)
    with pytest.raises(ValueError, match="untrusted") as refusal:
        read_checkpoint(path)
    assert not proof.exists()
    assert str(refusal.value) == (
        f"{path} is untrusted: it holds {os.mkdir.__module__}.mkdir beside tensors and plain "
        "types, so loading could run foreign code; export its weights where it was made"
    )


@pytest.mark.parametrize("other", [{"weights": WEIGHT}, WEIGHT, [1, 2], "text"])
def test_file_without_a_state_dict_is_refused(tmp_path, other):
    path = tmp_path / "step-5.ckpt"
    torch.save(other, path)
    with pytest.raises(ValueError, match="no state_dict") as refusal:
        read_checkpoint(path)
    assert str(refusal.value) == (
        f"{path} is not a checkpoint: it has no state_dict; give one made by fit"
    )


def test_checkpoint_of_a_gpu_is_read_on_the_cpu(tmp_path, monkeypatch):
    # The mark of the device is all that such a file differs in.
    monkeypatch.setattr(torch.serialization, "location_tag", lambda storage: "cuda:0")
    path = save(tmp_path, 5)
    assert b"cuda:0" in path.read_bytes()
    weight = read_checkpoint(path)["state_dict"]["net.weight"]
    assert (weight.device.type, torch.equal(weight, WEIGHT)) == ("cpu", True)


def test_sound_archive_of_another_kind_is_refused(tmp_path):
    path = tmp_path / "step-5.ckpt"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("readme.txt", "text")
    with pytest.raises(ValueError, match=f"^{path} is not a"):
        read_checkpoint(path)


# When a save is due


def test_save_falls_on_every_nth_and_the_last_step(tmp_path):
    trainer = Saver(tmp_path, max_steps=7)
    train(AtomicCheckpoint(every_n_steps=3, keep_last=9), trainer, *range(1, 8))
    assert trainer.kept == [7, 6, 3]


def test_micro_batch_inside_a_step_saves_nothing(tmp_path):
    trainer: Any = Saver(tmp_path)
    trainer.accumulate_grad_batches, trainer.global_step = 2, 4
    AtomicCheckpoint(every_n_steps=1).on_train_batch_end(trainer, NO_MODULE, None, None, 8)
    assert trainer.kept == []


def test_save_of_a_step_with_a_validation_comes_after_it(tmp_path):
    trainer = Saver(tmp_path)
    trainer.val_check_batch = 2
    callback = AtomicCheckpoint(every_n_steps=2)
    train(callback, trainer, 1, 2)
    assert trainer.kept == []
    validate(callback, trainer, 2, loss=float("nan"))
    assert trainer.kept == [2]


def test_new_best_is_saved_though_no_save_is_due(tmp_path):
    trainer, callback = Saver(tmp_path), AtomicCheckpoint(every_n_steps=50, keep_last=9)
    validate(callback, trainer, 2, loss=2.0)
    validate(callback, trainer, 4, loss=3.0)
    validate(callback, trainer, 6, loss=1.0)
    assert trainer.kept == [6, 2]
    assert callback.state_dict() == {"best": {"loss": 1.0, "step": 6}}


def test_validation_outside_a_fit_saves_nothing(tmp_path):
    trainer, callback = Saver(tmp_path), AtomicCheckpoint()
    trainer.state.fn = "validate"
    validate(callback, trainer, 2, loss=2.0)
    assert (trainer.kept, callback.best) == ([], {})


def test_trial_run_saves_nothing(tmp_path):
    trainer = Saver(tmp_path, max_steps=2)
    trainer.fast_dev_run = 2
    train(AtomicCheckpoint(every_n_steps=1), trainer, 1, 2)
    assert trainer.kept == []


def test_figures_are_on_disk_before_the_checkpoint_of_their_step(tmp_path):
    trainer = Saver(tmp_path)
    seen: list[list[int]] = []
    trainer.loggers = [SimpleNamespace(save=lambda: seen.append(trainer.kept))]
    train(AtomicCheckpoint(every_n_steps=1), trainer, 1)
    assert (seen, trainer.kept) == ([[]], [1])


# What is kept


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ({"keep_last": 2}, [6, 5]),
        ({"keep_last": 1}, [6]),
        ({"keep_last": 1, "keep_every": 2}, [6, 4, 2]),
        ({"keep_last": 2, "keep_every": 3}, [6, 5, 3]),
    ],
)
def test_kept_are_the_newest_and_every_nth(tmp_path, options, kept):
    trainer = Saver(tmp_path)
    train(AtomicCheckpoint(every_n_steps=1, **options), trainer, *range(1, 7))
    assert trainer.kept == kept


def test_best_is_kept_until_a_better_one_is_saved(tmp_path):
    trainer, callback = Saver(tmp_path), AtomicCheckpoint(every_n_steps=1, keep_last=2)
    validate(callback, trainer, 1, loss=1.0)
    train(callback, trainer, 2, 3, 4)
    assert trainer.kept == [4, 3, 1]
    validate(callback, trainer, 5, loss=0.5)
    train(callback, trainer, 6, 7, 8)
    assert trainer.kept == [8, 7, 5]


@pytest.mark.parametrize("keep_last", [1, 2, 3])
def test_never_more_than_one_file_above_the_kept_is_on_disk(tmp_path, keep_last):
    trainer = Saver(tmp_path)
    train(AtomicCheckpoint(every_n_steps=1, keep_last=keep_last), trainer, *range(1, 9))
    assert trainer.most_files == keep_last + 1


def test_file_from_before_a_row_of_skipped_updates_is_kept(tmp_path):
    trainer, callback = Saver(tmp_path), AtomicCheckpoint(every_n_steps=1, keep_last=2)
    train(callback, trainer, 1, 2, 3)
    for step in (4, 5, 6):  # the update of step 3 broke the weights
        trainer.lightning_module.skipped_in_row = step - 3
        train(callback, trainer, step)
    assert trainer.kept == [6, 5, 2]
    trainer.lightning_module.skipped_in_row = 0
    train(callback, trainer, 7)
    assert trainer.kept == [7, 6]


# Failures


def test_failed_save_is_told_and_training_goes_on(tmp_path, capsys):
    trainer, callback = Saver(tmp_path), AtomicCheckpoint(every_n_steps=1)
    train(callback, trainer, 1)
    trainer.error = OSError(errno.ENOSPC, "No space left on device")
    train(callback, trainer, 2)
    path = tmp_path / "checkpoints" / "step-00000002.ckpt"
    assert trainer.kept == [1]
    assert capsys.readouterr().err == (
        f"error: checkpoint not saved: {path}: [Errno 28] No space left on device; the newest "
        "checkpoint is step-00000001.ckpt\n"
    )


def test_failed_save_at_a_stop_is_told_once(tmp_path, capsys):
    trainer: Any = Saver(tmp_path)
    callback = AtomicCheckpoint(every_n_steps=10)
    trainer.checkpoint_callbacks = [callback]
    trainer.error = OSError(errno.ENOSPC, "No space left on device")
    stop = StopRequests()
    stop.received, trainer.global_step = int(signal.SIGTERM), 3
    with pytest.raises(RuntimeError, match="stopped") as refusal:
        StopSignals(stop).on_train_batch_end(trainer, NO_MODULE, None, None, 2)
    path = tmp_path / "checkpoints" / "step-00000003.ckpt"
    assert capsys.readouterr().err == ""
    assert str(refusal.value) == (
        f"stopped at step 3, not saved: {path}: [Errno 28] No space left on device; there is no "
        "checkpoint yet"
    )


def test_run_whose_last_save_failed_ends_with_one_error(tmp_path, capsys):
    trainer: Any = Saver(tmp_path, max_steps=2)
    callback = AtomicCheckpoint(every_n_steps=1)
    trainer.error = RuntimeError("file write failed")
    train(callback, trainer, 2)
    path = tmp_path / "checkpoints" / "step-00000002.ckpt"
    with pytest.raises(RuntimeError, match="could not be written") as refusal:
        callback.on_train_end(trainer, NO_MODULE)
    assert str(refusal.value) == (
        f"the last checkpoint could not be written: {path}: file write failed; there is no "
        "checkpoint yet"
    )
    assert capsys.readouterr().err == ""


def test_save_falls_due_by_the_clock_too(tmp_path):
    trainer, callback = Saver(tmp_path), AtomicCheckpoint(every_minutes=2.0)
    clock = iter([*[60.0 * minute for minute in range(1, 9)]] * 2)
    callback._saved_at, callback._now = 0.0, lambda: next(clock)
    train(callback, trainer, 1)
    assert trainer.kept == []
    train(callback, trainer, 2)
    assert trainer.kept == [2]


def test_last_save_is_tried_again_with_the_state_of_its_step(tmp_path, monkeypatch):
    trainer: Any = Saver(tmp_path, max_steps=2)
    callback = AtomicCheckpoint(every_n_steps=1)
    weight = WEIGHT.clone()
    monkeypatch.setattr(trainer, "content", lambda: content(2) | {"state_dict": {"w": weight}})
    (tmp_path / "checkpoints").touch()
    train(callback, trainer, 2)
    (tmp_path / "checkpoints").unlink()
    weight.zero_()  # as a callback that leaves an average in the place of the weights
    callback.on_train_end(trainer, NO_MODULE)
    path = tmp_path / "checkpoints" / "step-00000002.ckpt"
    assert torch.equal(read_checkpoint(path)["state_dict"]["w"], WEIGHT)


def test_later_save_makes_up_for_a_failed_one(tmp_path):
    trainer: Any = Saver(tmp_path)
    callback = AtomicCheckpoint(every_n_steps=1)
    trainer.error = OSError("full")
    train(callback, trainer, 1)
    trainer.error = None
    train(callback, trainer, 2)
    callback.on_train_end(trainer, NO_MODULE)
    assert trainer.kept == [2]


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 400 kB, which holds two checkpoints, mounted for the test."""
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=400k", "tmpfs", str(folder)]
    if shutil.which("mount") is None or subprocess.run(command, check=False).returncode:
        pytest.skip("this user may not mount a file system")
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


def test_run_on_a_full_disk_keeps_its_checkpoints_trains_to_its_end_and_reports_it(
    disk, run_yaml, lightning
):
    root = disk / "run"
    every_step = {"checkpoint.every_n_steps": 1, "trainer.default_root_dir": str(root)}
    code, _, err = lightning("fit", "--config", run_yaml(every_step))
    assert (code, "Traceback" in err) == (1, False)
    assert "step 6/6 · loss" in err
    last = root / "checkpoints" / "step-00000006.ckpt"
    assert err.splitlines()[-1].startswith(
        f"error: the last checkpoint could not be written: {last}: [Errno 28] No space left"
    )
    assert err.splitlines()[-1].endswith("; the newest checkpoint is step-00000002.ckpt")
    failures = [line for line in err.splitlines() if line.startswith("error: checkpoint not saved")]
    assert [line.partition("step-")[2][:8] for line in failures] == [
        "00000003",
        "00000004",
        "00000005",
    ]
    assert [(step, damage(path)) for step, path in checkpoints(root)] == [(2, None), (1, None)]
    assert len(list(last.parent.iterdir())) == 2


@pytest.mark.parametrize(("name", "refused"), [("run", "run/.lock"), ("new", "new")])
def test_run_on_a_read_only_disk_is_refused_in_one_line(disk, run_yaml, lightning, name, refused):
    two_files = {"checkpoint.every_n_steps": 3, "trainer.default_root_dir": str(disk / "run")}
    config = run_yaml(two_files)
    assert lightning("fit", "--config", config)[0] == 0
    subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
    longer = ["--trainer.max_steps", 8, "--trainer.default_root_dir", disk / name]
    code, _, err = lightning("fit", "--config", config, *longer)
    assert (code, err) == (1, f"error: [Errno 30] Read-only file system: '{disk / refused}'\n")
    assert damage(disk / "run" / "checkpoints" / "step-00000006.ckpt") is None


@pytest.mark.slow
def test_run_under_a_file_size_limit_trains_to_its_end_and_reports_it(run_yaml, tmp_path):
    config = run_yaml({"checkpoint.every_n_steps": 5, "model.config.d_model": 64})
    limited = ["bash", "-c", 'ulimit -f 64; exec "$@"', "-", sys.executable, "cli.py", "fit"]
    command = [*limited, "--config", str(config)]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    path = tmp_path / "run" / "checkpoints" / "step-00000006.ckpt"
    assert (result.returncode, list(path.parent.iterdir())) == (1, [])
    assert "step 6/6 · loss" in result.stderr
    last = result.stderr.splitlines()[-1]
    assert last.startswith(f"error: the last checkpoint could not be written: {path}: ")
    assert "File too large" in last


# Start of a run


def test_stale_temporaries_are_swept_when_training_starts(tmp_path):
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    (folder / "a.ckpt.tmp-77").write_bytes(b"torn")
    trainer, callback = Saver(tmp_path), AtomicCheckpoint()
    callback.setup(any_trainer(trainer), NO_MODULE, "fit")
    assert [path.name for path in folder.iterdir()] == ["a.ckpt.tmp-77"]
    callback.on_train_start(any_trainer(trainer), NO_MODULE)
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"every_n_steps": 0}, "checkpoint.every_n_steps is 0: must be at least 1"),
        ({"keep_last": 0}, "checkpoint.keep_last is 0: must be at least 1"),
        ({"keep_every": 0}, "checkpoint.keep_every is 0: must be at least 1, or null"),
    ],
)
def test_setting_below_one_is_refused(options, text):
    with pytest.raises(ValueError, match="must be at least 1") as refusal:
        AtomicCheckpoint(**options)
    assert str(refusal.value) == text


# Resuming


class Part:
    """A module or a datamodule with a contract."""

    def __init__(self, refused: list[str] | None = None, **values: Any) -> None:
        self.values = {name.replace("__", "."): value for name, value in values.items()}
        self.refused = refused or []

    def contract(self) -> dict[str, Any]:
        return self.values

    def refused_changes(self, old: dict[str, Any]) -> list[str]:
        return self.refused

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.position = state_dict


def resuming(root: Path, module: Part, data: Part | None = None, fn: str = "fit") -> Any:
    trainer: Any = Saver(root)
    trainer.lightning_module, trainer.datamodule = module, data or Part()
    trainer.gradient_clip_val, trainer.precision, trainer.world_size = 1.0, "32-true", 1
    trainer.state.fn = fn
    return trainer


def held(module: Part) -> dict[str, Any]:
    position = {"samples": 8}
    return {
        "contract": module.contract(), "random_states": [], "global_step": 4, "Part": position
    }  # fmt: skip


def test_checkpoint_without_a_contract_is_refused(tmp_path):
    with pytest.raises(ValueError, match="no contract") as refusal:
        AtomicCheckpoint().check(resuming(tmp_path, Part()), content())
    assert str(refusal.value) == "the checkpoint has no contract: it was not made by fit"


def test_checkpoint_of_another_run_is_refused_with_every_difference(tmp_path):
    old = held(Part(model__config__d_model=16, seed_everything=1, model__optim__lr=0.1))
    new = Part(model__config__d_model=24, seed_everything=2, model__optim__lr=0.2)
    with pytest.raises(ValueError, match="another run") as refusal:
        AtomicCheckpoint().check(resuming(tmp_path, new, Part(["the data is new"])), old)
    assert str(refusal.value) == (
        "the checkpoint belongs to another run: model.config.d_model was 16 and is 24 now; "
        "seed_everything was 1 and is 2 now; the data is new; go back to the old values, or start "
        "anew in another trainer.default_root_dir"
    )


def test_other_changes_are_announced_with_old_and_new(tmp_path, capsys):
    old, new = held(Part(model__optim__lr=0.1)), Part(model__optim__lr=0.2)
    AtomicCheckpoint().check(resuming(tmp_path, new), old)
    assert capsys.readouterr().err == "changed since the checkpoint: model.optim.lr 0.1 -> 0.2\n"


def test_validation_neither_announces_changes_nor_asks_the_data(tmp_path, capsys):
    trainer = resuming(tmp_path, Part(model__optim__lr=0.2), Part(["refused"]), fn="validate")
    AtomicCheckpoint().check(trainer, held(Part(model__optim__lr=0.1)))
    assert capsys.readouterr().err == ""


def test_position_is_known_before_the_contract_is_compared(tmp_path):
    data = Part()
    AtomicCheckpoint().check(resuming(tmp_path, Part(), data), held(Part()))
    assert data.position == {"samples": 8}


def test_validation_by_another_tokenizer_is_refused(tmp_path):
    old, new = ({"tokenizer fingerprint": name} for name in ("one", "other"))
    trainer = resuming(tmp_path, Part(None, **new), fn="validate")
    with pytest.raises(ValueError, match="tokenizer fingerprint was one and is other now"):
        AtomicCheckpoint().check(trainer, held(Part(None, **old)))


def test_loading_a_folder_takes_its_newest_whole_file_and_says_which(tmp_path, capsys):
    sound = save(tmp_path, 4)
    truncate(save(tmp_path, 6))
    checked: list[int] = []
    trainer: Any = Saver(tmp_path)
    io = AtomicCheckpointIO(trainer, lambda checkpoint: checked.append(checkpoint["global_step"]))
    assert io.load_checkpoint(tmp_path)["global_step"] == 4
    assert checked == [4]
    assert capsys.readouterr().err.splitlines()[1] == f"resuming from {sound} at step 4"


def bytes_read() -> int:
    """Bytes that this process has read so far."""
    return int(Path("/proc/self/io").read_text("ascii").split()[1])


@pytest.mark.parametrize("name", ["", "checkpoints/step-00000004.ckpt"])
def test_a_checkpoint_is_read_twice_at_most(tmp_path, name):
    path = tmp_path / "checkpoints" / "step-00000004.ckpt"
    large = content(4) | {"state_dict": {"net.weight": torch.zeros(1_000_000)}}
    write_checkpoint(large, path)
    trainer: Any = Saver(tmp_path)
    before = bytes_read()
    AtomicCheckpointIO(trainer, lambda _: None).load_checkpoint(tmp_path / name)
    assert bytes_read() - before < 2.1 * path.stat().st_size


def test_loading_a_folder_of_damaged_files_is_an_error(tmp_path):
    truncate(save(tmp_path, 6))
    trainer: Any = Saver(tmp_path)
    with pytest.raises(ValueError, match=f"^all 1 checkpoints of {tmp_path} are damaged"):
        AtomicCheckpointIO(trainer, unexpected).load_checkpoint(tmp_path)


def test_removing_a_checkpoint_twice_is_no_error(tmp_path):
    trainer: Any = Saver(tmp_path)
    io, path = AtomicCheckpointIO(trainer, unexpected), save(tmp_path, 4)
    io.remove_checkpoint(path)
    io.remove_checkpoint(path)
    assert not path.exists()


def counts(ready: int, completed: int) -> dict[str, int]:
    """Lightning's count of micro-batches, begun and finished."""
    return {"ready": ready, "started": ready, "processed": completed, "completed": completed}


def loaded(trainer: Any, trained: Any, validated: Any, due: bool = False) -> None:
    """Have a checkpoint of step 4, at two micro-batches a step, changed for a resume."""
    loops = {"epoch_loop.batch_progress": trained, "epoch_loop.val_loop.batch_progress": validated}
    checkpoint = {
        "global_step": 4,
        "loops": {"fit_loop": loops},
        "contract": {"trainer.accumulate_grad_batches": 2},
        "callbacks": {"AtomicCheckpoint": {"best": {}}},
        "validation_due": due,
    }
    AtomicCheckpoint().on_load_checkpoint(trainer, NO_MODULE, checkpoint)


def test_position_is_recounted_in_the_micro_batches_of_the_new_accumulation(tmp_path):
    trainer: Any = Saver(tmp_path)
    trainer.accumulate_grad_batches = 3
    trained = {"total": counts(8, 7), "current": counts(8, 7), "is_last_batch": True}
    loaded(trainer, trained, {"total": counts(0, 0), "current": counts(0, 0)})
    recounted = counts(12, 11)
    assert trained == {"total": recounted, "current": recounted, "is_last_batch": False}


@pytest.mark.parametrize(
    ("due", "total", "current"),
    [(False, counts(9, 9), counts(3, 3)), (True, counts(7, 6), counts(1, 0))],
    ids=["made up", "due"],
)
def test_validation_is_made_up_only_where_it_is_due(tmp_path, due, total, current):
    # A validation made up leaves one micro-batch more begun than finished.
    validated = {"total": counts(10, 9), "current": counts(4, 3), "is_last_batch": True}
    trained = {"total": counts(8, 8), "current": counts(8, 8), "is_last_batch": False}
    loaded(Saver(tmp_path), trained, validated, due)
    assert (validated["total"], validated["current"]) == (total, current)


@pytest.mark.parametrize("interval", [3, 100])
def test_finished_run_can_be_lengthened(run_yaml, lightning, interval):
    config = run_yaml({"trainer.val_check_interval": interval})
    assert lightning("fit", "--config", config)[0] == 0
    code, _, err = lightning("fit", "--config", config, "--trainer.max_steps", 8)
    assert code == 0, err
    assert "step 7/8 · loss" in err
    assert "step 8/8 · loss" in err


def test_moved_run_folder_is_resumed_where_it_is_now(run_yaml, lightning, tmp_path):
    config = run_yaml()
    assert lightning("fit", "--config", config)[0] == 0
    moved = (tmp_path / "run").rename(tmp_path / "moved")
    longer = ["--trainer.max_steps", 8, "--trainer.default_root_dir", moved]
    code, _, err = lightning("fit", "--config", config, *longer)
    assert code == 0, err
    assert f"resuming from {moved}/checkpoints/step-00000006.ckpt at step 6\n" in err
    assert checkpoints(moved)[0] == (8, moved / "checkpoints" / "step-00000008.ckpt")
    assert not (tmp_path / "run").exists()


# Random states


def draws() -> tuple[float, float, float]:
    return random.random(), np.random.rand(), torch.rand(()).item()


def test_random_states_survive_a_safe_load_and_repeat_the_draws(tmp_path):
    np.random.randn()  # leaves half a pair in the state
    torch.save(random_states(), tmp_path / "states")
    expected = [draws(), draws()]
    restore_random_states(torch.load(tmp_path / "states", weights_only=True))
    assert [draws(), draws()] == expected


def test_checkpoint_of_a_run_is_loaded_safely(run_yaml, lightning, tmp_path):
    assert lightning("fit", "--config", run_yaml())[0] == 0
    path = tmp_path / "run" / "checkpoints" / "step-00000006.ckpt"
    checkpoint = torch.load(path, weights_only=True)
    assert {"state_dict", "optimizer_states", "contract", "random_states"} <= checkpoint.keys()
