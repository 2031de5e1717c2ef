"""Files named like token files that hold something else."""

import bz2
import gzip
import io
import json
import lzma
import pickle
import random
import re
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save

from data.tokens.foreign import find_files, open_files

TEXT = "The quick brown fox jumps over the lazy dog.\n" * 40


def tar() -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as archive:
        archive.addfile(tarfile.TarInfo("a.txt"))
    return file.getvalue()


def zipped() -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("a.txt", TEXT)
    return file.getvalue()


def saved(zipped: bool) -> bytes:
    file = io.BytesIO()
    torch.save(torch.arange(50), file, _use_new_zipfile_serialization=zipped)
    return file.getvalue()


KINDS: dict[str, tuple[Callable[[], bytes], str]] = {
    "text": (TEXT.encode, "text"),
    "latin-1": (lambda: ("déjà vu, " * 40).encode("latin-1"), "text"),
    "Chinese": (("漢字かな交じり文。" * 40).encode, "text"),
    "JSON lines": (lambda: (json.dumps({"text": TEXT}) + "\n").encode() * 9, "text"),
    "text with some controls": (lambda: (TEXT + "\0\x08").encode(), "text"),
    "UTF-16": (lambda: TEXT.encode("utf-16"), "text"),
    "gzip": (lambda: gzip.compress(TEXT.encode()), "a gzip archive"),
    "bzip2": (lambda: bz2.compress(TEXT.encode()), "a bzip2 archive"),
    "xz": (lambda: lzma.compress(TEXT.encode()), "an xz archive"),
    "tar": (tar, "a tar archive"),
    "zip": (zipped, "a zip archive, or what torch.save or np.savez wrote"),
    "torch": (lambda: saved(True), "a zip archive, or what torch.save or np.savez wrote"),
    "old torch": (lambda: saved(False), "what torch.save wrote"),
    "pickle": (lambda: pickle.dumps([1] * 50), "a pickle"),
    "pickle of numpy": (lambda: pickle.dumps(np.arange(80), protocol=2), "a pickle"),
    "safetensors": (lambda: save({"a": torch.ones(9)}), "a safetensors file"),
    "Arrow stream": (lambda: b"\xff" * 4 + bytes(range(200)), "an Arrow stream"),
    "SQLite": (lambda: b"SQLite format 3\0" + bytes(range(200)), "an SQLite database"),
    "Megatron index": (lambda: b"MMIDIDX\0\0" + bytes(200), "an index of Megatron"),
    "Git LFS": (
        lambda: b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n",
        "a pointer of Git LFS",
    ),
    "model of llm.c": (
        lambda: np.array([20240326, 5, *[0] * 254], "<i4").tobytes(),
        "a model of llm.c",
    ),
}


@pytest.mark.parametrize("dtype", [None, "uint16", "uint32"])
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_no_tokens_is_named_and_refused(tmp_path: Path, kind: str, dtype: str | None):
    make, what = KINDS[kind]
    path = tmp_path / "train.bin"
    path.write_bytes(make())
    with pytest.raises(ValueError, match=re.escape(f"{path} is {what} by its content, not token")):
        open_files(find_files(str(tmp_path)), dtype, 65536)


@pytest.mark.parametrize("vocab_size", [65, 2048, 32_000, 50_257, 65_536])
@pytest.mark.parametrize("seed", range(5))
def test_ids_are_not_taken_for_something_else(tmp_path: Path, vocab_size: int, seed: int):
    # As frequent as words are: half of the ids among the first hundred.
    draw = random.Random(seed)
    ids = [min(int(draw.paretovariate(0.3)), vocab_size) - 1 for _ in range(3000)]
    (tmp_path / "train.bin").write_bytes(np.array(ids, "<u2").tobytes())
    stream = open_files(find_files(str(tmp_path)), None, vocab_size)["train"]
    assert stream.n_tokens == len(ids)


@pytest.mark.parametrize("first", [0, 0xFEFF, 0xFFFE])
def test_uniform_ids_are_not_taken_for_something_else(tmp_path: Path, first: int):
    ids = np.random.default_rng(0).integers(0, 65536, 3000)
    ids[0] = first
    (tmp_path / "train.bin").write_bytes(ids.astype("<u2").tobytes())
    assert open_files(find_files(str(tmp_path)), None, 65536)["train"].n_tokens == len(ids)
