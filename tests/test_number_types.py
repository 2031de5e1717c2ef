"""Token files whose numbers are of other types than uint16 and uint32, or of two types."""

import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from data.tokens.foreign import find_files, open_files
from data.tokens.memmap import check_token_range

Read = Callable[..., list[int]]
OTHERS = {
    "<i8": "int64",
    ">i8": "big-endian int64",
    "<f8": "float64",
    "<f4": "float32",
    ">i4": "big-endian int32",
    ">u2": "big-endian uint16",
    "u1": "uint8",
}


def ids_below(vocab_size: int, n: int = 3000) -> np.ndarray:
    """Ids as frequent as words are."""
    draw = np.random.default_rng(0)
    return np.minimum(draw.pareto(0.3, n).astype(np.int64), vocab_size - 1)


def write(path: Path, ids: np.ndarray, dtype: str) -> Path:
    path.write_bytes(ids.astype(dtype).tobytes())
    return path


@pytest.fixture
def read(tmp_path: Path) -> Read:
    """Return all training ids of the folder."""

    def run(vocab_size: int, dtype: str | None = None) -> list[int]:
        stream = open_files(find_files(str(tmp_path)), dtype, vocab_size)["train"]
        out = np.empty(stream.n_tokens, dtype=np.int64)
        stream.copy(0, out)
        return out.tolist()

    return run


@pytest.mark.parametrize("given", [None, "uint16", "uint32"])
@pytest.mark.parametrize(
    ("dtype", "vocab_size"),
    [
        *((dtype, size) for dtype in ("<i8", ">i8", "<f8", "<f4", ">i4") for size in (90, 200_000)),
        (">u2", 50_257),
        ("u1", 65),
        ("u1", 200),
    ],
)
def test_another_type_is_named_and_converted_by_the_command_given(
    tmp_path: Path, read: Read, dtype: str, vocab_size: int, given: str | None
):
    ids = ids_below(vocab_size)
    path = write(tmp_path / "train.bin", ids, dtype)
    message = (
        f"{path} looks like {OTHERS[dtype]} by its content: token files without a header must be "
        "little-endian uint16 or uint32; save it again by "
        f"np.fromfile('train.bin', '{dtype}').astype('<u4').tofile(...)"
    )
    with pytest.raises(ValueError, match=re.escape(message)):
        read(vocab_size, given)
    np.fromfile(path, dtype).astype("<u4").tofile(path)
    assert read(vocab_size) == ids.tolist()


@pytest.mark.parametrize("vocab_size", [65, 256, 300, 2048, 50_257, 65_536, 200_000])
@pytest.mark.parametrize("dtype", ["<u2", "<u4", "<i4"])
def test_ids_of_the_right_type_are_read(tmp_path: Path, read: Read, dtype: str, vocab_size: int):
    ids = ids_below(min(vocab_size, 65_536) if dtype == "<u2" else vocab_size)
    write(tmp_path / "train.bin", ids, dtype)
    assert read(vocab_size) == ids.tolist()


@pytest.mark.parametrize("dtype", ["<i4", "<i8"])
@pytest.mark.parametrize("vocab_size", [2048, 200_000])
def test_negative_numbers_are_no_ids(tmp_path: Path, read: Read, dtype: str, vocab_size: int):
    ids = ids_below(vocab_size)
    ids[::7] = -100
    path = write(tmp_path / "train.bin", ids, dtype)
    message = f"{path} looks like {np.dtype(dtype)} by its content and holds negative numbers"
    with pytest.raises(ValueError, match=re.escape(message)):
        read(vocab_size)


@pytest.mark.parametrize("given", [None, "uint16", "uint32"])
@pytest.mark.parametrize("wide", ["train", "val"])
def test_files_of_two_types_are_refused(tmp_path: Path, read: Read, wide: str, given: str | None):
    for split in ("train", "val"):
        write(tmp_path / f"{split}.bin", ids_below(2048), "<u4" if split == wide else "<u2")
    narrow = "train.bin" if wide == "val" else "val.bin"
    message = (
        f"{tmp_path / wide}.bin looks like uint32 and {tmp_path / narrow} like uint16: all files "
        "of a data.path must have one type; convert one by "
        f"np.fromfile('{narrow}', '<u2').astype('<u4').tofile(...)"
    )
    with pytest.raises(ValueError, match=re.escape(message)):
        read(2048, given)
    np.fromfile(tmp_path / narrow, "<u2").astype("<u4").tofile(tmp_path / narrow)
    assert read(2048) == ids_below(2048).tolist()


@pytest.mark.parametrize("given", [None, "uint16", "uint32"])
def test_a_file_joined_from_two_types_is_refused(tmp_path: Path, read: Read, given: str | None):
    ids = ids_below(2048, 20_000)
    path = tmp_path / "train.bin"
    path.write_bytes(ids.astype("<u2").tobytes() + ids.astype("<u4").tobytes())
    message = f"{path} holds uint32 ids in one place and uint16 in another: damaged, or joined"
    with pytest.raises(ValueError, match=re.escape(message)):
        read(2048, given)


@pytest.mark.parametrize("given", [None, "uint16", "uint32"])
def test_ids_without_their_first_half_are_refused(tmp_path: Path, read: Read, given: str | None):
    path = tmp_path / "train.bin"
    path.write_bytes(ids_below(2048).astype("<u4").tobytes()[2:-2])
    message = f"{path} looks like uint32 that begins inside an id: bytes are lost; copy it again"
    with pytest.raises(ValueError, match=re.escape(message)):
        read(2048, given)


def test_a_file_of_zeros_is_refused(tmp_path: Path):
    (tmp_path / "train.bin").write_bytes(bytes(4000))
    stream = open_files(find_files(str(tmp_path)), "uint16", 64)["train"]
    message = "train.bin holds nothing but zeros (2000 ids): damaged or never filled; copy it again"
    with pytest.raises(ValueError, match=re.escape(message)):
        check_token_range(stream.files[0], 64)


def test_no_vocabulary_is_advised_for_numbers_that_are_no_ids(tmp_path: Path):
    draw = np.random.default_rng(0).integers(0, 1 << 32, 3000)
    write(tmp_path / "train.bin", draw, "<u4")
    stream = open_files(find_files(str(tmp_path)), "uint32", 64)["train"]
    message = "ids must be below vocab_size 64, and no vocabulary is that large; copy the file"
    with pytest.raises(ValueError, match=re.escape(message)):
        check_token_range(stream.files[0], 64)
