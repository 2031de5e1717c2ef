"""Number types of token files without a header, told by their content."""

from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

import numpy as np

OTHERS = ("<i8", ">i8", "<f8", "<f4", ">i4")
"""Types that are not read, the widest first: the content of one may also fit a narrower one."""

# Blocks spread over a file: a file may begin with zeros, or be joined from two others.
N_BLOCKS, LEAST_BYTES, MOST_BYTES = 8, 1 << 12, 1 << 18
# Fewer numbers may fit a type by chance.
MIN_PAIRS = 16
# Upper halves of 32-bit ids stay below it: no vocabulary has 4 million ids.
SMALL_HALF = 64
MOST_IDS = SMALL_HALF << 16
# An id of a large vocabulary, and so many numbers that its lower bytes take most values.
LARGE, LEAST_LARGE = 4096, 1024


def read_blocks(path: Path) -> list[bytes]:
    """Blocks spread evenly over a file, each at a multiple of 8 bytes; all of a small file."""
    size = path.stat().st_size
    length = min(MOST_BYTES, max(LEAST_BYTES, size // N_BLOCKS)) // 8 * 8
    last = max(0, size - length)
    starts = sorted({last * number // (N_BLOCKS - 1) // 8 * 8 for number in range(N_BLOCKS)})
    with path.open("rb") as file:
        return [_read(file, start, length + 8) for start in starts]


def looks_wide(block: bytes) -> bool:
    """Whether uint16 numbers are halves of 32-bit ids.

    Every second number is then the upper half of an id: 0, or small compared with the lower ones.
    In a file that lost some bytes the upper halves may be first.
    """
    pairs = np.frombuffer(block[: len(block) // 4 * 4], "<u2")
    if len(pairs) < 2 * MIN_PAIRS:
        return False
    upper, lower = sorted((int(pairs[::2].max()), int(pairs[1::2].max())))
    return upper == 0 < lower or upper < SMALL_HALF <= lower // 16


def refuse_other_types(path: Path, blocks: Sequence[bytes], vocab_size: int) -> None:
    """Refuse a file whose numbers are neither uint16 nor uint32.

    Raises:
        ValueError: says how to convert the file.
    """
    name = next(filter(None, (_other_type(block, vocab_size) for block in blocks)), None)
    if name is None and all(map(_are_single_bytes, blocks)):
        name = "u1"
    if name is None:
        if path.stat().st_size % 4 == 0 and any(map(_begins_inside, blocks)):
            raise ValueError(
                f"{path} looks like uint32 that begins inside an id: bytes are lost; copy it again"
            )
        return
    what = f"{'big-endian ' * (name[0] == '>')}{np.dtype(name).name}"
    seen = f"{path} looks like {what} by its content"
    if (n_bytes := path.stat().st_size) % (item_size := np.dtype(name).itemsize):
        raise ValueError(
            f"{seen} but has {n_bytes} bytes, no multiple of {item_size}: truncated; copy it again"
        )
    if any((_numbers(block, name) < 0).any() for block in blocks):
        raise ValueError(
            f"{seen} and holds negative numbers, such as labels that are not learned: ids must be "
            "0 or more; save the input ids instead"
        )
    raise ValueError(
        f"{seen}: token files without a header must be little-endian uint16 or uint32; save it "
        f"again by np.fromfile({path.name!r}, {name!r}).astype('<u4').tofile(...)"
    )


def prove_dtype(paths: Sequence[Path], vocab_size: int) -> str | None:
    """Return the one type that files without a header can have by their content.

    uint32 where every second uint16 is an upper half; uint16 where uint32 would give ids that the
    model does not have, or where the size is no multiple of 4. None where both types fit.

    Raises:
        ValueError: a file is empty or of a type that is not read, or there are two types.
    """
    proved: dict[str, Path] = {}
    for path in paths:
        if (n_bytes := path.stat().st_size) == 0:
            raise ValueError(f"{path} is empty (0 tokens): write it again or leave it out")
        blocks = read_blocks(path)
        refuse_other_types(path, blocks, vocab_size)
        narrow = [block for block in blocks if not looks_wide(block)]
        if len(narrow) < len(blocks):
            if _has_large(narrow, "<u4", MOST_IDS):
                raise ValueError(
                    f"{path} holds uint32 ids in one place and uint16 in another: damaged, or "
                    "joined from files of two types; convert them to one type before joining them"
                )
            proved.setdefault("uint32", path)
        elif n_bytes % 4 or _has_large(blocks, "<u4", vocab_size):
            proved.setdefault("uint16", path)
    if len(proved) < 2:
        return next(iter(proved), None)
    wide, narrow = proved["uint32"], proved["uint16"]
    raise ValueError(
        f"{wide} looks like uint32 and {narrow} like uint16: all files of a data.path must have "
        f"one type; convert one by np.fromfile({narrow.name!r}, '<u2').astype('<u4').tofile(...)"
    )


def looks_narrow(blocks: Sequence[bytes], vocab_size: int) -> bool:
    """Whether numbers are ids below `vocab_size` as uint16, and not all of them as uint32."""
    return _has_large(blocks, "<u4", vocab_size) and not _has_large(blocks, "<u2", vocab_size)


def _read(file: BinaryIO, start: int, length: int) -> bytes:
    file.seek(start)
    return file.read(length)


def _begins_inside(block: bytes) -> bool:
    """Whether numbers are little-endian 32-bit ids, two bytes further on."""
    halves = _numbers(block[: len(block) // 4 * 4], "<u2")
    if not looks_wide(block) or halves[::2].max() >= halves[1::2].max():
        return False
    # Big-endian ids have their upper halves first too; the right order gives smaller ids.
    return bool(_numbers(block[2:], "<u4").mean() <= _numbers(block, ">u4").mean())


def _other_type(block: bytes, vocab_size: int) -> str | None:
    """The type that a block's numbers have instead of uint16 and uint32."""
    for name in OTHERS:
        if _are_ids(_numbers(block, name)) and not (name == ">i4" and _begins_inside(block)):
            return name
    signed = _numbers(block, "<i4")
    if (signed < 0).any() and _are_ids(signed):
        return "<i4"
    if len(narrow := _numbers(block, "<u2")) < MIN_PAIRS or int(narrow.max()) < vocab_size:
        return None
    # Not uint16, for ids of the model.
    if int(_numbers(block, ">u2").max()) < vocab_size:
        return ">u2"
    return "u1" if max(block) < vocab_size <= 256 else None


def _are_single_bytes(block: bytes) -> bool:
    """Whether each byte is an id: 16-bit ids that large have lower bytes from 128 on too."""
    narrow = _numbers(block, "<u2")
    return len(narrow) >= LEAST_LARGE and int(narrow.max()) >= LARGE and max(block) < 128


def _numbers(block: bytes, name: str) -> np.ndarray:
    item_size = np.dtype(name).itemsize
    return np.frombuffer(block[: len(block) // item_size * item_size], name)


def _are_ids(numbers: np.ndarray) -> bool:
    """Whether numbers are whole and as small as ids, and some are not 0."""
    if len(numbers) < MIN_PAIRS:
        return False
    # The first few decide for nearly all files, without a pass over the whole block.
    for part in (numbers[:MIN_PAIRS], numbers):
        with np.errstate(invalid="ignore"):
            small = (part > -MOST_IDS) & (part < MOST_IDS)
        if not small.all() or (part != np.rint(part)).any():
            return False
    return bool(numbers.any())


def _has_large(blocks: Sequence[bytes], name: str, vocab_size: int) -> bool:
    return any((_numbers(block, name) >= vocab_size).any() for block in blocks)
