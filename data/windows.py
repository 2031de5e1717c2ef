"""Samples by their number in a run, and the plain kind: windows over a stream of tokens."""

from collections.abc import Sequence
from typing import Literal

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor
from torch.utils.data import Dataset

from data.order import fixed_places, random_starts, sample_places
from data.tokens.memmap import TokenStream

IGNORE_INDEX = -100
"""Label of a position that nothing is learned from."""

Order = Literal["shuffled", "random", "fixed"]


class Samples(Dataset[dict[str, Tensor]]):
    """Samples of `seq_len` positions and the target after the last, by their number in a run.

    A batch is asked for whole, with `__getitems__`: a loader needs a batch sampler and
    `collate_fn=torch.utils.data.default_convert`.

    Args:
        epoch_size: samples of a pass over the data.
        order: `shuffled` visits each sample once an epoch; `random`, which only windows have,
            starts anywhere; `fixed` is the same shuffle for every seed, so that its first samples
            are an even and constant choice to validate on.
    """

    def __init__(self, epoch_size: int, seq_len: int, seed: int, order: Order) -> None:
        self.epoch_size, self.seq_len, self.seed, self.order = epoch_size, seq_len, seed, order
        self.end: int | None = epoch_size if order == "fixed" else None
        """First sample that is a row without targets: what a bound leaves over in a batch."""

    def __len__(self) -> int:
        return self.epoch_size

    def places(self, samples: Int[np.ndarray, " B"]) -> Int[np.ndarray, " B"]:
        """Where each sample lies, 0 … epoch_size - 1."""
        if self.order == "fixed":
            return fixed_places(samples, self.epoch_size)
        return sample_places(samples, self.epoch_size, self.seed)

    def read(
        self, samples: Int[np.ndarray, " B"]
    ) -> tuple[Int[np.ndarray, "B L"], Int[np.ndarray, "B L"]]:
        """Ids and labels, L = seq_len + 1; a label is its id, or `IGNORE_INDEX`."""
        raise NotImplementedError

    def describe(self, sample: int) -> str:
        """Where a sample comes from, for people."""
        raise NotImplementedError

    @property
    def start_lines(self) -> list[str]:
        """What they are, and what of the data they leave out."""
        raise NotImplementedError

    def __getitems__(self, samples: Sequence[int]) -> dict[str, Int[Tensor, "B L"]]:
        """One batch; past `end`, rows without targets even out the ranks."""
        numbers = np.asarray(samples, dtype=np.int64)
        past = numbers >= (np.iinfo(np.int64).max if self.end is None else self.end)
        ids, labels = self.read(np.where(past, 0, numbers))
        ids[past], labels[past] = 0, IGNORE_INDEX
        return {"input_ids": torch.from_numpy(ids), "labels": torch.from_numpy(labels)}


class Windows(Samples):
    """Windows of a stream: those that do not overlap, or any.

    Raises:
        ValueError: where the stream is shorter than one window.
    """

    def __init__(
        self, stream: TokenStream, seq_len: int, seed: int = 0, order: Order = "shuffled"
    ) -> None:
        super().__init__((stream.n_tokens - 1) // seq_len, seq_len, seed, order)
        self.stream = stream
        if self.epoch_size < 1:
            what = "validation batches" if order == "fixed" else "windows"
            raise ValueError(
                f"{stream.name} holds {stream.n_tokens} tokens, which is 0 {what} at data.seq_len "
                f"{seq_len}: it needs at least {seq_len + 1}; give more data or a smaller seq_len"
            )

    @property
    def tail(self) -> int:
        """Tokens at the end of the stream that are a target of no window."""
        return self.stream.n_tokens - 1 - self.epoch_size * self.seq_len

    @property
    def start_lines(self) -> list[str]:
        line = f"data: {self.stream.label}: {self.stream.n_tokens:,} tokens in "
        if self.order == "random":
            return [f"{line}windows of {self.seq_len} that start anywhere"]
        tail = f" ({self.tail:,} at the end are in none)" if self.tail else ""
        return [f"{line}{self.epoch_size:,} windows of {self.seq_len}{tail}"]

    def starts(self, samples: Int[np.ndarray, " B"]) -> Int[np.ndarray, " B"]:
        """Offset of each sample's first token in the stream."""
        if self.order == "random":
            return random_starts(samples, self.stream.n_tokens - self.seq_len, self.seed)
        return self.places(samples) * self.seq_len

    def read(
        self, samples: Int[np.ndarray, " B"]
    ) -> tuple[Int[np.ndarray, "B L"], Int[np.ndarray, "B L"]]:
        ids = np.empty((len(samples), self.seq_len + 1), dtype=np.int64)
        # Row by row: faster than one indexed copy of a sliding view up to some 100 rows.
        for row, start in zip(ids, self.starts(samples).tolist(), strict=True):
            self.stream.copy(start, row)
        return ids, ids.copy()

    def describe(self, sample: int) -> str:
        [start] = self.starts(np.array([sample])).tolist()
        path, offset = self.stream.locate(start)
        return f"{path} from token {offset:,} on"
