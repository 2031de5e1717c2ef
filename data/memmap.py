"""Token files, read in place: flat arrays of ids without a header, and windows over them."""

import contextlib
import hashlib
import json
import os
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from jaxtyping import Int, UInt
from torch import Tensor
from torch.utils.data import Dataset

from data.order import mix, permute, random_starts, sample_places

DTYPES = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}
"""Types of a token file by the name that configs and `meta.json` use."""

# llm.c writes 256 int32 before the tokens, this number first.
# Source: github.com/karpathy/llm.c, dev/data/data_common.py.
LLM_C_MAGICS = {20240520: "<u2", 20240801: "<u4"}

IGNORE_INDEX = -100
"""Label of a position that nothing is learned from."""

Order = Literal["shuffled", "random", "fixed"]
FIXED_KEY = mix(0x76616C)
BLOCK_BYTES, N_BLOCKS = 4096, 64
# Ids that a scan takes at once, and enough of them to tell a file's type.
CHUNK = 1 << 20


class TokenFile:
    """A file of token ids, mapped on first use. Pickles as its name and is mapped anew."""

    def __init__(self, path: Path, dtype: str) -> None:
        self.path = path
        self.dtype = DTYPES[dtype]
        self.n_tokens = path.stat().st_size // self.dtype.itemsize

    @cached_property
    def tokens(self) -> UInt[np.ndarray, " N"]:
        """All ids, read-only; pages that were read are the kernel's cache, not our memory."""
        # A plain array over the same pages: slicing a np.memmap costs twice as much.
        return np.memmap(self.path, self.dtype, mode="r").view(np.ndarray)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "tokens"}


def open_token_file(path: Path, dtype: str = "uint16") -> TokenFile:
    """Open a file of little-endian ids after a look at what would read as junk.

    Args:
        dtype: name in `DTYPES`.

    Raises:
        ValueError: for an unknown dtype, or a file that is missing, empty, cut short, written by
            llm.c with its header, or of wider ids than named.
    """
    if dtype not in DTYPES:
        raise ValueError(f"{path}: dtype is {dtype!r}: must be one of {', '.join(DTYPES)}")
    if not path.is_file():
        raise ValueError(f"{path} does not exist: prepare the data or name another file")
    n_bytes, item_size = path.stat().st_size, DTYPES[dtype].itemsize
    if n_bytes == 0:
        raise ValueError(f"{path} is empty (0 tokens): prepare the data again")
    if n_bytes % item_size:
        raise ValueError(
            f"{path} has {n_bytes} bytes, no multiple of item size {item_size} ({dtype}): "
            "truncated or other dtype; copy it again or name its dtype"
        )
    with path.open("rb") as file:
        head = file.read(2 * CHUNK)
    magic = int.from_bytes(head[:4], "little")
    if magic in LLM_C_MAGICS:
        raise ValueError(
            f"{path} starts with an llm.c header (magic {magic}), which is not tokens: convert it "
            f"by np.fromfile({path.name!r}, {LLM_C_MAGICS[magic]!r}, offset=1024).tofile(...)"
        )
    if dtype == "uint16" and n_bytes % 4 == 0:
        pairs = np.frombuffer(head, "<u2").reshape(-1, 2)
        if pairs[:, 0].any() and not pairs[:, 1].any():
            raise ValueError(
                f"{path} looks like uint32 (every second uint16 is 0) but is read as uint16: "
                "name dtype uint32 or prepare the data again"
            )
    return TokenFile(path, dtype)


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
    """The largest id of the file, which is known to be below `vocab_size`.

    Reads the whole file once and keeps the maximum beside it, in `<name>.max_id.json`.

    Raises:
        ValueError: for an id that the model has no embedding for.
    """
    max_id = _cached_max_id(file)
    if max_id < vocab_size:
        return max_id
    chunks = (file.tokens[at : at + CHUNK] >= vocab_size for at in range(0, file.n_tokens, CHUNK))
    offset = next(i * CHUNK + int(bad.argmax()) for i, bad in enumerate(chunks) if bad.any())
    raise ValueError(
        f"{file.path} holds id {file.tokens[offset]} at offset {offset}, the largest is {max_id}: "
        f"ids must be below vocab_size {vocab_size} and are never clamped; "
        f"set model.config.vocab_size to at least {max_id + 1} or prepare the data again"
    )


class Windows(Dataset[dict[str, Tensor]]):
    """Windows of `seq_len` positions and the target after the last, by sample of a run.

    A batch is asked for whole, with `__getitems__`: a loader needs a batch sampler and
    `collate_fn=torch.utils.data.default_convert`.

    Args:
        order: `shuffled` visits non-overlapping windows, each once an epoch; `random` starts
            anywhere; `fixed` is the same shuffle for every seed, so that its first samples are
            an even and constant choice to validate on.

    Raises:
        ValueError: where the file is shorter than one window.
    """

    def __init__(
        self, file: TokenFile, seq_len: int, seed: int = 0, order: Order = "shuffled"
    ) -> None:
        self.file, self.seq_len, self.seed, self.order = file, seq_len, seed, order
        self.n_windows = (file.n_tokens - 1) // seq_len
        self.end: int | None = self.n_windows if order == "fixed" else None
        """First sample that is a row without targets: what a bound leaves over in a batch."""
        self.n_starts = file.n_tokens - seq_len
        if self.n_windows < 1:
            what = "validation batches" if order == "fixed" else "windows"
            raise ValueError(
                f"{file.path} holds {file.n_tokens} tokens, which is 0 {what} at data.seq_len "
                f"{seq_len}: it needs at least {seq_len + 1}; give more data or a smaller seq_len"
            )

    def __len__(self) -> int:
        return self.n_starts if self.order == "random" else self.n_windows

    def starts(self, samples: Sequence[int]) -> Int[np.ndarray, " B"]:
        """Offset of each sample's first token; -1 from `end` on."""
        numbers = np.asarray(samples, dtype=np.int64)
        inside = numbers < (np.iinfo(np.int64).max if self.end is None else self.end)
        return np.where(inside, self._offsets(np.where(inside, numbers, 0)), -1)

    def _offsets(self, samples: Int[np.ndarray, " B"]) -> Int[np.ndarray, " B"]:
        if self.order == "random":
            return random_starts(samples, self.n_starts, self.seed)
        if self.order == "shuffled":
            return sample_places(samples, self.n_windows, self.seed) * self.seq_len
        return permute(samples, self.n_windows, FIXED_KEY) * self.seq_len

    def __getitems__(self, samples: Sequence[int]) -> dict[str, Int[Tensor, "B L"]]:
        """One batch; past the end of `fixed`, rows without targets even out the ranks."""
        starts = self.starts(samples)
        rows = np.lib.stride_tricks.sliding_window_view(self.file.tokens, self.seq_len + 1)
        ids = rows[np.maximum(starts, 0)].astype(np.int64)  # (B, T+1)
        past_end = starts[:, None] < 0
        return {
            "input_ids": torch.from_numpy(np.where(past_end, 0, ids)),
            "labels": torch.from_numpy(np.where(past_end, IGNORE_INDEX, ids)),
        }


def _cached_max_id(file: TokenFile) -> int:
    stat = file.path.stat()
    state = {"dtype": file.dtype.str, "size": stat.st_size, "mtime_ns": stat.st_mtime_ns}
    state["fingerprint"] = content_fingerprint(file.path)
    cache = file.path.with_name(f"{file.path.name}.max_id.json")
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        known = json.loads(cache.read_text(encoding="utf-8"))
        if known | state == known:
            return int(known["max_id"])
    max_id = max(int(file.tokens[i : i + CHUNK].max()) for i in range(0, file.n_tokens, CHUNK))
    # Ranks may scan at the same time, and a folder of shared data may be read-only.
    temporary = cache.with_name(f"{cache.name}.{os.getpid()}.tmp")
    with contextlib.suppress(OSError):
        temporary.write_text(json.dumps(state | {"max_id": max_id}), encoding="utf-8")
        os.replace(temporary, cache)
    with contextlib.suppress(OSError):
        temporary.unlink(missing_ok=True)
    return max_id
