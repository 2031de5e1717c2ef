"""A prepared folder: what it holds, what its `meta.json` says, and whether the two agree."""

import contextlib
import hashlib
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from data.text.tokenizer import TextTokenizer
from data.tokens.memmap import DTYPES, TokenFile, TokenStream, content_fingerprint

FORMAT = 2
FILES = ("train.bin", "train.docs.npy", "val.bin", "val.docs.npy", "tokenizer.json", "meta.json")
"""What a prepared folder holds; meta.json is written last and marks the set as whole.

Token files of shards are `train-00000.bin` and on, which `meta.json` lists.
"""

TOKEN_FILE = re.compile(r"(train|val)(-\d{5})?\.bin(\.max_id\.json)?")

META_KEYS = {"format", "dtype", "byte_order", "vocab_size", "special_ids", "token_bytes"}
META_KEYS |= {"tokenizer_fingerprint", "corpus", "train", "val"}
SPLIT_KEYS = {"files", "tokens", "documents", "bytes", "fingerprint"}
AGAIN = "prepare the data again by lightning prepare as before, with --overwrite"


def is_output(name: str) -> bool:
    """Whether a file of this name in a prepared folder is one that prepare writes."""
    return name in FILES or TOKEN_FILE.fullmatch(name) is not None


def lost_meta(folder: Path) -> str | None:
    """Return why the files that prepare made in a folder have no usable `meta.json`.

    None where it is usable, or where prepare did not make the files.
    """
    if not all((folder / name).is_file() for name in (*FILES[1:4:2], FILES[4])):
        return None
    try:
        load_meta(folder)
    except ValueError as error:
        return str(error).removesuffix(f": {AGAIN}")
    return None


def split_fingerprint(paths: Sequence[Path]) -> str:
    """What identifies the tokens of a split: of one file its own, of shards that of all theirs."""
    fingerprints = [content_fingerprint(path) for path in paths]
    if len(fingerprints) == 1:
        return fingerprints[0]
    return hashlib.sha256("".join(fingerprints).encode("ascii")).hexdigest()


def missing_files(folder: Path) -> list[str]:
    """Names of the files that a prepared folder needs and this one lacks."""
    names = [*FILES]
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        meta = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
        if meta["format"] != FORMAT:
            return []  # load_meta says more
        names = [*meta["train"]["files"], *meta["val"]["files"], *FILES[1::2], FILES[4]]
    return [name for name in names if not (folder / name).is_file()]


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
    if isinstance(meta, dict) and (found := meta.get("format", FORMAT)) != FORMAT:
        raise ValueError(f"{path}: format is {found!r}, must be {FORMAT}: {AGAIN}")
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
    rules = {"dtype": [*DTYPES], "byte_order": ["little"]}
    for key, allowed in rules.items():
        if meta[key] not in allowed:
            raise ValueError(f"{path}: {key} is {meta[key]!r}, must be in {allowed}: {AGAIN}")
    return meta


def check_files(folder: Path, meta: dict[str, Any]) -> dict[str, TokenStream]:
    """The token streams of a prepared folder by split, once its files agree with `meta.json`.

    Raises:
        ValueError: for a file that is missing or is not the one `meta.json` was written with.
    """
    if missing := missing_files(folder):
        raise ValueError(f"{folder} lacks {', '.join(missing)}: {AGAIN}")
    streams = {}
    for split in ("train", "val"):
        expected = meta[split]
        paths = [folder / name for name in expected["files"]]
        dtype = DTYPES[meta["dtype"]]
        streams[split] = TokenStream([TokenFile(path, dtype) for path in paths])
        named = " + ".join(map(str, paths))
        n_bytes = expected["tokens"] * dtype.itemsize
        if (found := sum(path.stat().st_size for path in paths)) != n_bytes:
            raise ValueError(
                f"{named} has {found} bytes, meta.json says {n_bytes} "
                f"({expected['tokens']} tokens of {meta['dtype']}): {AGAIN}"
            )
        if split_fingerprint(paths) != expected["fingerprint"]:
            raise ValueError(f"{named} has other content than meta.json says: {AGAIN}")
    path = folder / "tokenizer.json"
    if TextTokenizer.load(path).fingerprint != meta["tokenizer_fingerprint"]:
        raise ValueError(f"{path} is another tokenizer than meta.json says: {AGAIN}")
    return streams


def _missing(found: Any, keys: set[str]) -> list[str]:
    return sorted(keys - found.keys() if isinstance(found, dict) else keys)
