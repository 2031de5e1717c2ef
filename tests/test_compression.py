"""Compressed inputs: known by content, read to their end, named where they are not read."""

import bz2
import gzip
import io
import lzma
import subprocess
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import pytest
import zstandard

from data.prepare import chunks
from data.prepare.readers import InputFile, find_inputs
from data.prepare.texts import Note, ReadOptions

ROWS = b'{"text":"abc"}\n{"text":"de"}\n{"text":"f"}\n'
TEXTS = ["abc", "de", "f"]
COMPRESS = {
    "gzip": gzip.compress,
    "zstd": zstandard.ZstdCompressor().compress,
    "bzip2": bz2.compress,
    "xz": lzma.compress,
}


def _read(folder: Path, content: bytes, name: str = "a.jsonl") -> list[str | Note]:
    (folder / name).write_bytes(content)
    return list(InputFile(folder / name, ReadOptions()))


def _skippable(number: int, content: bytes) -> bytes:
    return bytes([0x50 + number]) + b"\x2a\x4d\x18" + len(content).to_bytes(4, "little") + content


def _long_window() -> bytes:
    options = zstandard.ZstdCompressionParameters(window_log=31, enable_ldm=True)
    engine = zstandard.ZstdCompressor(compression_params=options).compressobj()
    return engine.compress(ROWS) + engine.flush()


@pytest.mark.parametrize("compress", COMPRESS.values(), ids=COMPRESS)
@pytest.mark.parametrize("name", ["a.jsonl.bz2", "a.jsonl", "a.jsonl.xz", "a.JSONL.zstd"])
def test_compression_is_known_by_content_whatever_the_name(tmp_path, compress, name):
    assert _read(tmp_path, compress(ROWS), name) == TEXTS


def test_window_of_zstd_may_be_of_any_size(tmp_path):
    with pytest.raises(zstandard.ZstdError, match="too much memory"):
        zstandard.ZstdDecompressor().decompressobj().decompress(_long_window())
    assert _read(tmp_path, _long_window()) == TEXTS


@pytest.mark.parametrize("compress", COMPRESS.values(), ids=COMPRESS)
def test_members_may_be_many_and_empty(tmp_path, compress):
    content = compress(b"") + compress(ROWS) + compress(b"") + compress(ROWS) + bytes(4)
    assert _read(tmp_path, content) == [*TEXTS, *TEXTS]


@pytest.mark.parametrize(
    ("before", "after", "texts"),
    [
        ([b"pzstd"], [], TEXTS),
        ([b"x" * 999, b""], [b"seek table"], TEXTS),
        ([b"x" * 999], None, []),
    ],
)
def test_frames_of_zstd_without_data_are_passed_over(tmp_path, before, after, texts):
    head = b"".join(_skippable(place * 15, each) for place, each in enumerate(before))
    rows = b"" if after is None else COMPRESS["zstd"](ROWS)
    content = head + rows + b"".join(_skippable(14, each) for each in after or [])
    assert _read(tmp_path, content) == texts


@pytest.mark.parametrize("kind", COMPRESS)
def test_cut_off_data_is_a_fault_behind_what_could_be_read(tmp_path, kind):
    content = COMPRESS[kind](ROWS) + COMPRESS[kind](ROWS * 9)[:-1]
    *texts, note = _read(tmp_path, content)
    assert texts[:3] == TEXTS
    assert isinstance(note, Note)
    assert f": {kind} data that ends too early; " in str(note.fault)


@pytest.mark.parametrize("kind", ["bzip2", "xz"])
def test_few_bytes_that_stand_for_many_are_given_in_parts(tmp_path, monkeypatch, kind):
    monkeypatch.setattr(chunks, "CHUNK", 1000)
    (tmp_path / "a.txt").write_bytes(COMPRESS[kind](b" " * 999_999))
    sizes = [len(chunk) for chunk in chunks.Chunks(tmp_path / "a.txt")]
    assert (max(sizes), sum(sizes)) == (1000, 999_999)


def test_dictionary_of_zstd_is_asked_for(tmp_path):
    samples: list[Any] = [f"hello world {i} foo bar {i * 7}".encode() for i in range(2000)]
    words = zstandard.train_dictionary(1024, samples)
    content = zstandard.ZstdCompressor(dict_data=words).compress(ROWS)
    (note,) = _read(tmp_path, content)
    assert isinstance(note, Note)
    assert note.fault == (
        f"{tmp_path / 'a.jsonl'}, byte 0: zstd data that needs a dictionary; decompress it by zstd "
        "-d -D DICTIONARY, or leave the rest of the file out by --on_bad_row skip"
    )


def test_text_that_begins_like_compressed_data_is_text(tmp_path):
    assert _read(tmp_path, b"BZh9 begins a text", "a.txt") == ["BZh9 begins a text"]


@pytest.mark.parametrize(
    ("name", "content", "kind", "command"),
    [
        ("a.jsonl", b"PK\x05\x06" + bytes(18), "an empty zip archive", "python3 -m zipfile -e"),
        ("a.txt", b"7z\xbc\xaf\x27\x1cx", "a 7z archive", "7z x"),
        ("a.txt", b"Rar!\x1a\x07\x00", "a rar archive", "unrar x"),
        ("a.jsonl.lz4", b"\x04\x22\x4d\x18x", "compressed by lz4", "lz4 -d"),
        ("a.zst", _skippable(0, b"x") + b"\x04\x22\x4d\x18", "compressed by lz4", "lz4 -d"),
        ("a.txt.Z", b"\x1f\x9dx", "compressed by compress", "gzip -dc"),
        ("a.txt", b"%PDF-1.7", "a PDF", "pdftotext"),
        ("a.jsonl.br", b"x", "compressed by brotli", "brotli -d"),
        ("a.tgz", gzip.compress(b"x", mtime=0), "a tar archive", "python3 -m tarfile -e"),
        ("a.tar.xz", lzma.compress(b"x"), "a tar archive", "python3 -m tarfile -e"),
    ],
)
def test_kind_that_is_not_read_is_named_with_a_way_out(tmp_path, name, content, kind, command):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        find_inputs([str(tmp_path / name)], ReadOptions())
    path = tmp_path / name
    assert str(caught.value).startswith(
        f"{path} is {kind}, which prepare does not read: unpack it by {command} {path}"
    )
    assert str(caught.value).endswith(", and name what comes out")


@pytest.mark.parametrize("name", ["my texts.zip", "my texts.tar"])
def test_way_out_of_an_archive_works(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    Path("a.jsonl").write_bytes(ROWS)
    if name.endswith(".zip"):
        with zipfile.ZipFile(name, "w") as archive:
            archive.write("a.jsonl")
    else:
        with tarfile.open(name, "w") as archive:
            archive.add("a.jsonl")
    with pytest.raises(ValueError, match="archive") as caught:
        find_inputs([name], ReadOptions())
    command = str(caught.value).partition("unpack it by ")[2].partition(", and name")[0]
    subprocess.run(command, shell=True, check=True)
    [found] = find_inputs(["FOLDER"], ReadOptions())
    assert list(found) == TEXTS


def test_archive_inside_compressed_data_is_no_text(tmp_path):
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        archive.addfile(tarfile.TarInfo("a.jsonl"))
    (note,) = _read(tmp_path, buffer.getvalue(), "a.jsonl.gz")
    assert isinstance(note, Note)
    assert note.fault == (
        f"{tmp_path / 'a.jsonl.gz'}, byte 0: a tar archive; unpack it, such as by tar -xf, and "
        "name what comes out, or leave the rest of the file out by --on_bad_row skip"
    )


@pytest.mark.parametrize(
    ("inner", "what"),
    [
        (gzip.compress(ROWS, mtime=0), "gzip data"),
        (bz2.compress(ROWS), "bzip2 data"),
        (b"PK\x03\x04" + bytes(60), "a zip archive"),
        (b"%PDF-1.7" + bytes(60), "a PDF"),
    ],
    ids=["gzip", "bzip2", "zip", "pdf"],
)
def test_what_is_compressed_twice_is_named(tmp_path, inner, what):
    (note,) = _read(tmp_path, gzip.compress(inner))
    assert isinstance(note, Note)
    assert note.fault == (
        f"{tmp_path}/a.jsonl, byte 0: {what} inside gzip data; unpack it until its text is plain, "
        "and name what comes out, or leave the rest of the file out by --on_bad_row skip"
    )


def test_text_that_begins_like_an_archive_is_read(tmp_path):
    assert _read(tmp_path, gzip.compress(b'BZh9{"text":"a"}\n'))[0] is not None
