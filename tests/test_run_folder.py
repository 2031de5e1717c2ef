"""The run folder: one owner at a time, and a record that survives damage."""

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from callbacks.run.folder import (
    RunRecord,
    commit,
    contract,
    filesystem_type,
    leave,
    lock,
    volatile_folder,
)

ROOT = Path(__file__).parent.parent
NO_MODULE: Any = None


# Lock


def test_refusal_names_the_owner_and_the_ways_out(tmp_path):
    with lock(tmp_path), pytest.raises(ValueError, match="is in use") as refusal, lock(tmp_path):
        pass
    assert str(refusal.value) == (
        f"{tmp_path} is in use by another run (process {os.getpid()}): two runs must not write to "
        "one folder; stop that one or give another trainer.default_root_dir"
    )


# Volatile folders


@pytest.mark.parametrize("place", ["/tmp", "/var/tmp"])
def test_temporary_folder_is_volatile(place):
    root = Path(place, "runs", "a")
    assert volatile_folder(root) in (
        f"{root} is under a temporary folder that systems clean",
        f"{root} is on a tmpfs: it is gone after a reboot",
    )


@pytest.mark.skipif(filesystem_type(Path("/dev/shm")) != "tmpfs", reason="needs a tmpfs")
def test_tmpfs_is_volatile():
    root = Path("/dev/shm/runs/a")
    assert volatile_folder(root) == f"{root} is on a tmpfs: it is gone after a reboot"


def test_ordinary_folder_is_not_volatile():
    assert volatile_folder(Path("/usr/runs/a")) is None


def mounts(*lines: str) -> Any:
    return lambda *_, **__: "\n".join(lines)


@pytest.mark.parametrize(
    ("path", "kind"),
    [("/runs/a", "tmpfs"), ("/runs", "tmpfs"), ("/runsx/a", "ext4"), ("/runs/nfs/a", "nfs4")],
)
def test_file_system_is_that_of_the_nearest_mount(path, kind, monkeypatch):
    lines = ("/dev/a / ext4 rw 0 0", "none /runs tmpfs rw 0 0", "host:/x /runs/nfs nfs4 rw 0 0")
    monkeypatch.setattr(Path, "read_text", mounts(*lines))
    assert filesystem_type(Path(path)) == kind


def test_file_system_is_unknown_without_proc(monkeypatch):
    def fail(*_: Any, **__: Any) -> None:
        raise FileNotFoundError

    monkeypatch.setattr(Path, "read_text", fail)
    assert filesystem_type(Path("/runs")) is None


# Record


class Part:
    """A module or a datamodule with a contract."""

    def __init__(self, folder: Path | None = None, **values: Any) -> None:
        self.values = values
        self.tokenizer_path = folder and folder / "tokenizer.json"

    def contract(self) -> dict[str, Any]:
        return self.values


def stand_in(root: Path, **changes: Any) -> Any:
    """What RunRecord asks of a Trainer."""
    data = root / "data"
    data.mkdir(exist_ok=True)
    (data / "tokenizer.json").write_text('{"λ": 1}', encoding="utf-8")
    values = {
        "default_root_dir": str(root),
        "fast_dev_run": 0,
        "global_step": 0,
        "max_steps": 9,
        "gradient_clip_val": None,
        "accumulate_grad_batches": 2,
        "precision": "32-true",
        "world_size": 1,
        "strategy": SimpleNamespace(root_device=torch.device("cpu")),
        "lightning_module": Part(seed_everything=5),
        "datamodule": Part(data, fingerprint="abc"),
        "callbacks": [],
    }
    return SimpleNamespace(**values | changes)


def record(root: Path, **changes: Any) -> dict[str, Any]:
    """Start a run and read its record."""
    RunRecord().on_train_start(stand_in(root, **changes), NO_MODULE)
    return json.loads((root / "run.json").read_text(encoding="utf-8"))


def test_record_keeps_earlier_starts(tmp_path):
    record(tmp_path)
    record(tmp_path, global_step=4)
    starts = record(tmp_path, global_step=6)["starts"]
    assert [start["step"] for start in starts] == [0, 4, 6]
    assert starts[0]["command"] == sys.argv


@pytest.mark.parametrize("damaged", ["", '{"starts": [', "{}", "[]", "null", '{"starts": 5}', "ä"])
def test_damaged_record_is_set_aside_and_begun_anew(tmp_path, capsys, damaged):
    path = tmp_path / "run.json"
    path.write_text(damaged, encoding="cp1252")
    assert [start["step"] for start in record(tmp_path, global_step=4)["starts"]] == [4]
    aside = tmp_path / "run.json.set-aside"
    assert f"set aside as {aside}; it begins anew" in capsys.readouterr().err
    assert aside.read_text(encoding="cp1252") == damaged


def test_record_with_a_byte_order_mark_keeps_its_starts(tmp_path):
    record(tmp_path)
    path = tmp_path / "run.json"
    path.write_text(path.read_text(encoding="utf-8"), encoding="utf-8-sig")
    assert [start["step"] for start in record(tmp_path, global_step=4)["starts"]] == [0, 4]


@pytest.mark.parametrize("name", ["run.json", "tokenizer.json"])
def test_folder_in_the_place_of_a_file_is_set_aside(tmp_path, capsys, name):
    (tmp_path / name).mkdir()
    record(tmp_path)
    assert f"set aside as {tmp_path / name}.set-aside" in capsys.readouterr().err
    assert (tmp_path / name).is_file()


@pytest.mark.parametrize("name", ["run.json", "console.log"])
@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, lambda path: os.symlink("nowhere", path)])
def test_what_is_no_file_is_set_aside_unread(tmp_path, capsys, name, make):
    make(tmp_path / name)
    record(tmp_path)
    aside = tmp_path / f"{name}.set-aside"
    told = f"warning: {tmp_path / name} is no file: set aside as {aside}"
    assert capsys.readouterr().err.count(told) == 1
    assert os.path.lexists(aside)


def test_file_that_cannot_be_written_costs_a_warning(tmp_path, capsys):
    (tmp_path / "file").touch()
    leave(tmp_path / "file" / "run.json", "{}")
    assert capsys.readouterr().err == (
        f"warning: run.json is not written: [Errno 17] File exists: '{tmp_path / 'file'}'; the run "
        "goes on\n"
    )


def test_record_tells_versions_device_and_contract(tmp_path):
    found = record(tmp_path)
    assert found["versions"]["torch"] == torch.__version__
    assert found["contract"]["device"].startswith("cpu (")
    assert found["contract"]["seed_everything"] == 5


def test_record_puts_the_tokenizer_beside_it(tmp_path):
    record(tmp_path)
    assert (tmp_path / "tokenizer.json").read_text(encoding="utf-8") == '{"λ": 1}'


def test_trial_run_leaves_no_record(tmp_path):
    trainer = stand_in(tmp_path, fast_dev_run=2)
    RunRecord().on_train_start(trainer, NO_MODULE)
    assert not (tmp_path / "run.json").exists()


def test_contract_joins_module_data_and_trainer(tmp_path):
    found = contract(stand_in(tmp_path))
    assert (found["seed_everything"], found["fingerprint"]) == (5, "abc")
    assert found["trainer.accumulate_grad_batches"] == 2
    assert found["version of torch"] == torch.__version__


def test_contract_leaves_out_parts_that_have_none(tmp_path):
    found = contract(stand_in(tmp_path, lightning_module=object(), datamodule=None))
    assert [key for key in found if not key.startswith(("trainer.", "version of "))] == ["device"]


def test_machine_without_git_has_no_commit(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert commit() is None


# Configuration


def test_configuration_left_by_a_run_lengthens_it(run_yaml, lightning, tmp_path):
    assert lightning("fit", "--config", run_yaml())[0] == 0
    config = tmp_path / "run" / "config.yaml"
    assert "every_n_steps: 2" in config.read_text(encoding="utf-8")
    code, _, err = lightning("fit", "--config", config)
    assert (code, err.splitlines()[-1]) == (0, "finished at step 6 of 6")
