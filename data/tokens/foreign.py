"""Token files that others made: nanoGPT's, llm.c's and modded-nanogpt's, plain .npy."""

import glob
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from data.prepare.paths import matching
from data.tokens.memmap import (
    DTYPES,
    LLM_C_MAGICS,
    TokenFile,
    TokenStream,
    open_token_file,
)
from data.tokens.not_tokens import refuse_other_kinds
from data.tokens.number_types import prove_dtype

SUFFIXES = (".bin", ".npy")
WORDS = {"train": {"train", "training"}, "val": {"val", "valid", "validation"}}
"""Words of a file's name that say its split."""

HEADER_BYTES = 1024
NPY_MAGIC = b"\x93NUMPY"
# llm.c writes 7 for Llama 3, and 1 was written with that magic too.
LLM_C_VERSIONS = {20240520: (1,), 20240801: (7, 1)}


def is_foreign(path: str) -> bool:
    """Whether a `data.path` names token files of others, rather than a folder of `prepare`.

    A folder in which `prepare` was interrupted is its own, though `meta.json` is not there yet.
    """
    place = Path(path)
    if not place.is_dir():
        return place.is_file() or place.suffix in SUFFIXES or glob.has_magic(path)
    names = [file.name for file in place.iterdir()]
    ours = any(name in ("meta.json", ".work") or name.endswith(".docs.npy") for name in names)
    return not ours and any(name.endswith(SUFFIXES) for name in names)


def find_files(path: str, must_exist: bool = True) -> dict[str, list[Path]]:
    """Token files by split that a folder, a file or a pattern names, in the order of their numbers.

    In a folder those count whose name holds a word of `WORDS`. A file or pattern without
    validation files is joined by those of the same name with `val` for `train`.

    Raises:
        ValueError: there is none to train on, a name says no split beside names that do, or files
            of two kinds are mixed.
    """
    folder = Path(path)
    if folder.is_dir():
        splits = _by_split(list(folder.iterdir()))
    else:
        splits = _by_split(_matches(path))
        if unsaid := splits.pop(""):
            if splits["train"] or splits["val"]:
                raise ValueError(
                    f"data.path {path} takes in {unsaid[0]}, whose name says neither train nor "
                    "val; narrow the pattern or rename the file"
                )
            splits["train"] = unsaid
        if not splits["val"]:
            name = re.sub("train(ing)?", "val", folder.name)
            beside = _matches(str(folder.with_name(name))) if name != folder.name else []
            splits["val"] = _by_split(beside)["val"]
    if must_exist and not splits["train"]:
        raise ValueError(
            f"data.path {path} names no token file to train on; it must name a folder made by "
            "lightning prepare, or files ending in .bin or .npy with the word train in their name"
        )
    for split in WORDS:
        if len(kinds := {file.suffix: file for file in splits[split]}) > 1:
            raise ValueError(
                f"data.path {path} takes in {' and '.join(f'{f}' for f in kinds.values())}, files "
                "of two kinds, perhaps of the same text; name one kind by a pattern, such as "
                f"{folder / '*.bin'}"
            )
    return {split: splits[split] for split in WORDS}


def open_files(
    files: dict[str, list[Path]], dtype: str | None, vocab_size: int
) -> dict[str, TokenStream]:
    """Open the files of each split that has some.

    Args:
        dtype: of files that do not tell it; None: proved by their content.
        vocab_size: ids of the model, which is what a proof rests on.

    Raises:
        ValueError: for a file that is damaged, is no token file, is of another dtype than given,
            or does not tell its own.
    """
    if dtype is not None and dtype not in DTYPES:
        raise ValueError(f"data.dtype is {dtype!r}: must be one of {', '.join(DTYPES)}")
    silent = [path for paths in files.values() for path in paths if _kind(path) == "raw"]
    for path in silent:
        refuse_other_kinds(path)
    proved = prove_dtype(silent, vocab_size)
    if silent and not (dtype or proved):
        raise ValueError(
            f"{silent[0]} does not tell its type, and its content fits uint16 and uint32: say "
            "which by data.dtype"
        )
    return {
        split: TokenStream([_open(path, dtype, dtype or proved, vocab_size) for path in paths])
        for split, paths in files.items()
        if paths
    }


def _matches(pattern: str) -> list[Path]:
    # A name may hold brackets, which a pattern reads as a choice of letters.
    found = [Path(pattern)] if Path(pattern).is_file() else matching(pattern)
    return [path for path in found if path.is_file()]


def _by_split(paths: Sequence[Path]) -> dict[str, list[Path]]:
    """Token files under the split that their name says, or none."""
    splits: dict[str, list[Path]] = {"train": [], "val": [], "": []}
    for path in sorted(paths, key=_by_number):
        if path.suffix in SUFFIXES:
            words = set(re.split("[^a-z]+", path.stem.lower()))
            splits[next((split for split, said in WORDS.items() if words & said), "")].append(path)
    return splits


def _by_number(path: Path) -> list[tuple[int, str]]:
    """A key that sorts shard 9 before shard 10."""
    parts = re.split(r"(\d+)", str(path))
    return [(int(part) if part.isdigit() else -1, part) for part in parts]


def _head(path: Path, n_bytes: int) -> bytes:
    with path.open("rb") as file:
        return file.read(n_bytes)


def _kind(path: Path) -> str:
    head = _head(path, len(NPY_MAGIC))
    if head == NPY_MAGIC or path.suffix == ".npy":
        return "npy"
    return "llm.c" if int.from_bytes(head[:4], "little") in LLM_C_MAGICS else "raw"


def _open(path: Path, given: str | None, proved: str | None, vocab_size: int) -> TokenFile:
    kind = _kind(path)
    if kind == "raw":
        assert proved is not None
        return open_token_file(path, proved, vocab_size)
    file = _open_npy(path) if kind == "npy" else _open_llm_c(path)
    if given is not None and file.dtype.newbyteorder("<") != DTYPES[given]:
        raise ValueError(
            f"{path} is {file.dtype.name} by its header, but data.dtype is {given}: leave "
            "data.dtype out"
        )
    return file


def _open_llm_c(path: Path) -> TokenFile:
    """Source: github.com/karpathy/llm.c, dev/data/data_common.py."""
    n_bytes = path.stat().st_size
    header = np.frombuffer(_head(path, HEADER_BYTES)[: n_bytes // 4 * 4], "<i4")
    if n_bytes < HEADER_BYTES:
        raise ValueError(
            f"{path} starts with an llm.c header (magic {header[0]}) but has {n_bytes} bytes, less "
            f"than the header's {HEADER_BYTES}: truncated; copy it again"
        )
    magic, version, count = header[:3].tolist()
    if version not in (known := LLM_C_VERSIONS[magic]):
        raise ValueError(
            f"{path} has an llm.c header (magic {magic}) of version {version}: must be "
            f"{' or '.join(map(str, known))}; write it again by llm.c's own scripts"
        )
    file = TokenFile(path, DTYPES[LLM_C_MAGICS[magic]], HEADER_BYTES)
    if n_bytes != (should := HEADER_BYTES + count * file.dtype.itemsize):
        raise ValueError(
            f"{path} has {n_bytes} bytes, but its llm.c header (magic {magic}) tells of {count} "
            f"tokens of {file.dtype.name}, which is {should}: truncated or damaged; copy it again"
        )
    if count == 0:
        raise ValueError(f"{path} is empty (0 tokens): write it again or leave it out")
    return file


def _open_npy(path: Path) -> TokenFile:
    n_bytes = path.stat().st_size
    if n_bytes == 0:
        raise ValueError(f"{path} is empty (0 tokens): write it again or leave it out")
    if not NPY_MAGIC.startswith(_head(path, len(NPY_MAGIC))):
        refuse_other_kinds(path)
        raise ValueError(
            f"{path} does not begin with the header of a .npy file: copy it again if it is "
            "damaged; name it .bin if it holds nothing but ids, as OLMo writes them"
        )
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, OSError, EOFError) as error:
        if "Python objects" in str(error):
            raise ValueError(
                f"{path} holds Python objects: token ids are whole numbers; save it as np.uint16 "
                "or np.uint32"
            ) from error
        raise ValueError(
            f"{path} is no whole .npy file ({error}): truncated or damaged; copy it again"
        ) from error
    if array.ndim != 1:
        raise ValueError(
            f"{path} holds an array of shape {array.shape}: must have one dimension; flatten it by "
            f"np.save({path.name!r}, np.load({path.name!r}).ravel())"
        )
    if array.dtype.kind not in "ui":
        raise ValueError(
            f"{path} holds {array.dtype.name}: token ids are whole numbers; save it as np.uint16 "
            "or np.uint32"
        )
    if array.size == 0:
        raise ValueError(f"{path} is empty (0 tokens): write it again or leave it out")
    file = TokenFile(path, array.dtype, array.offset)  # pyright: ignore[reportAttributeAccessIssue]
    if n_bytes != file.offset + array.nbytes:
        raise ValueError(
            f"{path} has {n_bytes - file.offset - array.nbytes} bytes after its {array.size} "
            "tokens: damaged; copy it again"
        )
    return file
