"""What a `data.path` holds: a prepared folder, or token files of others."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from data.rows import RowKind, Specials, rows_per_document
from data.text.text_loss import TextLoss
from data.text.tokenizer import TextTokenizer
from data.tokens.folder import (
    AGAIN,
    check_files,
    load_meta,
    lost_meta,
    missing_files,
    split_fingerprint,
)
from data.tokens.foreign import find_files, is_foreign, open_files
from data.tokens.memmap import TokenStream, check_token_range


@dataclass(frozen=True, kw_only=True)
class Source:
    """Token streams of one origin, and what is known of their ids."""

    name: str
    """Folder or files, as they were given."""
    streams: dict[str, TokenStream]
    """By split; without val where there is none."""
    fingerprints: dict[str, str]
    """Of the streams."""
    tokenizer_path: Path | None = None
    """What the ids were made with, where it is known; the next two rest on it."""
    tokenizer_fingerprint: str | None = None
    """Identifies it."""
    token_bytes: list[int] | None = None
    """UTF-8 bytes of each id."""
    docs: dict[str, Path] = field(default_factory=dict)
    """Offsets of documents by split, of a prepared folder; the next one rests on them."""
    specials: Specials | None = None
    """Ids that are no text."""
    text_loss: TextLoss = field(default_factory=TextLoss)
    """Text that the ids do not hold."""

    def warnings(self, splits: Sequence[str]) -> list[str]:
        """A line for each kind of text that is missing."""
        lines = [
            f"warning: {self.name}, as lightning prepare said: {line}"
            for line in self.text_loss.losses
        ]
        for file in (file for split in splits for file in self.streams[split].files):
            if zeros := file.zero_ids:
                lines.append(
                    f"warning: {zeros:,} ids of {file.path} are zeros in long runs, as in a file "
                    "that was not copied in full; copy it again unless it is padded with id 0"
                )
        return lines

    def stream(self, split: str, vocab_size: int) -> TokenStream:
        """The tokens of a split, each of which the model has an embedding for.

        Raises:
            ValueError: there are none, or an id is too large.
        """
        if split not in self.streams:
            raise ValueError(
                f"{self.name} has no validation tokens: bring a file with val for train in its "
                "name, or turn validation off by trainer.limit_val_batches 0"
            )
        for file in self.streams[split].files:
            check_token_range(file, vocab_size)
        return self.streams[split]

    def documents(self, split: str) -> tuple[Path, Specials]:
        """Where the documents of a split begin, and what stands around their text.

        Raises:
            ValueError: the files do not tell.
        """
        if self.specials is None:
            raise ValueError(
                f"data.rows is set, but {self.name} does not tell where its documents begin: rows "
                "need a folder made by lightning prepare; leave data.rows out to train on windows"
            )
        return self.docs[split], self.specials


def require(path: str, key: str) -> None:
    """Find out before any work whether a `data.path` holds something to train on.

    Args:
        key: what names it in the configuration.

    Raises:
        ValueError: it does not.
    """
    if is_foreign(path):
        find_files(path)
    elif missing := missing_files(Path(path)):
        lacks = f"{key} {path}, which lacks {', '.join(missing)}"
        if "meta.json" not in missing:
            raise ValueError(
                f"{lacks} of what its meta.json describes; bring the file back, or make all anew "
                "by lightning prepare"
            )
        if lost_meta(Path(path)):
            raise ValueError(
                f"{lacks}, without which the files of lightning prepare there cannot be read; "
                f"bring the file back, or {AGAIN}"
            )
        raise ValueError(
            f"{lacks}, and data.corpus is not set, so nothing is made up there; bring a folder "
            "with these files, or token files of others (train.bin and val.bin), or have one made "
            "of your text by lightning prepare --input FILES --output DIR"
        )


def open_source(path: str, vocab_size: int, dtype: str | None, tokenizer: str | None) -> Source:
    """Open what a `data.path` names.

    Args:
        vocab_size: ids of the model.
        dtype: of files that do not tell it.
        tokenizer: a tokenizer.json, for files that come without one.

    Raises:
        ValueError: for files that are damaged or not what the settings say.
    """
    known = None if tokenizer is None else TextTokenizer.load(Path(tokenizer))
    source = (
        _open_foreign(path, vocab_size, dtype, known)
        if is_foreign(path)
        else _open_prepared(Path(path), dtype)
    )
    if known is not None and known.fingerprint != source.tokenizer_fingerprint:
        raise ValueError(
            f"data.tokenizer {tokenizer} has fingerprint {short(known.fingerprint)}, but {path} "
            f"was prepared with {short(source.tokenizer_fingerprint)}: leave data.tokenizer out"
        )
    if (n_ids := len(source.token_bytes or ())) > vocab_size:
        raise ValueError(
            f"model.config.vocab_size is {vocab_size}, but the tokenizer of {path} has {n_ids} "
            f"ids; set model.config.vocab_size to at least {n_ids}"
        )
    return source


def known_sizes(path: str, vocab_size: int, dtype: str | None) -> dict[str, int]:
    """Tokens of each split and ids of the tokenizer, as far as they are known without the data.

    Of a prepared folder `meta.json` alone is read.
    """
    if (Path(path) / "meta.json").is_file():
        meta = load_meta(Path(path))
        sizes = {split: meta[split]["tokens"] for split in ("train", "val")}
        return sizes | {"tokenizer": len(meta["token_bytes"])}
    files = find_files(path, must_exist=False) if is_foreign(path) else {}
    if not files.get("train"):
        return {}
    streams = open_files(files, dtype, vocab_size)
    return {split: stream.n_tokens for split, stream in streams.items()}


def known_rows(path: str, seq_len: int, kind: RowKind) -> int | None:
    """Rows of an epoch over a prepared folder, where its offsets of documents are there."""
    docs = Path(path) / "train.docs.npy"
    if not docs.is_file():
        return None
    specials = _specials(load_meta(Path(path)))
    lengths = np.diff(np.load(docs, mmap_mode="r", allow_pickle=False)) + specials.lead
    return int(rows_per_document(lengths, seq_len, kind).sum())


def check_alike(sources: Sequence[Source]) -> None:
    """Refuse sources whose ids do not mean the same.

    Raises:
        ValueError: their tokenizers differ, or one is not known while another is.
    """
    first = sources[0]
    for other in sources[1:]:
        if other.tokenizer_fingerprint != first.tokenizer_fingerprint:
            raise ValueError(
                f"the sources of data.mixture have different tokenizers: {first.name} has "
                f"{short(first.tokenizer_fingerprint)}, {other.name} has "
                f"{short(other.tokenizer_fingerprint)}; prepare them with one tokenizer"
            )


def short(fingerprint: str | None) -> str:
    """A fingerprint for people."""
    return "none" if fingerprint is None else fingerprint[:12]


def _open_prepared(folder: Path, dtype: str | None) -> Source:
    meta = load_meta(folder)
    if dtype is not None and dtype != meta["dtype"]:
        raise ValueError(
            f"{folder / 'meta.json'} says {meta['dtype']}, but data.dtype is {dtype}: leave "
            "data.dtype out"
        )
    streams = check_files(folder, meta)
    return Source(
        name=str(folder),
        streams=streams,
        fingerprints={split: meta[split]["fingerprint"] for split in streams},
        tokenizer_path=folder / "tokenizer.json",
        tokenizer_fingerprint=meta["tokenizer_fingerprint"],
        token_bytes=meta["token_bytes"],
        docs={split: folder / f"{split}.docs.npy" for split in streams},
        specials=_specials(meta),
        text_loss=TextLoss.read(meta.get("text_loss", {})),
    )


def _specials(meta: dict[str, Any]) -> Specials:
    ids = meta["special_ids"]
    return Specials(
        eos=ids["eos"],
        bos=ids.get("bos"),
        bos_stored=meta.get("bos_stored", False),
        pad=ids.get("pad") or 0,
    )


def _open_foreign(
    path: str, vocab_size: int, dtype: str | None, tokenizer: TextTokenizer | None
) -> Source:
    files = find_files(path)
    prepared = files["train"][0].parent
    if not Path(path).is_dir() and (prepared / "meta.json").is_file():
        raise ValueError(
            f"data.path {path} is a file of a prepared folder, whose meta.json tells its type and "
            f"tokenizer: give data.path {prepared}"
        )
    return Source(
        name=path,
        streams=open_files(files, dtype, vocab_size),
        fingerprints={split: split_fingerprint(paths) for split, paths in files.items() if paths},
        tokenizer_path=None if tokenizer is None else Path(tokenizer.source),
        tokenizer_fingerprint=None if tokenizer is None else tokenizer.fingerprint,
        token_bytes=None if tokenizer is None else tokenizer.token_bytes().tolist(),
    )
