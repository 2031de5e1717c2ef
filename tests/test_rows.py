"""Rows of documents: exact ids and labels, and what a document leaves out."""

import pickle
import re
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, default_convert

from data.rows import Rows, Specials
from data.tokens.memmap import DTYPES, TokenFile, TokenStream
from lm.config import ModelConfig
from lm.model import LM

PLAIN = Specials(eos=2)
WITH_BOS = Specials(eos=2, bos=1)
STORED_BOS = Specials(eos=2, bos=1, bos_stored=True)


def flat(lists: list[list[int]]) -> list[int]:
    return list(chain.from_iterable(lists))


def prepared(
    folder: Path, texts: list[list[int]], specials: Specials
) -> tuple[TokenStream, Path, Specials]:
    """Documents as prepare writes them: ids, eos; bos before them only where it is stored."""
    first = [specials.bos] if specials.bos_stored else []
    documents = [[*first, *text, specials.eos] for text in texts]
    path, docs = folder / "train.bin", folder / "train.docs.npy"
    np.array(flat(documents), "<u2").tofile(path)
    np.save(docs, np.cumsum([0, *map(len, documents)]))
    return TokenStream([TokenFile(path, DTYPES["uint16"])]), docs, specials


def rows_of(
    folder: Path, texts: list[list[int]], seq_len: int, kind: Any, specials: Specials, **order: Any
) -> Rows:
    stream, docs, specials = prepared(folder, texts, specials)
    return Rows(stream, docs, seq_len, kind, specials, **order)


def in_order(rows: Rows) -> list[tuple[list[int], list[int]]]:
    """Ids and labels of each row, by its place in the data."""
    samples = np.argsort(rows.places(np.arange(len(rows))))
    batch = rows.__getitems__(samples.tolist())
    return list(zip(batch["input_ids"].tolist(), batch["labels"].tolist(), strict=True))


def targets(rows: Rows) -> list[list[int]]:
    return [[label for label in labels[1:] if label != -100] for _, labels in in_order(rows)]


# Exact rows


@pytest.mark.parametrize("kind", ["split", "truncate"])
@pytest.mark.parametrize("specials", [WITH_BOS, STORED_BOS], ids=["bos put in", "bos stored"])
def test_short_document_is_padded_to_the_published_row(tmp_path, kind, specials):
    [row] = in_order(rows_of(tmp_path, [[456, 789]], 7, kind, specials))
    assert row == ([1, 456, 789, 2, 0, 0, 0, 0], [1, 456, 789, 2, -100, -100, -100, -100])


@pytest.mark.parametrize("kind", ["split", "truncate"])
def test_document_of_a_tokenizer_without_bos_is_padded_to_the_published_row(tmp_path, kind):
    [row] = in_order(rows_of(tmp_path, [[3, 8, 15]], 5, kind, PLAIN))
    assert row == ([3, 8, 15, 2, 0, 0], [3, 8, 15, 2, -100, -100])


@pytest.mark.parametrize("specials", [WITH_BOS, STORED_BOS], ids=["bos put in", "bos stored"])
def test_long_document_is_split_into_rows_that_overlap_by_one_id(tmp_path, specials):
    rows = rows_of(tmp_path, [list(range(10, 18))], 4, "split", specials)
    assert [ids for ids, _ in in_order(rows)] == [
        [1, 10, 11, 12, 13],
        [13, 14, 15, 16, 17],
        [17, 2, 0, 0, 0],
    ]
    assert targets(rows) == [[10, 11, 12, 13], [14, 15, 16, 17], [2]]


def test_document_that_fills_its_rows_leaves_no_empty_one(tmp_path):
    rows = rows_of(tmp_path, [[10, 11, 12, 13]], 4, "split", PLAIN)
    assert targets(rows) == [[11, 12, 13, 2]]


@pytest.mark.parametrize("specials", [WITH_BOS, STORED_BOS], ids=["bos put in", "bos stored"])
def test_truncated_document_keeps_bos_and_eos(tmp_path, specials):
    rows = rows_of(tmp_path, [list(range(10, 18)), [20]], 4, "truncate", specials)
    assert [ids for ids, _ in in_order(rows)] == [[1, 10, 11, 12, 2], [1, 20, 2, 0, 0]]


def test_truncated_document_without_bos_keeps_one_id_more(tmp_path):
    rows = rows_of(tmp_path, [list(range(10, 18))], 4, "truncate", PLAIN)
    assert in_order(rows)[0] == ([10, 11, 12, 13, 2], [10, 11, 12, 13, 2])


def test_document_of_a_thousand_ids_is_split_without_loss(tmp_path):
    rows = rows_of(tmp_path, [list(range(3, 1003))], 16, "split", WITH_BOS)
    assert len(rows) == 63
    assert flat(targets(rows)) == [*range(3, 1003), 2]


@pytest.mark.parametrize(("bos", "expected"), [(None, [6, 2, 2]), (1, [5, 6, 2, 7, 2])])
def test_eos_is_a_target_though_it_is_the_padding_too(tmp_path, bos, expected):
    rows = rows_of(tmp_path, [[5, 6], [7]], 4, "split", Specials(eos=2, bos=bos, pad=2))
    assert flat(targets(rows)) == expected
    assert {row[0][-1] for row in in_order(rows)} == {2}


def test_first_eos_is_a_target_and_padding_of_the_same_id_is_none(tmp_path):
    [row] = in_order(rows_of(tmp_path, [[5, 6]], 4, "split", Specials(eos=2, pad=2)))
    assert row == ([5, 6, 2, 2, 2], [5, 6, 2, -100, -100])


def test_document_without_a_second_id_makes_no_row(tmp_path):
    rows = rows_of(tmp_path, [[], [5, 6], []], 4, "split", PLAIN)
    assert targets(rows) == [[6, 2]]


def test_rows_cross_the_borders_of_files(tmp_path):
    stream, docs, _ = prepared(tmp_path, [list(range(10, 18)), [20, 21]], WITH_BOS)
    ids = np.fromfile(tmp_path / "train.bin", "<u2")
    files = []
    for number, part in enumerate(np.split(ids, [3, 8, 10])):
        part.tofile(tmp_path / f"{number}.bin")
        files.append(TokenFile(tmp_path / f"{number}.bin", DTYPES["uint16"]))
    whole, cut = (Rows(s, docs, 4, "split", WITH_BOS) for s in (stream, TokenStream(files)))
    assert in_order(whole) == in_order(cut)


# Order


def test_each_epoch_takes_every_row_in_another_order(tmp_path):
    rows = rows_of(tmp_path, [list(range(3, 40)), [5], [6, 7]], 4, "split", WITH_BOS, seed=3)
    first, second = rows.places(np.arange(2 * len(rows))).reshape(2, -1)
    assert sorted(first) == sorted(second) == list(range(12))
    assert (first != second).any()


def test_fixed_rows_do_not_depend_on_the_seed(tmp_path):
    texts, samples = [list(range(3, 40))], np.arange(10)
    one, other = (
        rows_of(tmp_path, texts, 4, "split", WITH_BOS, seed=seed, order="fixed").places(samples)
        for seed in (1, 2)
    )
    assert (one == other).all()


def test_sample_past_the_end_is_a_row_without_targets(tmp_path):
    rows = rows_of(tmp_path, [[5, 6]], 4, "split", Specials(eos=2, pad=9), order="fixed")
    batch = rows.__getitems__([0, 1])
    assert batch["input_ids"].tolist() == [[5, 6, 2, 9, 9], [0] * 5]
    assert batch["labels"].tolist() == [[5, 6, 2, -100, -100], [-100] * 5]


def test_row_is_described_by_its_document(tmp_path):
    rows = rows_of(tmp_path, [[5, 6], list(range(10, 18))], 4, "split", PLAIN, order="fixed")
    [sample] = np.flatnonzero(rows.places(np.arange(3)) == 2).tolist()
    assert rows.describe(sample) == (
        f"document 1 ({tmp_path}/train.bin from token 3 on), row 2 of 2"
    )


def _batches(rows: Rows, workers: int) -> torch.Tensor:
    loader = DataLoader(
        rows,
        batch_sampler=[[0, 3, 9], [1, 2, 8]],
        num_workers=workers,
        collate_fn=default_convert,
        multiprocessing_context="spawn" if workers else None,
    )
    return torch.stack([torch.cat((b["input_ids"], b["labels"])) for b in loader])


@pytest.mark.slow
def test_spawned_workers_give_the_same_rows(tmp_path):
    rows = rows_of(tmp_path, [list(range(3, 40)), [5], [6, 7]], 4, "split", WITH_BOS, seed=3)
    assert torch.equal(_batches(rows, 2), _batches(rows, 0))


def test_rows_in_use_pickle_small_and_open_their_files_anew(tmp_path):
    rows = rows_of(tmp_path, [[5, 6]] * 50_000, 4, "split", WITH_BOS)
    before = rows.__getitems__([7, 49_999])["input_ids"]
    pickled = pickle.dumps(rows)
    assert len(pickled) < 10_000
    assert torch.equal(pickle.loads(pickled).__getitems__([7, 49_999])["input_ids"], before)


# What is said and refused


def test_start_line_counts_targets_and_padding(tmp_path):
    rows = rows_of(tmp_path, [list(range(10, 18)), [20]], 4, "split", WITH_BOS)
    assert rows.start_lines == [
        f"data: {tmp_path}/train.bin (uint16): 2 documents in 4 rows of 4: 11 targets, "
        "31.2% padding"
    ]


@pytest.mark.parametrize("specials", [WITH_BOS, STORED_BOS], ids=["bos put in", "bos stored"])
def test_truncation_warns_of_the_share_that_is_lost(tmp_path, specials):
    rows = rows_of(tmp_path, [list(range(10, 18)), [20, 21]], 4, "truncate", specials)
    assert rows.start_lines[1:] == [
        "warning: data.rows truncate cuts 1 of 2 documents at data.seq_len 4: 5 of 10 tokens "
        "(50.0%) are never trained on; data.rows split loses none"
    ]
    assert sum(map(len, targets(rows))) == rows.n_targets == 7


def test_truncation_that_loses_nothing_does_not_warn(tmp_path):
    assert len(rows_of(tmp_path, [[20, 21]], 4, "truncate", WITH_BOS).start_lines) == 1


def refused(text: str):
    return pytest.raises(ValueError, match=re.escape(text))


def test_row_without_room_for_text_is_refused(tmp_path):
    with refused(
        "data.seq_len is 1: rows of data.rows truncate need at least 2, or no text would be left "
        "between the special ids"
    ):
        rows_of(tmp_path, [[5, 6]], 1, "truncate", WITH_BOS)


@pytest.mark.parametrize(("order", "what"), [("shuffled", "rows"), ("fixed", "validation batches")])
def test_documents_without_a_target_are_refused(tmp_path, order, what):
    with refused(
        f"train.bin holds 2 tokens, but no document with a second id to learn, which is 0 {what}; "
        "give more data"
    ):
        rows_of(tmp_path, [[], []], 4, "split", PLAIN, order=order)


@pytest.mark.parametrize(
    "offsets",
    [[0, 3, 6], [1, 7], [0, 3, 3, 7], [0, 5, 3, 7], [[0, 7]], [0.0, 7.0], [7]],
    ids=["short", "begin", "empty document", "not rising", "two dimensions", "floats", "one"],
)
def test_offsets_of_another_stream_are_refused(tmp_path, offsets):
    stream, docs, specials = prepared(tmp_path, [[5, 6], [7, 8, 9]], PLAIN)
    np.save(docs, offsets)
    with refused(
        f"{docs} holds no offsets of documents from 0 up to the 7 tokens of {stream.name}: "
        "prepare the data again"
    ):
        Rows(stream, docs, 4, "split", specials)


def test_document_that_does_not_end_with_eos_is_refused(tmp_path):
    stream, docs, specials = prepared(tmp_path, [[5, 6], [7, 8, 9]], PLAIN)
    np.save(docs, [0, 4, 7])
    with refused(
        f"{docs}: document 0 ends at token 3 of {stream.name} with id 7, not with eos 2: prepare "
        "the data again"
    ):
        Rows(stream, docs, 4, "split", specials)


def test_damaged_offsets_are_refused(tmp_path):
    stream, docs, specials = prepared(tmp_path, [[5, 6]], PLAIN)
    docs.write_bytes(docs.read_bytes()[:-3])
    with refused(f"{docs} is damaged ("):
        Rows(stream, docs, 4, "split", specials)


# In the network


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_padding_changes_no_logit_of_a_real_position(tmp_path, dtype):
    config = ModelConfig(
        vocab_size=30, d_model=12, n_layers=2, n_heads=3, ffn_dim=10, max_seq_len=16, init_std=0.2
    )
    model = LM(config).to(dtype)
    batch = rows_of(tmp_path, [[5], list(range(3, 18))], 16, "split", WITH_BOS).__getitems__([0, 1])
    ids = batch["input_ids"][:, :-1]
    logits = model.model(ids) @ model.head_weight.T
    assert logits.isfinite().all()
    for row, n_real in enumerate((batch["labels"] != -100).sum(dim=1).tolist()):
        n_real = min(n_real, 16)
        alone = model.model(ids[row : row + 1, :n_real]) @ model.head_weight.T
        tolerance = 1e-5 if dtype == torch.float32 else 2e-2
        torch.testing.assert_close(logits[row, :n_real], alone[0], rtol=tolerance, atol=tolerance)
