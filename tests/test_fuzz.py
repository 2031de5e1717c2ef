"""Any documents in any layout: each token is learned from once an epoch, and nothing else is."""

import tempfile
from collections import Counter
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data.loader import StepBatches
from data.rows import Rows, Specials
from data.tokens.memmap import DTYPES, TokenFile, TokenStream
from data.windows import Samples, Windows

pytestmark = pytest.mark.slow  # two hundred cases each
BOS, EOS, FIRST_ID = 1, 2, 3

# Numbers of ids of each document; where the stream is cut into files; and how a step is split.
documents = st.lists(st.integers(0, 23), min_size=1, max_size=12)
cuts = st.sets(st.integers(1, 60), max_size=4)
layouts = st.tuples(st.integers(1, 5), st.integers(1, 3), st.integers(1, 3))
always = settings(deadline=None, database=None, derandomize=True, max_examples=200)


def texts_of(lengths: list[int]) -> list[list[int]]:
    """Documents of so many ids, no two of which are equal."""
    ends = np.cumsum([FIRST_ID, *lengths])
    return [list(range(end - length, end)) for end, length in zip(ends[1:], lengths, strict=True)]


def write(folder: Path, ids: list[int], places: set[int]) -> TokenStream:
    """The ids as a stream of one file or several."""
    files = []
    for number, part in enumerate(
        np.split(np.array(ids), sorted(p for p in places if p < len(ids)))
    ):
        path = folder / f"train-{number:05}.bin"
        part.astype("<u2").tofile(path)
        files.append(TokenFile(path, DTYPES["uint16"]))
    return TokenStream(files)


def epoch(samples: Samples, layout: tuple[int, int, int]) -> list[tuple[list[int], list[int]]]:
    """Ids and labels of all rows that the ranks of a run of one epoch get."""
    size, accumulate, world = layout
    steps = -(-len(samples) // (size * accumulate * world))
    samples.end = len(samples)
    found = []
    for rank in range(world):
        batches = StepBatches(
            start=0, max_steps=steps, accumulate=accumulate, rank=rank, world_size=world,
            micro_batch_size=size, first_sample=0,
        )  # fmt: skip
        for numbers in batches:
            batch = samples.__getitems__(numbers)
            found += zip(batch["input_ids"].tolist(), batch["labels"].tolist(), strict=True)
    return found


def targets(found: list[tuple[list[int], list[int]]]) -> Counter[int]:
    return Counter(label for _, labels in found for label in labels[1:] if label != -100)


@always
@given(documents, cuts, layouts, st.integers(1, 9), st.sampled_from(["none", "put in", "stored"]),
       st.sampled_from([0, EOS]), st.integers(0, 99))  # fmt: skip
def test_split_rows_learn_every_token_once(lengths, places, layout, seq_len, bos, pad, seed):
    texts, lead = texts_of(lengths), [BOS] if bos != "none" else []
    wholes = [[*lead, *text, EOS] for text in texts]
    learned = Counter(chain.from_iterable(whole[1:] for whole in wholes))
    if not learned:
        return
    specials = Specials(eos=EOS, bos=BOS if lead else None, bos_stored=bos == "stored", pad=pad)
    stored = wholes if bos == "stored" else [[*text, EOS] for text in texts]
    with tempfile.TemporaryDirectory() as name:
        stream = write(Path(name), list(chain.from_iterable(stored)), places)
        docs = Path(name, "train.docs.npy")
        np.save(docs, np.cumsum([0, *map(len, stored)]))
        rows = Rows(stream, docs, seq_len, "split", specials, seed)
        found = epoch(rows, layout)
    assert targets(found) == learned
    assert sum(learned.values()) == rows.n_targets
    for ids, labels in found:
        check_row(ids, labels, wholes, pad)


def check_row(ids: list[int], labels: list[int], wholes: list[list[int]], pad: int) -> None:
    """A row is a run of one document, or nothing; bos begins the first run, eos ends the last."""
    real = [label for label in labels if label != -100]
    assert labels == [*real, *[-100] * (len(labels) - len(real))]
    assert ids[: len(real)] == real
    assert set(ids[len(real) :]) <= {pad if real else 0}
    if real:
        assert any(
            real == whole[at : at + len(real)] for whole in wholes for at in range(len(whole))
        )
        assert real.count(BOS) == (real[0] == BOS)
        assert real.count(EOS) == (real[-1] == EOS)


@always
@given(documents, layouts, st.integers(2, 9), st.booleans(), st.integers(0, 99))
def test_truncated_rows_lose_only_what_they_say(lengths, layout, seq_len, with_bos, seed):
    texts, lead = texts_of(lengths), [BOS] if with_bos else []
    room = seq_len - len(lead)
    wholes = [[*lead, *text[:room], EOS] for text in texts]
    learned = Counter(chain.from_iterable(whole[1:] for whole in wholes))
    if not learned:
        return
    stored = [[*text, EOS] for text in texts]
    with tempfile.TemporaryDirectory() as name:
        stream = write(Path(name), list(chain.from_iterable(stored)), set())
        docs = Path(name, "train.docs.npy")
        np.save(docs, np.cumsum([0, *map(len, stored)]))
        specials = Specials(eos=EOS, bos=BOS if with_bos else None)
        rows = Rows(stream, docs, seq_len, "truncate", specials, seed)
        found, lines = epoch(rows, layout), rows.start_lines
    assert targets(found) == learned
    lost = sum(max(0, len(text) - room) for text in texts)
    assert len(lines) == 1 + (lost > 0)
    assert not lost or f": {lost:,} of {sum(lengths):,} tokens" in lines[1]


@always
@given(st.integers(2, 200), cuts, layouts, st.integers(1, 20), st.integers(0, 99))
def test_windows_learn_every_token_once_but_the_tail_they_tell(n, places, layout, seq_len, seed):
    if n <= seq_len:
        return
    with tempfile.TemporaryDirectory() as name:
        windows = Windows(write(Path(name), list(range(n)), places), seq_len, seed)
        found, [line] = epoch(windows, layout), windows.start_lines
    n_windows = (n - 1) // seq_len
    assert targets(found) == Counter(range(1, n_windows * seq_len + 1))
    tail = n - 1 - n_windows * seq_len
    assert (f"({tail} at the end are in none)" in line) == (tail > 0)
    assert windows.tail == tail
