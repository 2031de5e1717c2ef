"""Documents to token streams: read, encoded on all cores and written at the same time."""

import hashlib
import os
import sys
import time
from array import array
from collections import Counter, deque
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import Future
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate
from typing import NamedTuple

import numpy as np
from tqdm import tqdm

from data.prepare.readers import Input
from data.prepare.texts import OVERLAP, Note
from data.prepare.work import SPLITS, Work
from data.system.threads import Threads
from data.text.text_loss import TextLoss
from data.text.tokenizer import TextTokenizer

# Bytes of text that are encoded at once: enough for many cores, little for a laptop's memory.
BATCH_BYTES = 1 << 18
# Batches encoded beside one another, so that cores do not wait for the longest text of one.
MOST_AHEAD = 8
# Ids that are counted at once.
COUNTED = 1 << 20
# Bytes of text after which a killed call need not begin again.
PART_BYTES = 1 << 27
# Bytes of text that a tokenizer is trained on at most.
SAMPLE_BYTES = 1 << 29


@dataclass(frozen=True, kw_only=True)
class Sources:
    """Where documents come from and which of them are for validation."""

    inputs: list[tuple[str | None, Input]]
    """With the split that all of an input belongs to; None goes by each text."""
    val_fraction: float = 0.0
    skip_faults: bool = False
    validating: np.ndarray = field(default_factory=lambda: np.empty(0))
    """Shares of texts, sorted, that no training document is to equal."""

    def take(self, item: str | Note) -> str | None:
        """The text, or None for what is left out.

        Raises:
            ValueError: for a fault that is not to be left out.
        """
        if isinstance(item, str):
            return item
        if item.fault is not None and not self.skip_faults:
            raise ValueError(item.fault)
        return None

    def split_of(self, text: str) -> tuple[str, float, int]:
        """The split of a text, the smallest share that validates it, and its UTF-8 bytes.

        Equal for equal texts.
        """
        data = text.encode("utf-8")
        share = int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "big") / 2**64
        return "val" if share < self.val_fraction else "train", share, len(data)

    def with_validation(self) -> "Sources":
        """The same with `validating` read from the inputs that are for validation."""
        items = (item for given, source in self.inputs if given == "val" for item in source)
        texts = (item for item in items if isinstance(item, str))
        shares = np.fromiter((self.split_of(text)[1] for text in texts), np.float64)
        return replace(self, validating=np.unique(shares))

    def validates(self, share: float) -> bool:
        """Whether a text of that share is known to be for validation."""
        at = int(np.searchsorted(self.validating, share))
        return at < self.validating.size and bool(self.validating[at] == share)


class Document(NamedTuple):
    """A text, and where it comes from and goes to."""

    text: str
    source: int
    split: str
    n_bytes: int
    share: float
    """The same for the same text."""


@dataclass
class Batch:
    """What is encoded at once, and where reading stood behind it."""

    documents: list[Document] = field(default_factory=list)
    left_out: Counter[str] = field(default_factory=Counter)
    n_bytes: int = 0
    read: tuple[int, int] = (0, 0)
    """Input, and how much of it was read."""
    next: tuple[int, int] = (0, 0)
    """Input, and how many of its items were taken."""
    lowest: float = 1.0
    """Smallest share that validates one of the documents."""


def training_texts(sources: Sources, show: bool) -> Iterator[str]:
    """Texts of the training split; of each input its beginning, where all are too many."""
    left, cut = SAMPLE_BYTES, 0
    with Progress("train tokenizer", sources, show) as bar:
        for number, (given, source) in enumerate(sources.inputs):
            share = left // (len(sources.inputs) - number)
            for item in source if given != "val" else ():
                text = sources.take(item)
                if text is None:
                    continue
                split, _, n_bytes = sources.split_of(text)
                if (given or split) == "train":
                    if share <= 0:
                        cut += 1
                        break
                    yield text
                    share, left = share - n_bytes, left - n_bytes
                    bar.update(number, source.at, n_bytes)
    if cut and show:
        print(f"tokenizer: trained on the beginning of {cut:,} inputs", file=sys.stderr)


def encode(
    sources: Sources,
    tokenizer: TextTokenizer,
    work: Work,
    *,
    bos: bool,
    workers: int | None,
    show: bool,
) -> None:
    """Write what the work's state lacks; a kill costs the part that is not whole.

    Raises:
        ValueError: for a fault in an input.
    """
    assert work.state is not None
    saved, batches = 0, _batches(sources, *work.state["next"])
    encoded = _encoded(batches, tokenizer, workers or os.cpu_count() or 1)
    with Progress("encode", sources, show) as bar, closing(encoded):
        for batch, rows, lost in encoded:
            _write(work, batch, rows, lost, tokenizer, bos)
            bar.update(*batch.read, batch.n_bytes)
            saved += batch.n_bytes
            if saved >= PART_BYTES:
                saved = 0
                work.commit()
                bar.say()


def _batches(sources: Sources, first: int, done: int) -> Iterator[Batch]:
    batch = Batch()
    for index, (given, source) in list(enumerate(sources.inputs))[first:]:
        for number, item in enumerate(source, 1):
            if number <= done:
                continue
            text = sources.take(item)
            if text is not None:
                split, share, n_bytes = sources.split_of(text)
                document = Document(text, index, given or split, n_bytes, share)
                if document.split == "train" and sources.validates(share):
                    batch.left_out[OVERLAP] += 1
                batch.documents.append(document)
                batch.n_bytes += document.n_bytes
                batch.lowest = min(batch.lowest, share)
            elif isinstance(item, Note):
                batch.left_out[item.reason] += item.count
            batch.read, batch.next = (index, source.at), (index, number)
            if batch.n_bytes >= BATCH_BYTES:
                yield batch
                batch = Batch(read=batch.read, next=batch.next)
        done = 0
    yield batch


def _encoded(
    batches: Iterator[Batch], tokenizer: TextTokenizer, workers: int
) -> Generator[tuple[Batch, list[Sequence[int]], Counter[str]], None, None]:
    threads = Threads()

    def rows_and_lost(texts: list[str]) -> tuple[list[Sequence[int]], Counter[str]]:
        return tokenizer.encode_counted(texts, threads.check)

    waiting: deque[tuple[Batch, Future[tuple[list[Sequence[int]], Counter[str]]]]] = deque()
    with threads:
        for batch in batches:
            texts = [document.text for document in batch.documents]
            waiting.append((batch, threads.start(partial(rows_and_lost, texts))))
            if len(waiting) > min(workers, MOST_AHEAD):
                yield waiting[0][0], *waiting[0][1].result()
                waiting.popleft()
        while waiting:
            yield waiting[0][0], *waiting[0][1].result()
            waiting.popleft()


def _write(
    work: Work,
    batch: Batch,
    rows: list[Sequence[int]],
    lost: Counter[str],
    tokenizer: TextTokenizer,
    bos: bool,
) -> None:
    assert work.state is not None
    eos_id, bos_id = tokenizer.eos_id, tokenizer.special_id("bos") if bos else None
    ids = {split: array("I") for split in SPLITS}
    ends: dict[str, list[int]] = {split: [] for split in SPLITS}
    digests = work.state.get("digests")
    for document, row in zip(batch.documents, rows, strict=True):
        counts, stream = work.state[document.split], ids[document.split]
        if bos_id is not None:
            stream.append(bos_id)
        if isinstance(row, array) and len(row) > len(stream):
            row[:0] = stream  # no second copy of a long one
            stream = ids[document.split] = row
        else:
            stream.extend(row)
        stream.append(eos_id)
        ends[document.split].append(len(stream))
        counts["eos"] += 1
        counts["bytes"] += document.n_bytes
        counts["sources"][document.source] += 1
        if digests:
            added = digests[document.source] * 1_000_003 + int(document.share * 2**53)
            digests[document.source] = added % 2**61
    for split, writer in work.writers.items():
        writer.append(np.frombuffer(ids[split], np.uint32), np.array(ends[split], np.int64))
        work.state[split] |= {"tokens": writer.tokens, "documents": writer.documents}
    written = Counter({eos_id: len(batch.documents)})
    if bos_id is not None:
        written[bos_id] += len(batch.documents)
    loss = TextLoss(sum(len(each.text) for each in batch.documents), lost)
    counts = np.zeros(tokenizer.size, np.int64)
    for stream in ids.values():
        for begin in range(0, len(stream), COUNTED):  # numpy widens what it counts
            part = np.frombuffer(stream[begin : begin + COUNTED], np.uint32)
            counts += np.bincount(part, minlength=tokenizer.size)
    for token_id, name in tokenizer.odd_tokens.items():
        loss.tokens[name] = int(counts[token_id]) - written[token_id]
    total = TextLoss.read(work.state.get("text_loss", {})) + loss
    work.state["text_loss"] = total.content
    work.state["left_out"] = Counter(work.state["left_out"]) + batch.left_out
    work.state["lowest_share"] = min(work.state["lowest_share"], batch.lowest)
    work.state["next"] = batch.next


class Progress:
    """How far a stage is: a bar on a terminal, a line now and then elsewhere, on stderr."""

    def __init__(self, stage: str, sources: Sources, show: bool) -> None:
        sizes = [source.size for _, source in sources.inputs]
        self.before = list(accumulate(sizes, initial=0))
        self.stage, self.n_bytes, self.share, self.first = stage, 0, 0.0, None
        terminal = sys.stderr.isatty()
        self.lines, self.began = show and not terminal, time.perf_counter()
        look = "{desc}: {percentage:3.0f}%|{bar}| {elapsed}<{remaining}{postfix}"
        self.bar = tqdm(total=1.0, desc=stage, bar_format=look, disable=not (show and terminal))
        self._print(f"{len(sizes):,} input{'s' * (len(sizes) > 1)}")

    def update(self, number: int, at: int, n_bytes: int) -> None:
        """Where reading stands, and how many bytes of text were done since it last was told."""
        self.share = (self.before[number] + at) / max(1, self.before[-1])
        self.first = self.share if self.first is None else self.first
        self.n_bytes += n_bytes
        self.bar.set_postfix_str(f"{self.rate:.1f} MB/s", refresh=False)
        self.bar.update(self.share - self.bar.n)

    @property
    def rate(self) -> float:
        """Million bytes of text in a second."""
        return self.n_bytes / 1e6 / max(1e-9, time.perf_counter() - self.began)

    def say(self) -> None:
        """A line where there is no bar."""
        done = self.share - (self.first or 0.0)
        seconds = (time.perf_counter() - self.began) * (1 - self.share) / max(1e-9, done)
        left = tqdm.format_interval(seconds)
        self._print(f"{self.share:.0%} read, {self.rate:.1f} MB/s, {left} left")

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, kind: type | None, *_: object) -> None:
        self.bar.close()
        if kind is None:
            self._print(f"{self.n_bytes / 1e6:.1f} MB of text done, {self.rate:.1f} MB/s")

    def _print(self, line: str) -> None:
        if self.lines:
            print(f"{self.stage}: {line}", file=sys.stderr, flush=True)
