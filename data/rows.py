"""Rows: documents one by one, each padded to the length of a sample."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
from jaxtyping import Int

from data.tokens.memmap import TokenStream
from data.windows import IGNORE_INDEX, Order, Samples

RowKind = Literal["split", "truncate"]

# Documents whose end is looked at when their offsets are opened, spread evenly.
N_LOOKS = 1000


@dataclass(frozen=True, kw_only=True)
class Specials:
    """Ids that are no text."""

    eos: int
    """Ends each document of a stream."""
    bos: int | None = None
    """Begins each document, where the tokenizer has one."""
    bos_stored: bool = False
    """Whether the stream holds it; else it is put in when rows are made."""
    pad: int = 0
    """Fills rows; may be any id, for padding is known by its position."""

    @property
    def lead(self) -> int:
        """Ids that a document has before those which the stream holds of it: 0 or 1."""
        return int(self.bos is not None and not self.bos_stored)


def rows_per_document(
    lengths: Int[np.ndarray, " N"], seq_len: int, kind: RowKind
) -> Int[np.ndarray, " N"]:
    """How many rows documents of so many ids make; none without a second id, which is a target."""
    targets = lengths - 1
    return -(-targets // seq_len) if kind == "split" else np.minimum(targets, 1)


class Rows(Samples):
    """Documents of a stream as rows of seq_len + 1 ids: bos where there is one, the text, eos.

    `split` cuts a long document into rows that overlap by one id, so that every id but the first
    of a document is a target once an epoch. `truncate` makes one row of a document and drops what
    is too long. Rows are padded on their right, where labels are `IGNORE_INDEX`.

    Args:
        docs: .npy of the offsets at which documents begin, and of the stream's end.

    Raises:
        ValueError: the offsets are not the stream's, no document has a target, or seq_len has no
            room for an id of text.
    """

    def __init__(
        self,
        stream: TokenStream,
        docs: Path,
        seq_len: int,
        kind: RowKind,
        specials: Specials,
        seed: int = 0,
        order: Order = "shuffled",
    ) -> None:
        self.stream, self.path, self.specials, self.seq_len = stream, docs, specials, seq_len
        self.kind: RowKind = kind
        self._check()
        super().__init__(int(self._ends[-1]), seq_len, seed, order)
        if self.epoch_size < 1:
            what = "validation batches" if order == "fixed" else "rows"
            raise ValueError(
                f"{stream.name} holds {stream.n_tokens} tokens, but no document with a second id "
                f"to learn, which is 0 {what}; give more data"
            )

    def _check(self) -> None:
        room = self.seq_len + 1 - self._specials_per_document
        if self.kind == "truncate" and room < 1:
            raise ValueError(
                f"data.seq_len is {self.seq_len}: rows of data.rows truncate need at least "
                f"{self._specials_per_document}, or no text would be left between the special ids"
            )
        try:
            docs = self._docs
        except (ValueError, OSError, EOFError) as error:
            raise ValueError(f"{self.path} is damaged ({error}): prepare the data again") from error
        whole = docs.ndim == 1 and docs.dtype == np.int64 and docs.size > 1 and docs[0] == 0
        if not (whole and docs[-1] == self.stream.n_tokens and (docs[1:] > docs[:-1]).all()):
            raise ValueError(
                f"{self.path} holds no offsets of documents from 0 up to the "
                f"{self.stream.n_tokens} tokens of {self.stream.name}: prepare the data again"
            )
        last = np.empty(1, dtype=np.int64)
        for document in np.linspace(0, docs.size - 2, min(docs.size - 1, N_LOOKS)).astype(int):
            self.stream.copy(int(docs[document + 1]) - 1, last)
            if last[0] != self.specials.eos:
                raise ValueError(
                    f"{self.path}: document {document} ends at token {docs[document + 1] - 1} of "
                    f"{self.stream.name} with id {last[0]}, not with eos {self.specials.eos}: "
                    "prepare the data again"
                )

    @property
    def _specials_per_document(self) -> int:
        return 1 + int(self.specials.bos is not None)

    @cached_property
    def _docs(self) -> np.ndarray:
        return np.load(self.path, mmap_mode="r", allow_pickle=False).view(np.ndarray)

    @cached_property
    def _ends(self) -> Int[np.ndarray, " N"]:
        """Rows up to and with each document."""
        return np.cumsum(rows_per_document(self._lengths, self.seq_len, self.kind))

    @property
    def _lengths(self) -> Int[np.ndarray, " N"]:
        """Ids of each document, the special ones included."""
        return np.diff(self._docs) + self.specials.lead

    @property
    def n_targets(self) -> int:
        """Targets of an epoch."""
        kept = self._lengths
        if self.kind == "truncate":
            kept = np.minimum(kept, self.seq_len + 1)
        return int((kept - 1).sum())

    @property
    def start_lines(self) -> list[str]:
        padding = 1 - self.n_targets / (self.epoch_size * self.seq_len)
        line = (
            f"data: {self.stream.label}: {self._docs.size - 1:,} documents in {self.epoch_size:,} "
            f"rows of {self.seq_len}: {self.n_targets:,} targets, {padding:.1%} padding"
        )
        text = self._lengths - self._specials_per_document
        lost = np.maximum(text - (self.seq_len + 1 - self._specials_per_document), 0)
        if self.kind == "split" or not lost.any():
            return [line]
        warning = (
            f"warning: data.rows truncate cuts {np.count_nonzero(lost):,} of {lost.size:,} "
            f"documents at data.seq_len {self.seq_len}: {lost.sum():,} of {text.sum():,} tokens "
            f"({lost.sum() / text.sum():.1%}) are never trained on; data.rows split loses none"
        )
        return [line, warning]

    def read(
        self, samples: Int[np.ndarray, " B"]
    ) -> tuple[Int[np.ndarray, "B L"], Int[np.ndarray, "B L"]]:
        ids = np.full((len(samples), self.seq_len + 1), self.specials.pad, dtype=np.int64)
        labels = np.full_like(ids, IGNORE_INDEX)
        for i, place in enumerate(self.places(samples).tolist()):
            document, piece = self._locate(place)
            n_ids = self._fill(ids[i], document, piece)
            labels[i, :n_ids] = ids[i, :n_ids]
        return ids, labels

    def _locate(self, place: int) -> tuple[int, int]:
        """The document of a row, and which of its rows it is."""
        document = int(np.searchsorted(self._ends, place, side="right"))
        return document, place - (int(self._ends[document - 1]) if document else 0)

    def _fill(self, row: Int[np.ndarray, " L"], document: int, piece: int) -> int:
        """Write a document's row and return how many ids it has."""
        begin, end = self._docs[document : document + 2].tolist()
        # Where the row begins, counted with the bos that is put in before the stored ids.
        first, lead = piece * self.seq_len, self.specials.lead
        n_ids = min(len(row), end - begin + lead - first)
        stored = row[:n_ids]
        if lead and piece == 0:
            row[0], stored = self.specials.bos, row[1:n_ids]
        self.stream.copy(begin + max(first - lead, 0), stored)
        if self.kind == "truncate":
            row[n_ids - 1] = self.specials.eos
        return n_ids

    def describe(self, sample: int) -> str:
        document, piece = self._locate(int(self.places(np.array([sample]))[0]))
        path, offset = self.stream.locate(int(self._docs[document]))
        before = int(self._ends[document - 1]) if document else 0
        of = f", row {piece + 1} of {self._ends[document] - before}"
        return f"document {document} ({path} from token {offset:,} on){of}"

    def __getstate__(self) -> dict[str, Any]:
        return {name: v for name, v in self.__dict__.items() if name not in ("_docs", "_ends")}
