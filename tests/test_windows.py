"""Windows over a stream of tokens, by the number of a sample."""

import pickle

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, default_convert

from data.order import step_samples
from data.tokens.memmap import TokenStream, open_token_file
from data.windows import Windows


def _cycle(folder, n, vocab):
    """A stream of n ids that count 0 … vocab - 1 round and round."""
    path = folder / "t.bin"
    (np.arange(n) % vocab).astype("<u2").tofile(path)
    return TokenStream([open_token_file(path)])


def _anonymous_mb():
    with open("/proc/self/status", encoding="utf-8") as status:
        return int(status.read().split("RssAnon:")[1].split()[0]) / 1024


def _batches(windows, workers):
    batches = [
        step_samples(step, 0, 0, micro_batch_size=3, accumulate=1, world_size=1).tolist()
        for step in range(5)
    ]
    loader = DataLoader(
        windows,
        batch_sampler=batches,
        num_workers=workers,
        collate_fn=default_convert,
        multiprocessing_context="spawn" if workers else None,
    )
    return torch.stack([batch["input_ids"] for batch in loader])


def test_windows_make_every_token_but_the_first_a_target_once(tmp_path):
    windows = Windows(_cycle(tmp_path, 33, 64), 16)
    batch = windows.__getitems__([0, 1])
    rows = sorted(batch["input_ids"].tolist())
    assert len(windows) == 2
    assert rows == [list(range(17)), list(range(16, 33))]
    assert batch["input_ids"].dtype == torch.int64
    assert (batch["labels"] == batch["input_ids"]).all()


@pytest.mark.parametrize(
    ("n", "order", "rest"),
    [
        (33, "shuffled", "33 tokens in 2 windows of 16"),
        (40, "shuffled", "40 tokens in 2 windows of 16 (7 at the end are in none)"),
        (1033, "random", "1,033 tokens in windows of 16 that start anywhere"),
    ],
)
def test_start_line_tells_the_tail_that_is_left_out(tmp_path, n, order, rest):
    windows = Windows(_cycle(tmp_path, n, 64), 16, order=order)
    assert windows.start_lines == [f"data: {tmp_path}/t.bin (uint16): {rest}"]


def test_sample_is_described_by_its_file_and_offset(tmp_path):
    windows = Windows(_cycle(tmp_path, 1700, 64), 16, order="fixed")
    [start] = windows.starts(np.array([9])).tolist()
    assert windows.describe(9) == f"{tmp_path}/t.bin from token {start:,} on"


def test_random_windows_start_anywhere_they_fit(tmp_path):
    windows = Windows(_cycle(tmp_path, 33, 64), 16, order="random")
    assert sorted(set(windows.starts(np.arange(400)).tolist())) == list(range(17))
    assert windows.__getitems__(range(400))["input_ids"].max() == 32


def test_window_holds_the_ids_at_its_start(tmp_path):
    windows = Windows(_cycle(tmp_path, 100, 64), 7, seed=3)
    firsts = windows.__getitems__([5, 20, 31])["input_ids"][:, 0].tolist()
    assert firsts == (windows.starts(np.array([5, 20, 31])) % 64).tolist()


def test_each_epoch_takes_every_window_in_another_order(tmp_path):
    windows = Windows(_cycle(tmp_path, 100, 64), 7, seed=3)
    first, second = windows.starts(np.arange(28)).reshape(2, 14)
    assert sorted(first) == sorted(second) == list(range(0, 98, 7))
    assert (first != second).any()


def test_fixed_windows_do_not_depend_on_the_seed(tmp_path):
    stream, samples = _cycle(tmp_path, 100, 64), np.arange(14)
    fixed = [Windows(stream, 7, seed=seed, order="fixed").starts(samples) for seed in (1, 2)]
    assert (fixed[0] == fixed[1]).all()
    assert sorted(fixed[0]) == list(range(0, 98, 7))


def test_sample_past_the_fixed_windows_is_a_row_without_targets(tmp_path):
    windows = Windows(_cycle(tmp_path, 33, 64), 16, order="fixed")
    batch = windows.__getitems__([1, 2, 900])
    assert (batch["labels"][0] == batch["input_ids"][0]).all()
    assert (batch["labels"][1:] == -100).all()
    assert (batch["input_ids"][1:] == 0).all()


@pytest.mark.parametrize(
    ("order", "what"),
    [("shuffled", "windows"), ("random", "windows"), ("fixed", "validation batches")],
)
def test_file_shorter_than_a_window_is_refused(tmp_path, order, what):
    message = rf"t\.bin holds 10 tokens, which is 0 {what} at data\.seq_len 16: .* at least 17;"
    with pytest.raises(ValueError, match=message):
        Windows(_cycle(tmp_path, 10, 50), 16, order=order)


def test_file_of_exactly_one_window_is_enough(tmp_path):
    windows = Windows(_cycle(tmp_path, 17, 50), 16, order="random")
    assert len(windows) == 1
    assert windows.starts(np.arange(9)).tolist() == [0] * 9


def test_windows_in_use_pickle_small_and_open_their_file_anew(tmp_path):
    windows = Windows(_cycle(tmp_path, 200_001, 50), 16, seed=3)
    batch = windows.__getitems__([4, 8])["input_ids"]
    pickled = pickle.dumps(windows)
    assert len(pickled) < 10_000
    assert (pickle.loads(pickled).__getitems__([4, 8])["input_ids"] == batch).all()


def test_batch_is_handed_on_whole_by_a_loader(tmp_path):
    windows = Windows(_cycle(tmp_path, 200, 50), 16, seed=3)
    assert (_batches(windows, 0)[2] == windows.__getitems__([6, 7, 8])["input_ids"]).all()


def test_spawned_workers_give_the_same_batches(tmp_path):
    windows = Windows(_cycle(tmp_path, 200, 50), 16, seed=3)
    assert (_batches(windows, 2) == _batches(windows, 0)).all()


def test_reading_a_large_file_leaves_our_own_memory_as_it_is(tmp_path):
    path = tmp_path / "t.bin"
    with path.open("wb") as file:
        file.truncate(512 << 20)
    windows = Windows(TokenStream([open_token_file(path)]), 512, order="random")
    windows.__getitems__(range(8))
    before = _anonymous_mb()
    for batch in range(2000):
        windows.__getitems__(range(8 * batch, 8 * batch + 8))
    assert _anonymous_mb() - before < 20


# Several files


def _shards(folder, n, *cuts):
    """A stream that counts up to n, cut into files."""
    files = []
    for begin, end in zip([0, *cuts], [*cuts, n], strict=True):
        path = folder / f"train-{begin:05}.bin"
        np.arange(begin, end).astype("<u2").tofile(path)
        files.append(open_token_file(path))
    return TokenStream(files)


@pytest.mark.parametrize("order", ["shuffled", "random", "fixed"])
def test_shards_give_the_windows_of_one_file(tmp_path, order):
    whole, cut = _cycle(tmp_path, 200, 999), _shards(tmp_path, 200, 3, 50, 61)
    samples = range(40)
    one, other = (Windows(s, 16, 3, order).__getitems__(samples) for s in (whole, cut))
    assert torch.equal(one["input_ids"], other["input_ids"])
    assert torch.equal(one["labels"], other["labels"])


@pytest.mark.slow
def test_spawned_workers_read_shards_too(tmp_path):
    windows = Windows(_shards(tmp_path, 200, 50, 61), 16, seed=3)
    assert (_batches(windows, 2) == _batches(windows, 0)).all()
