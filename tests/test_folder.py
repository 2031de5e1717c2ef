"""A prepared folder: what is refused of one that is not whole."""

import json
import shutil
from pathlib import Path

import pytest

from data.prepare.vocabulary import train_bpe
from data.tokens.folder import FILES, check_files, load_meta, missing_files


@pytest.fixture
def output(corpus: Path, tmp_path: Path) -> Path:
    """A prepared folder."""
    shutil.copytree(corpus, tmp_path / "out")
    return tmp_path / "out"


def _change_meta(output, **changes):
    path = output / "meta.json"
    meta = json.loads(path.read_text(encoding="utf-8")) | changes
    path.write_text(json.dumps(meta), encoding="utf-8")


def test_files_of_a_folder_without_meta_are_the_usual_ones(tmp_path):
    assert missing_files(tmp_path) == list(FILES)


def test_files_that_meta_lists_are_missed(output):
    meta = load_meta(output)
    meta["train"]["files"] = ["train-00000.bin", "train.bin"]
    _change_meta(output, **meta)
    (output / "val.docs.npy").unlink()
    assert missing_files(output) == ["train-00000.bin", "val.docs.npy"]


def test_missing_meta_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"meta\.json does not exist: prepare the data again"):
        load_meta(tmp_path)


@pytest.mark.parametrize("content", [b'{"format": 1', b"\xff"])
def test_damaged_meta_is_refused(tmp_path, content):
    (tmp_path / "meta.json").write_bytes(content)
    with pytest.raises(ValueError, match=r"meta\.json is damaged"):
        load_meta(tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"train": {"tokens": 1}},
            "lacks train.bytes, train.documents, train.files, train.fingerprint",
        ),
        ({"val": 3}, "lacks val.bytes, val.documents, val.files, val.fingerprint, val.tokens"),
        ({"format": 1}, "format is 1, must be 2"),
        ({"dtype": "uint23"}, r"dtype is 'uint23', must be in \['uint16', 'uint32'\]"),
        ({"byte_order": "big"}, r"byte_order is 'big', must be in \['little'\]"),
    ],
)
def test_meta_that_cannot_be_trusted_is_refused(output, changes, message):
    _change_meta(output, **changes)
    with pytest.raises(ValueError, match=rf"meta\.json:? {message}: prepare the data again"):
        load_meta(output)


def test_meta_of_no_keys_is_refused(tmp_path):
    (tmp_path / "meta.json").write_text("[]", encoding="utf-8")
    with pytest.raises(ValueError, match="lacks byte_order, corpus, dtype, format"):
        load_meta(tmp_path)


def test_prepared_folder_passes_its_check(output):
    check_files(output, load_meta(output))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (
            "train.bin",
            b"\1\0",
            r"train\.bin has 2 bytes, meta\.json says \d+ \(\d+ tokens of uint16\)",
        ),
        ("tokenizer.json", None, r"out lacks tokenizer\.json"),
    ],
)
def test_file_of_another_size_or_none_is_refused(output, name, content, message):
    meta = load_meta(output)
    (output / name).unlink()
    if content is not None:
        (output / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        check_files(output, meta)


def test_file_of_the_same_size_but_other_content_is_refused(output):
    path = output / "val.bin"
    path.write_bytes(path.read_bytes()[:-2] + b"\7\0")
    with pytest.raises(ValueError, match=r"val\.bin has other content than meta\.json says"):
        check_files(output, load_meta(output))


def test_other_tokenizer_is_refused(output):
    train_bpe(["other"], 260).save(output / "tokenizer.json")
    with pytest.raises(ValueError, match=r"tokenizer\.json is another tokenizer"):
        check_files(output, load_meta(output))
