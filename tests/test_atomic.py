"""Atomic writes: whole, durable, and used by everything that publishes a file."""

import errno
import os
import stat
from pathlib import Path
from typing import Any

import pytest
from conftest import Lightning, RunYaml, full_disk

from data.system.atomic import make_folder, replace_text, replaced


class Disk:
    """What is durable: inodes whose content was synced, and names of synced folders."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.synced: set[int] = set()
        self.published: list[Path] = []
        self.hasty: list[str] = []  # renamed before the content was synced
        self.unsure: dict[Path, Path] = {}  # renamed, and the folder not synced since
        fsync, replace = os.fsync, os.replace

        def watch_fsync(file: int) -> None:
            fsync(file)
            place = Path(os.readlink(f"/proc/self/fd/{file}"))
            self.synced.add(place.stat().st_ino)
            if stat.S_ISDIR(place.stat().st_mode):
                self.unsure = {p: f for p, f in self.unsure.items() if f != place.resolve()}

        def watch_replace(source: Any, target: Any) -> None:
            if os.stat(source).st_ino not in self.synced:
                self.hasty.append(str(target))
            replace(source, target)
            self.published.append(Path(target))
            self.unsure[Path(target)] = Path(target).parent.resolve()

        patch.setattr(os, "fsync", watch_fsync)
        patch.setattr(os, "replace", watch_replace)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    return Disk(monkeypatch)


def test_replaced_text_leaves_only_the_new_file(tmp_path):
    path = tmp_path / "run.json"
    replace_text(path, "old")
    replace_text(path, "λ new\r\n")
    assert path.read_bytes() == "λ new\r\n".encode()
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError(errno.EIO, "Input/output error")])
@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_interrupted_replacement_leaves_the_old_text(tmp_path, monkeypatch, call, error):
    def fail(*_: Any) -> None:
        raise error

    path = tmp_path / "run.json"
    replace_text(path, "old")
    monkeypatch.setattr(os, call, fail)
    with pytest.raises(type(error)):
        replace_text(path, "new")
    assert path.read_text(encoding="utf-8") == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_error_without_a_path_is_given_the_path(tmp_path):
    path = tmp_path / "run.json"
    with pytest.raises(OSError, match="No space") as full, replaced(path):
        raise OSError(errno.ENOSPC, "No space left on device")
    assert str(full.value) == f"[Errno 28] No space left on device: '{path}'"


def test_folder_is_made_with_its_parents(tmp_path, disk):
    make_folder(tmp_path / "a" / "b")
    make_folder(tmp_path / "a" / "b")
    assert disk.synced == {each.stat().st_ino for each in (tmp_path, tmp_path / "a")}


def test_run_publishes_nothing_that_a_power_failure_could_lose(
    lightning: Lightning, run_yaml: RunYaml, tmp_path: Path, disk: Disk
):
    code, _, err = lightning("fit", "--config", run_yaml())
    assert code == 0, err
    assert (disk.hasty, disk.unsure) == ([], {})
    names = {path.name for path in disk.published}
    assert names >= {"config.yaml", "run.json", "tokenizer.json", "metrics.csv"}
    assert names >= {"step-00000006.ckpt", "weights.safetensors"}


def test_preparing_publishes_nothing_that_a_power_failure_could_lose(
    lightning: Lightning, tmp_path: Path, disk: Disk
):
    code, _, err = lightning("prepare", *prepare_words(tmp_path))
    assert code == 0, err
    assert (disk.hasty, disk.unsure) == ([], {})
    order = [path.name for path in disk.published if path.parent == tmp_path / "out"]
    assert order[-2:] == ["tokenizer.json", "meta.json"]
    assert {"train.bin", "val.bin"} < set(order)


def prepare_words(folder: Path) -> list[Any]:
    rows = "".join(f'{{"text": "row {number} of a few"}}\n' for number in range(3000))
    (folder / "rows.jsonl").write_text(rows, encoding="utf-8")
    words = ["--input", folder / "rows.jsonl", "--vocab_size", 270, "--val_fraction", 0.5]
    return [*words, "--output", folder / "out"]


@pytest.mark.parametrize(("room", "file"), [(700, "tokenizer.json"), (9000, "train.bin")])
def test_preparing_on_a_full_disk_names_the_file_and_goes_on_when_there_is_room(
    lightning: Lightning, tmp_path: Path, room: int, file: str
):
    words, work = prepare_words(tmp_path), tmp_path / "out" / ".work"
    with full_disk(room):
        code, _, err = lightning("prepare", *words)
    error, note = err.splitlines()[-2:]
    assert (code, error) == (1, f"error: [Errno 27] File too large: '{work / file}'")
    assert note.startswith(f"{work} keeps 0 documents, ")
    assert note.endswith(" MB are free there; mend that, and the same call goes on")
    assert lightning("prepare", *words)[0] == 0
    assert not work.exists()


@pytest.mark.parametrize("damaged", ["{}", "[]", "null", '{"job": 1}', "{", "ä"])
def test_damaged_state_of_a_preparation_begins_it_anew(
    lightning: Lightning, tmp_path: Path, damaged: str
):
    words, work = prepare_words(tmp_path), tmp_path / "out" / ".work"
    with full_disk(9000):
        assert lightning("prepare", *words)[0] == 1
    (work / "state.json").write_text(damaged, encoding="cp1252")
    assert lightning("prepare", *words)[0] == 0


def test_state_that_cannot_be_read_throws_no_work_away(lightning: Lightning, tmp_path: Path):
    words, work = prepare_words(tmp_path), tmp_path / "out" / ".work"
    with full_disk(9000):
        assert lightning("prepare", *words)[0] == 1
    (work / "state.json").unlink()
    (work / "state.json").mkdir()
    code, _, err = lightning("prepare", *words)
    assert (code, err) == (1, f"error: [Errno 21] Is a directory: '{work / 'state.json'}'\n")
    assert (work / "train.bin").exists()


def test_rows_are_durable_before_the_checkpoint_that_follows_them(
    lightning: Lightning, run_yaml: RunYaml, tmp_path: Path, monkeypatch
):
    moments: list[tuple[str, int]] = []
    fsync, replace = os.fsync, os.replace

    def rows() -> int:
        path = tmp_path / "run" / "metrics.csv"
        return path.read_text(encoding="utf-8").count("\n") if path.exists() else 0

    def watch_fsync(file: int) -> None:
        fsync(file)
        if os.readlink(f"/proc/self/fd/{file}").endswith("metrics.csv"):
            moments.append(("rows", rows()))

    def watch_replace(source: Any, target: Any) -> None:
        replace(source, target)
        if str(target).endswith(".ckpt"):
            moments.append((Path(target).stem, rows()))

    monkeypatch.setattr(os, "fsync", watch_fsync)
    monkeypatch.setattr(os, "replace", watch_replace)
    code, _, err = lightning("fit", "--config", run_yaml({"trainer.limit_val_batches": 0}))
    assert code == 0, err
    names = [name for name, _ in moments]
    for step in (2, 4, 6):
        # The file is written beside training, which may have logged more by then.
        before = moments[: names.index(f"step-{step:08d}")]
        assert max(n_lines for name, n_lines in before if name == "rows") >= step + 1
