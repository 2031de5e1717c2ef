"""Files that are no UTF-8 text: found by their bytes, and converted as the error says."""

import json
import shutil
import subprocess
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from data.prepare.readers import InputFile
from data.prepare.texts import NULS, REPLACED, UNDECODED, Note, ReadOptions

ENGLISH, RUSSIAN, CHINESE = "Two lines,\nof text.\n" * 9, "Привет, мир!\n" * 9, "你好，世界。\n" * 9
WIDE = ("utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-le", "utf-32-be")
IN_BULK = "no text, or in another encoding"


def _fault(path: Path, content: bytes, **options) -> str:
    path.write_bytes(content)
    (note,) = InputFile(path, ReadOptions(**options))
    assert isinstance(note, Note)
    assert note.fault is not None
    return note.fault


@pytest.mark.parametrize("encoding", WIDE)
@pytest.mark.parametrize("errors", ["strict", "replace"])
@pytest.mark.parametrize("name", ["my text.txt", "a.jsonl"])
def test_wide_text_is_refused_by_a_way_out_that_works(
    tmp_path, monkeypatch, encoding, errors, name
):
    if not shutil.which("iconv"):
        pytest.skip("no iconv here")
    monkeypatch.chdir(tmp_path)
    content = json.dumps({"text": ENGLISH}) if name == "a.jsonl" else ENGLISH
    fault = _fault(Path(name), content.encode(encoding), encoding_errors=errors)
    command = fault.partition("; convert it by ")[2].partition(", or leave")[0]
    subprocess.run(command, shell=True, check=True)
    assert list(InputFile(Path(f"utf8-{name}"), ReadOptions())) == [ENGLISH]


def test_wide_text_is_named_with_its_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert _fault(Path("a.txt"), "hi\n".encode("utf-16-be")) == (
        "a.txt, byte 0: UTF-16BE, and only UTF-8 is read; convert it by iconv -f UTF-16BE -t UTF-8 "
        "a.txt > utf8-a.txt, or leave the rest of the file out by --on_bad_row skip"
    )


@pytest.mark.parametrize("encoding", [*WIDE, "cp1251", "koi8-r"])
@pytest.mark.parametrize("text", [RUSSIAN, RUSSIAN * 999], ids=["short", "long"])
def test_other_letters_are_refused_too(tmp_path, encoding, text):
    for errors in ("strict", "replace"):
        fault = _fault(tmp_path / "a.txt", text.encode(encoding), encoding_errors=errors)
        assert ("; convert it by iconv -f " in fault, "replace" in fault) == (True, False)


@pytest.mark.parametrize("encoding", [*WIDE, "gbk", "big5"])
def test_letters_of_two_bytes_are_refused_too(tmp_path, encoding):
    for errors in ("strict", "replace"):
        fault = _fault(tmp_path / "a.txt", CHINESE.encode(encoding), encoding_errors=errors)
        assert ("; convert it by iconv -f " in fault, "replace" in fault) == (True, False)


def test_some_bytes_that_are_not_utf8_may_be_replaced(tmp_path):
    content = ("Le café était fermé à Noël. " * 9).encode("latin-1")
    assert "by --encoding_errors replace" in _fault(tmp_path / "a.txt", content)
    replaced = [*InputFile(tmp_path / "a.txt", ReadOptions(encoding_errors="replace"))]
    assert len(replaced) == 2


@pytest.mark.parametrize("content", [bytes(50), ENGLISH.encode() + bytes(50), b"\x7fELF\1\2\3" * 9])
def test_binary_files_are_no_text(tmp_path, content):
    assert IN_BULK in _fault(tmp_path / "a.txt", content)


def test_part_of_a_long_text_is_judged_by_itself(tmp_path):
    long = b"abc\n" * 100_000
    fault = _fault(tmp_path / "a.txt", long + ENGLISH.encode("utf-16-le") * 100 + long)
    assert f"{IN_BULK} (" in fault


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet"])
def test_rows_of_every_kind_are_judged(tmp_path, name):
    text = ENGLISH.encode("utf-16-le").decode("latin-1")
    if name == "a.jsonl":
        (tmp_path / name).write_text(json.dumps({"text": text}), encoding="utf-8")
    else:
        pyarrow.parquet.write_table(pyarrow.table({"text": [text]}), tmp_path / name)
    (note,) = InputFile(tmp_path / name, ReadOptions())
    assert isinstance(note, Note)
    assert f"{IN_BULK} (180 of 360 characters are NUL or control characters)" in (note.fault or "")


@pytest.mark.parametrize(
    "text", ["a\x1b[31mred\x1b[0m " * 99, "page\x0c\r\n\tnext\v" * 99, "\x07" * 9]
)
def test_text_with_marks_of_its_own_is_text(tmp_path, text):
    (tmp_path / "a.txt").write_bytes(text.encode())
    assert list(InputFile(tmp_path / "a.txt", ReadOptions())) == [text.replace("\r\n", "\n")]


def test_text_that_was_decoded_wrongly_before_is_counted(tmp_path):
    text = "na\ufffdve caf\ufffd\ufffd"
    (tmp_path / "a.txt").write_text(text, encoding="utf-8")
    assert list(InputFile(tmp_path / "a.txt", ReadOptions())) == [Note(UNDECODED, count=3), text]


def test_bytes_replaced_now_are_not_counted_as_decoded_before(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"caf\xe9")
    options = ReadOptions(encoding_errors="replace")
    assert list(InputFile(tmp_path / "a.txt", options)) == [Note(REPLACED), "caf\ufffd"]


def test_single_nuls_are_kept_and_counted(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"one \0 of many")
    assert list(InputFile(tmp_path / "a.txt", ReadOptions())) == [Note(NULS), "one \0 of many"]
