"""Raw text in, a folder of token files out: train.bin, val.bin, tokenizer.json, meta.json."""

import fcntl
import hashlib
import json
import os
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int, UInt
from tqdm import tqdm

from data.corpus import describe, python_files, read_source
from data.memmap import DTYPES, content_fingerprint, open_token_file
from data.tokenizer import TextTokenizer, train_bpe

FORMAT = 1
FILES = ("train.bin", "val.bin", "tokenizer.json", "meta.json")
"""What a prepared folder holds; meta.json is written last and marks the set as whole."""

VAL_SHARE = 0.02
"""Share of the documents, chosen by name, that is kept for validation."""

META_KEYS = {"format", "dtype", "byte_order", "vocab_size", "special_ids", "token_bytes"}
META_KEYS |= {"tokenizer_fingerprint", "corpus", "train", "val"}
SPLIT_KEYS = {"tokens", "documents", "bytes", "fingerprint"}
AGAIN = "prepare the data again by lightning prepare --config FILE"
# Characters encoded at once: enough for every core, little enough for a laptop's memory.
BATCH_CHARACTERS = 1 << 21


def prepare_corpus(
    corpus: str, output: Path, vocab_size: int, *, again: bool = True, progress: bool = True
) -> dict[str, Any]:
    """Train a tokenizer on a corpus and write the corpus as token files.

    A document is one file of the corpus; it ends with exactly one end-of-document id. A kill at
    any time leaves a whole set or a folder without `meta.json`.

    Args:
        vocab_size: ids at most; a small corpus gives fewer.
        again: prepare although the set is whole; False takes the one that another process made
            in the meantime.
        progress: a bar for each stage on a terminal, one line for each elsewhere, on stderr.

    Returns:
        What `meta.json` holds. `bytes` are UTF-8 bytes of text, separators not counted.

    Raises:
        ValueError: for an unknown corpus, a vocabulary below the 256 bytes and the separator,
            or a split without text.
    """
    splits: dict[str, list[Path]] = {"train": [], "val": []}
    for name, path in python_files(corpus):
        splits["val" if is_validation(name) else "train"].append(path)
    for split, paths in splits.items():
        _refuse_empty(corpus, split, len(paths))
    output.mkdir(parents=True, exist_ok=True)
    folder = os.open(output, os.O_RDONLY)
    try:
        # Runs that start together on a missing corpus prepare it once.
        fcntl.flock(folder, fcntl.LOCK_EX)
        if not again and not missing_files(output):
            return load_meta(output)
        return _prepare(corpus, splits, output, vocab_size, progress)
    finally:
        os.close(folder)


def _prepare(
    corpus: str, splits: dict[str, list[Path]], output: Path, vocab_size: int, progress: bool
) -> dict[str, Any]:
    parts = {name: output / f"{name}.tmp" for name in FILES}
    try:
        _remove(parts.values())  # of a run that was killed
        tokenizer = train_bpe(
            _texts(splits["train"], Counter(), "train tokenizer", progress), vocab_size
        )
        tokenizer.save(parts["tokenizer.json"])
        meta: dict[str, Any] = {
            "format": FORMAT,
            "dtype": token_dtype(tokenizer.size),
            "byte_order": "little",
            "vocab_size": tokenizer.size,
            "special_ids": {"eos": tokenizer.eos_id},
            "tokenizer_fingerprint": tokenizer.fingerprint,
            "corpus": describe(corpus),
        }
        for split, paths in splits.items():
            skipped = Counter(empty=0, undecodable=0)
            part = parts[f"{split}.bin"]
            texts = _texts(paths, skipped, f"encode {split}", progress)
            written = write_tokens(texts, tokenizer, part, meta["dtype"])
            _refuse_empty(corpus, split, written["documents"])
            meta[split] = {**written, **skipped, "fingerprint": content_fingerprint(part)}
        meta["token_bytes"] = tokenizer.token_bytes().tolist()
        parts["meta.json"].write_text(json.dumps(meta), encoding="utf-8", newline="\n")
        _publish(parts, output)
    finally:
        _remove(parts.values())
    return meta


def is_validation(name: str) -> bool:
    """Whether the document of that name is kept for validation, on every machine alike."""
    digest = hashlib.sha256(name.encode("utf-8")).digest()
    return int.from_bytes(digest[:8], "big") < VAL_SHARE * 2**64


def token_dtype(n_ids: int) -> str:
    """The narrowest type that holds the ids 0 … n_ids - 1."""
    return "uint16" if n_ids <= 1 << 16 else "uint32"


def write_tokens(
    texts: Iterable[str], tokenizer: TextTokenizer, path: Path, dtype: str
) -> dict[str, int]:
    """Write documents as one run of ids, each ended by the tokenizer's eos.

    Memory does not grow with the number of documents.

    Returns:
        `tokens` written, `documents`, `eos` among the tokens, and UTF-8 `bytes` of the texts.

    Raises:
        ValueError: for a tokenizer without eos, or an id too large for the type.
    """
    eos = tokenizer.eos_id
    counts = {"tokens": 0, "documents": 0, "eos": 0, "bytes": 0}
    with path.open("wb") as file:
        for batch in _batches(texts):
            encoded = [[*ids, eos] for ids in tokenizer.encode_batch(batch)]
            ids = np.fromiter(chain.from_iterable(encoded), dtype=np.int64)
            file.write(narrow(ids, dtype, path).tobytes())
            counts["tokens"] += ids.size
            counts["documents"] += len(batch)
            counts["eos"] += len(encoded)
            counts["bytes"] += sum(len(text.encode("utf-8")) for text in batch)
    return counts


def narrow(ids: Int[np.ndarray, " N"], dtype: str, path: Path) -> UInt[np.ndarray, " N"]:
    """The ids in the type of a token file.

    Raises:
        ValueError: for an id that the type would wrap into another one.
    """
    limit = np.iinfo(DTYPES[dtype]).max
    if ids.size and ids.max() > limit:
        raise ValueError(
            f"{path}: id {ids.max()} does not fit {dtype}, whose ids are below {limit + 1}: "
            "write uint32"
        )
    return ids.astype(DTYPES[dtype])


def missing_files(folder: Path) -> list[str]:
    """Names of the files that a prepared folder needs and this one lacks."""
    return [name for name in FILES if not (folder / name).is_file()]


def load_meta(folder: Path) -> dict[str, Any]:
    """Read the `meta.json` of a prepared folder.

    Raises:
        ValueError: where it is missing, damaged, incomplete or of another format.
    """
    path = folder / "meta.json"
    if not path.is_file():
        raise ValueError(f"{path} does not exist: {AGAIN}")
    try:
        meta = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is damaged ({error}): {AGAIN}") from error
    missing = _missing(meta, META_KEYS)
    for split in ("train", "val") if not missing else ():
        missing += [f"{split}.{key}" for key in _missing(meta[split], SPLIT_KEYS)]
    if missing:
        raise ValueError(f"{path} lacks {', '.join(missing)}: {AGAIN}")
    lengths = meta["token_bytes"]
    if not isinstance(lengths, list) or not all(type(length) is int for length in lengths):
        raise ValueError(f"{path}: token_bytes is no list of whole numbers: {AGAIN}")
    for split in ("train", "val"):
        if type(tokens := meta[split]["tokens"]) is not int:
            raise ValueError(f"{path}: {split}.tokens is {tokens!r}, no whole number: {AGAIN}")
    rules = {"format": [FORMAT], "dtype": [*DTYPES], "byte_order": ["little"]}
    for key, allowed in rules.items():
        if meta[key] not in allowed:
            raise ValueError(f"{path}: {key} is {meta[key]!r}, must be in {allowed}: {AGAIN}")
    return meta


def check_files(folder: Path, meta: dict[str, Any]) -> None:
    """Compare the files of a prepared folder with its `meta.json`.

    Raises:
        ValueError: for a file that is missing or is not the one `meta.json` was written with.
    """
    if missing := missing_files(folder):
        raise ValueError(f"{folder} lacks {', '.join(missing)}: {AGAIN}")
    for split in ("train", "val"):
        path, expected = folder / f"{split}.bin", meta[split]
        open_token_file(path, meta["dtype"])  # says what is wrong with a file that reads as junk
        n_bytes = expected["tokens"] * DTYPES[meta["dtype"]].itemsize
        if (found := path.stat().st_size) != n_bytes:
            raise ValueError(
                f"{path} has {found} bytes, meta.json says {n_bytes} "
                f"({expected['tokens']} tokens of {meta['dtype']}): {AGAIN}"
            )
        if content_fingerprint(path) != expected["fingerprint"]:
            raise ValueError(f"{path} has other content than meta.json says: {AGAIN}")
    path = folder / "tokenizer.json"
    if TextTokenizer.load(path).fingerprint != meta["tokenizer_fingerprint"]:
        raise ValueError(f"{path} is another tokenizer than meta.json says: {AGAIN}")


def _texts(paths: list[Path], skipped: Counter[str], stage: str, progress: bool) -> Iterator[str]:
    terminal = sys.stderr.isatty()
    if progress and not terminal:
        print(f"{stage}: {len(paths)} documents", file=sys.stderr, flush=True)
    for path in tqdm(paths, stage, unit="doc", disable=not (progress and terminal)):
        text = read_source(path)
        if text:
            yield text
        else:
            skipped["undecodable" if text is None else "empty"] += 1


def _batches(texts: Iterable[str]) -> Iterator[list[str]]:
    batch: list[str] = []
    characters = 0
    for text in texts:
        batch.append(text)
        characters += len(text)
        if characters >= BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def _publish(parts: dict[str, Path], output: Path) -> None:
    for part in parts.values():
        with part.open("r+b") as file:
            os.fsync(file.fileno())
    # An older set must not look whole while its files are being replaced.
    (output / "meta.json").unlink(missing_ok=True)
    for name in FILES:
        os.replace(parts[name], output / name)
    if os.name == "posix":  # elsewhere a folder cannot be opened
        folder = os.open(output, os.O_RDONLY)
        os.fsync(folder)
        os.close(folder)


def _remove(paths: Iterable[Path]) -> None:
    for path in paths:
        path.unlink(missing_ok=True)


def _missing(found: Any, keys: set[str]) -> list[str]:
    return sorted(keys - found.keys() if isinstance(found, dict) else keys)


def _refuse_empty(corpus: str, split: str, n_documents: int) -> None:
    if n_documents == 0:
        raise ValueError(
            f"corpus {corpus!r}: its {split} part has 0 documents / 0 tokens: use a larger corpus"
        )
