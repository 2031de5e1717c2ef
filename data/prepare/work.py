"""Where a corpus is prepared: token streams that grow part by part and outlive a kill."""

import contextlib
import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np
from jaxtyping import Int, Integer, UInt

from data.system.atomic import naming, replace_text, sync
from data.tokens.memmap import DTYPES

SPLITS = ("train", "val")
STATE = {"job", "next", "left_out", "lowest_share", *SPLITS}
LISTS = ("inputs", "real_inputs")
"""Keys of a job that list its inputs: by the paths as given, and by real paths."""
# Of an .npy of offsets; written when their number is known, for which numpy leaves room.
HEADER_BYTES = 128
# Ids that are narrowed and written at once.
AT_ONCE = 1 << 20


class SplitWriter:
    """The token files and document offsets of a split, as far as they are known to be whole.

    What was written behind the given counts, by a run that was killed, is cut off.

    Args:
        shard_tokens: of each file; None for one file.
        tokens: of the whole part.
        documents: of the whole part.

    Raises:
        FileNotFoundError: for a file that is shorter than it was.
    """

    def __init__(
        self,
        folder: Path,
        split: str,
        dtype: str,
        shard_tokens: int | None,
        tokens: int = 0,
        documents: int = 0,
    ) -> None:
        self.folder, self.split, self.dtype = folder, split, DTYPES[dtype]
        self.shard_tokens, self.tokens, self.documents = shard_tokens, tokens, documents
        docs = folder / f"{split}.docs.npy"
        if documents == 0:
            docs.write_bytes(bytes(HEADER_BYTES))
        self._docs = _open_at(docs, HEADER_BYTES + 8 * documents)
        try:
            self._file = self._open_file()
        except FileNotFoundError:
            self._docs.close()
            raise
        self._docs.write(np.int64(tokens).astype("<i8").tobytes())

    @property
    def files(self) -> list[str]:
        """Names of the token files so far, in order."""
        if self.shard_tokens is None:
            return [f"{self.split}.bin"]
        shards = max(1, -(-self.tokens // self.shard_tokens))
        return [f"{self.split}-{shard:05d}.bin" for shard in range(shards)]

    def append(self, ids: Integer[np.ndarray, " N"], ends: Int[np.ndarray, " D"]) -> None:
        """Add tokens, with the offsets among them at which documents end.

        Raises:
            ValueError: for an id too large for the type.
        """
        _write(self._docs, (self.tokens + ends).astype("<i8").tobytes())
        self.documents += ends.size
        while ids.size:
            room = min(ids.size, AT_ONCE)
            if self.shard_tokens is not None:
                room = min(room, self.shard_tokens - self.tokens % self.shard_tokens)
            part = narrow(ids[:room], self.dtype, self.folder / self.files[-1])
            _write(self._file, part.tobytes())
            self.tokens += room
            ids = ids[room:]
            if self.shard_tokens is not None and self.tokens % self.shard_tokens == 0:
                self.sync()
                self._file.close()
                self._file = self._open_file()

    def sync(self) -> None:
        """Return when all is on disk."""
        for file in (self._file, self._docs):
            with naming(Path(file.name)):
                file.flush()
                os.fsync(file.fileno())

    def finish(self) -> None:
        """Give the document offsets their header and close the files."""
        shape = {"descr": "<i8", "fortran_order": False, "shape": (self.documents + 1,)}
        with naming(Path(self._docs.name)):
            self._docs.seek(0)
            np.lib.format.write_array_header_1_0(self._docs, shape)
        assert self._docs.tell() == HEADER_BYTES
        self.sync()
        self.close()

    def close(self) -> None:
        """Close the files as they are; what was not synced may be lost."""
        for file in (self._docs, self._file):
            # After a write that found no room, closing tries it again.
            with contextlib.suppress(OSError):
                file.close()

    def _open_file(self) -> IO[bytes]:
        if self.shard_tokens is None:
            return _open_at(self.folder / f"{self.split}.bin", self.tokens * self.dtype.itemsize)
        shard, inside = divmod(self.tokens, self.shard_tokens)
        path = self.folder / f"{self.split}-{shard:05d}.bin"
        return _open_at(path, inside * self.dtype.itemsize)


class Work:
    """The folder of a job that is not done: `state` is what of it is whole, None at its start.

    Work of another job is thrown away.

    Args:
        job: what the result depends on.
        softer: the same job as it may have been begun: under settings that left nothing out.
    """

    def __init__(self, folder: Path, job: dict[str, Any], softer: dict[str, Any]) -> None:
        self.folder, self.job = folder, job
        self.state: dict[str, Any] | None = None
        self.writers: dict[str, SplitWriter] = {}
        known = _load(folder / "state.json") or {}
        # The tokenizer was there before the state, and leaves only when all is written.
        if known.keys() >= STATE and any(same_job(known["job"], each) for each in (job, softer)):
            self.state = known | {"job": job}
        elif folder.exists():
            shutil.rmtree(folder)
        folder.mkdir(exist_ok=True)

    @property
    def meta(self) -> dict[str, Any] | None:
        """What `meta.json` will hold, of a job that only has to be published."""
        return None if self.state is None else _load(self.folder / "meta.json")

    @property
    def kept(self) -> int:
        """Documents behind which another call goes on."""
        known = _load(self.folder / "state.json") or {}
        return sum(known[split]["documents"] for split in SPLITS) if known.keys() >= STATE else 0

    def open(self, dtype: str, shard_tokens: int | None, n_inputs: int) -> dict[str, Any]:
        """The state to go on from, with `writers` that stand there."""
        try:
            self._open_writers(dtype, shard_tokens)
        except FileNotFoundError:
            self.close()
            self.state = None
            self._open_writers(dtype, shard_tokens)
        if self.state is None:
            counts = {"documents": 0, "tokens": 0, "eos": 0, "bytes": 0}
            self.state = {"job": self.job, "next": [0, 0], "left_out": {}, "lowest_share": 1.0}
            # Of the texts of each input, in order.
            self.state["digests"] = [0] * n_inputs
            self.state |= {split: {**counts, "sources": [0] * n_inputs} for split in SPLITS}
            self.commit()
        return self.state

    def _open_writers(self, dtype: str, shard_tokens: int | None) -> None:
        for split in SPLITS:
            counts = (self.state or {}).get(split, {})
            whole = (counts.get("tokens", 0), counts.get("documents", 0))
            self.writers[split] = SplitWriter(self.folder, split, dtype, shard_tokens, *whole)

    def commit(self) -> None:
        """Make what was written so far outlive a kill."""
        for writer in self.writers.values():
            writer.sync()
        replace_text(self.folder / "state.json", json.dumps(self.state))

    def publish(self, output: Path, names: Sequence[str]) -> None:
        """Move files to where they belong, the last one when all others are durable there.

        A kill in between can be made good.
        """
        for name in names:
            if name == names[-1]:
                sync(output)
            if (self.folder / name).exists():
                os.replace(self.folder / name, output / name)
        sync(output)
        self.remove()

    def remove(self) -> None:
        """Leave nothing behind."""
        shutil.rmtree(self.folder)

    def close(self) -> None:
        """Close the files; what is not whole is cut off when the work goes on."""
        for writer in self.writers.values():
            writer.close()


def same_job(known: dict[str, Any], job: dict[str, Any]) -> bool:
    """Whether two jobs give the same result: however the paths are spelled in them."""
    # An older version kept no real paths. Those of a project change when it is moved as a whole.
    same_inputs = any(known.get(key) == job[key] for key in LISTS)
    return same_inputs and _without_paths(known) == _without_paths(job)


def _without_paths(job: dict[str, Any]) -> dict[str, Any]:
    """A job without paths: inputs are compared apart, a tokenizer by its fingerprint."""
    settings = job["settings"] | {"tokenizer": None, "val_input": None}
    return {key: value for key, value in job.items() if key not in LISTS} | {"settings": settings}


def narrow(ids: Integer[np.ndarray, " N"], dtype: np.dtype, path: Path) -> UInt[np.ndarray, " N"]:
    """The ids in the type of a token file.

    Raises:
        ValueError: for an id that the type would wrap into another one.
    """
    limit = np.iinfo(dtype).max
    if ids.size and ids.max() > limit:
        raise ValueError(
            f"{path}: id {ids.max()} does not fit {dtype.name}, whose ids are below {limit + 1}: "
            "write uint32"
        )
    return ids.astype(dtype)


def _write(file: IO[bytes], content: bytes) -> None:
    with naming(Path(file.name)):
        file.write(content)


def _open_at(path: Path, n_bytes: int) -> IO[bytes]:
    """The file, new where it is to hold nothing yet, else cut there."""
    if n_bytes == 0:
        path.touch()
    if path.stat().st_size < n_bytes:
        raise FileNotFoundError(path)
    file = path.open("r+b")
    file.truncate(n_bytes)
    file.seek(n_bytes)
    return file


def _load(path: Path) -> dict[str, Any] | None:
    try:
        known = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):  # other errors are no reason to throw work away
        return None
    return known if isinstance(known, dict) else None
