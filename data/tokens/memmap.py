"""Token files, read in place: flat arrays of ids, one file or several that are read as one."""

import contextlib
import functools
import hashlib
import json
from bisect import bisect_right
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int, Integer

from data.system.atomic import replace_text
from data.tokens.number_types import (
    MOST_IDS,
    looks_narrow,
    looks_wide,
    read_blocks,
    refuse_other_types,
)

DTYPES = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}
"""Types of a file without a header, by the name that configs and `meta.json` use."""

# llm.c writes 256 int32 before the tokens, this number first.
# Source: github.com/karpathy/llm.c, dev/data/data_common.py.
LLM_C_MAGICS = {20240520: "uint16", 20240801: "uint32"}

BLOCK_BYTES, N_BLOCKS = 4096, 64
# Ids that a scan takes at once.
CHUNK = 1 << 20
# Zeros in a row that are counted as a hole.
RUN = 1 << 12
# Fewer ids may all be 0 in a toy file.
LEAST_ZEROS = 1024
# Each mapped file holds a file descriptor, and 1024 is all that many systems give a process.
MOST_MAPPED = 256


class TokenFile:
    """A file of token ids, `offset` bytes after its start."""

    def __init__(self, path: Path, dtype: np.dtype, offset: int = 0) -> None:
        self.path, self.dtype, self.offset = path, dtype, offset
        self.n_tokens = (path.stat().st_size - offset) // dtype.itemsize

    def map(self) -> Integer[np.ndarray, " N"]:
        """All ids, read-only; pages that were read are the kernel's cache, not our memory."""
        # A plain array over the same pages: slicing a np.memmap costs twice as much.
        return np.memmap(self.path, self.dtype, mode="r", offset=self.offset).view(np.ndarray)

    @functools.cached_property
    def scan(self) -> dict[str, Any]:
        """The largest id, and how many ids are 0 in long runs; kept in a file beside this one.

        Once per process: a folder that cannot be written keeps nothing, and ids may be many.
        """
        stat = self.path.stat()
        state = {"dtype": self.dtype.str, "size": stat.st_size, "mtime_ns": stat.st_mtime_ns}
        state["fingerprint"] = content_fingerprint(self.path)
        cache = self.path.with_name(f"{self.path.name}.max_id.json")
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            known = json.loads(cache.read_text(encoding="utf-8"))
            if known | state == known and type(known["max_id"]) is int and known["max_id"] >= 0:
                return known
        tokens, max_id, zeros = _unsigned(self.map()), 0, 0
        for begin in range(0, self.n_tokens, CHUNK):
            chunk = tokens[begin : begin + CHUNK]
            whole = len(chunk) // RUN * RUN
            runs = chunk[:whole].reshape(-1, RUN).max(axis=1)
            zeros += RUN * int((runs == 0).sum())
            max_id = max(max_id, int(runs.max(initial=0)), int(chunk[whole:].max(initial=0)))
        # Ranks may scan at the same time, and a folder of shared data may be read-only.
        with contextlib.suppress(OSError):
            replace_text(cache, json.dumps(state | {"max_id": max_id, "zeros": zeros}))
        return {"max_id": max_id, "zeros": zeros}

    @property
    def zero_ids(self) -> int:
        """Ids that are 0 in long runs, as in a hole of a sparse file."""
        return self.scan.get("zeros", 0)  # older caches lack it


class TokenStream:
    """Token files read as one, in the order given. Pickles as their names and is mapped anew."""

    def __init__(self, files: Sequence[TokenFile]) -> None:
        self.files = tuple(files)
        self._ends = np.cumsum([file.n_tokens for file in files]).tolist()
        self._mapped: dict[int, Integer[np.ndarray, " N"]] = {}
        self.n_tokens: int = self._ends[-1]

    @property
    def name(self) -> str:
        """The file, or the first of several and how many there are."""
        more = len(self.files) - 1
        return f"{self.files[0].path}" + (f" and {more} more" if more else "")

    @property
    def label(self) -> str:
        """Its name and the type of its ids."""
        return f"{self.name} ({self.files[0].dtype.name})"

    def locate(self, offset: int) -> tuple[Path, int]:
        """The file that holds an offset of the stream, and the offset in that file."""
        place, start = self._place(offset)
        return self.files[place].path, start

    def copy(self, offset: int, out: Int[np.ndarray, " T"]) -> None:
        """Fill `out` with the ids from an offset on."""
        (place, start), done = self._place(offset), 0
        while done < len(out):
            part = self._tokens(place)[start : start + len(out) - done]
            out[done : done + len(part)] = part
            place, start, done = place + 1, 0, done + len(part)

    def _place(self, offset: int) -> tuple[int, int]:
        place = bisect_right(self._ends, offset)
        return place, offset - (self._ends[place] - self.files[place].n_tokens)

    def _tokens(self, place: int) -> Integer[np.ndarray, " N"]:
        if place not in self._mapped:
            if len(self._mapped) >= MOST_MAPPED:
                del self._mapped[next(iter(self._mapped))]
            self._mapped[place] = self.files[place].map()
        return self._mapped[place]

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_mapped": {}}


def open_token_file(path: Path, dtype: str = "uint16", vocab_size: int = MOST_IDS) -> TokenFile:
    """Open a file of little-endian ids without a header after a look at what would read as junk.

    Args:
        dtype: name in `DTYPES`.
        vocab_size: ids of the model.

    Raises:
        ValueError: for an unknown dtype, or a file that is missing, empty, cut short, written by
            llm.c with its header, or of another type than named.
    """
    if dtype not in DTYPES:
        raise ValueError(f"{path}: dtype is {dtype!r}: must be one of {', '.join(DTYPES)}")
    if not path.is_file():
        raise ValueError(f"{path} does not exist: prepare the data or name another file")
    n_bytes, item_size = path.stat().st_size, DTYPES[dtype].itemsize
    if n_bytes == 0:
        raise ValueError(f"{path} is empty (0 tokens): prepare the data again")
    blocks = read_blocks(path)
    refuse_other_types(path, blocks, vocab_size)
    if any(map(looks_wide, blocks)):
        seen = f"{path} looks like uint32 (every second uint16 is 0 or small) but"
        if n_bytes % 4:
            raise ValueError(
                f"{seen} has {n_bytes} bytes, no multiple of 4: truncated; copy it again"
            )
        if dtype == "uint16":
            raise ValueError(
                f"{seen} is read as uint16: name dtype uint32 or prepare the data again"
            )
    if n_bytes % item_size:
        raise ValueError(
            f"{path} has {n_bytes} bytes, no multiple of item size {item_size} ({dtype}): "
            "truncated or other dtype; copy it again or name its dtype"
        )
    magic = int.from_bytes(blocks[0][:4], "little")
    if magic in LLM_C_MAGICS:
        raise ValueError(
            f"{path} starts with an llm.c header (magic {magic}), which is not tokens: convert it "
            f"by np.fromfile({path.name!r}, {DTYPES[LLM_C_MAGICS[magic]].str!r}, "
            "offset=1024).tofile(...)"
        )
    if dtype == "uint32" and looks_narrow(blocks, vocab_size):
        raise ValueError(
            f"{path} looks like uint16 (all ids are below vocab_size {vocab_size}) but is read as "
            "uint32, which has larger ones: set data.dtype uint16"
        )
    return TokenFile(path, DTYPES[dtype])


def content_fingerprint(path: Path) -> str:
    """SHA-256 of a file's size and of blocks spread evenly over it: all of a small file."""
    size = path.stat().st_size
    digest = hashlib.sha256(str(size).encode("ascii"))
    with path.open("rb") as file:
        for block in range(N_BLOCKS):
            file.seek(max(0, size - BLOCK_BYTES) * block // (N_BLOCKS - 1))
            digest.update(file.read(BLOCK_BYTES))
    return digest.hexdigest()


def check_token_range(file: TokenFile, vocab_size: int) -> int:
    """The largest id of the file, which is known to be below `vocab_size`, and none negative.

    Reads the whole file once and keeps the maximum beside it, in `<name>.max_id.json`.

    Raises:
        ValueError: for an id that the model has no embedding for.
    """
    max_id = file.scan["max_id"]
    if max_id == 0 and file.n_tokens >= LEAST_ZEROS:
        raise ValueError(
            f"{file.path} holds nothing but zeros ({file.n_tokens} ids): damaged or never filled; "
            "copy it again"
        )
    if max_id < vocab_size:
        return max_id
    tokens = file.map()
    chunks = (_unsigned(tokens[at : at + CHUNK]) for at in range(0, file.n_tokens, CHUNK))
    bad = ((i, chunk >= vocab_size) for i, chunk in enumerate(chunks))
    offset = next(i * CHUNK + int(found.argmax()) for i, found in bad if found.any())
    if tokens[offset] < 0:
        raise ValueError(
            f"{file.path} holds id {tokens[offset]} at offset {offset}: ids must be 0 or more; "
            "prepare the data again"
        )
    if max_id >= MOST_IDS:
        raise ValueError(
            f"{file.path} holds id {tokens[offset]} at offset {offset}, the largest is {max_id}: "
            f"ids must be below vocab_size {vocab_size}, and no vocabulary is that large; copy "
            "the file again, or name its type by data.dtype"
        )
    raise ValueError(
        f"{file.path} holds id {tokens[offset]} at offset {offset}, the largest is {max_id}: "
        f"ids must be below vocab_size {vocab_size} and are never clamped; "
        f"set model.config.vocab_size to at least {max_id + 1} or prepare the data again"
    )


def _unsigned(ids: Integer[np.ndarray, " N"]) -> Integer[np.ndarray, " N"]:
    # A negative id becomes a huge one, so that one bound finds both.
    return ids.view(np.dtype(f"u{ids.itemsize}").newbyteorder(ids.dtype.byteorder))
