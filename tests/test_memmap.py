import json
import pickle

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, default_convert

from data import memmap
from data.memmap import Windows, check_token_range, content_fingerprint, open_token_file
from data.order import step_samples


def _file(folder, ids, dtype="<u2", name="t.bin"):
    (folder / name).write_bytes(np.asarray(ids).astype(dtype).tobytes())
    return folder / name


def _cycle(folder, n, vocab):
    """A file of n ids that count 0 … vocab - 1 round and round."""
    return _file(folder, np.arange(n) % vocab)


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


@pytest.mark.parametrize(("dtype", "item"), [("uint16", "<u2"), ("uint32", "<u4")])
def test_tokens_are_the_ids_that_were_written(tmp_path, dtype, item):
    file = open_token_file(_file(tmp_path, [5, 300, 7], item), dtype)
    assert (file.n_tokens, file.tokens.tolist()) == (3, [5, 300, 7])
    assert file.dtype == np.dtype(item)


def test_tokens_cannot_be_written_to(tmp_path):
    file = open_token_file(_cycle(tmp_path, 9, 5))
    with pytest.raises(ValueError, match="read-only"):
        file.tokens[0] = 1


def test_missing_file_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"gone\.bin does not exist: prepare the data"):
        open_token_file(tmp_path / "gone.bin")


def test_empty_file_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"t\.bin is empty \(0 tokens\)"):
        open_token_file(_file(tmp_path, []))


@pytest.mark.parametrize(
    ("dtype", "item", "n_bytes"), [("uint16", 2, 401), ("uint32", 4, 402), ("uint32", 4, 401)]
)
def test_file_of_a_broken_item_is_refused(tmp_path, dtype, item, n_bytes):
    path = tmp_path / "t.bin"
    path.write_bytes(b"\1" * n_bytes)
    message = rf"t\.bin has {n_bytes} bytes, .* item size {item} .*truncated or other dtype"
    with pytest.raises(ValueError, match=message):
        open_token_file(path, dtype)


@pytest.mark.parametrize("magic", [20240520, 20240801])
def test_llm_c_header_is_refused(tmp_path, magic):
    header = np.zeros(256, "<i4")
    header[:3] = magic, 1, 200
    path = tmp_path / "t.bin"
    path.write_bytes(header.tobytes() + np.arange(200, dtype="<u2").tobytes())
    with pytest.raises(ValueError, match=rf"t\.bin .* llm\.c header \(magic {magic}\).*convert it"):
        open_token_file(path)


def test_unknown_dtype_is_refused_with_the_allowed_names(tmp_path):
    with pytest.raises(ValueError, match="dtype is 'uint23': must be one of uint16, uint32"):
        open_token_file(_cycle(tmp_path, 9, 5), "uint23")


def test_wide_ids_named_narrow_are_refused(tmp_path):
    with pytest.raises(ValueError, match="looks like uint32"):
        open_token_file(_file(tmp_path, np.arange(200) % 50, "<u4"), "uint16")


def test_file_of_zeros_is_not_taken_for_wide_ids(tmp_path):
    assert open_token_file(_file(tmp_path, [0] * 8)).n_tokens == 8


def test_id_without_embedding_is_refused(tmp_path):
    ids = np.arange(200) % 64
    ids[[150, 170]] = 64, 99
    message = (
        r"t\.bin holds id 64 at offset 150, the largest is 99: .* vocab_size 64 .*never clamped"
    )
    with pytest.raises(ValueError, match=message):
        check_token_range(open_token_file(_file(tmp_path, ids)), 64)


def test_bad_id_is_found_in_any_chunk(tmp_path, monkeypatch):
    monkeypatch.setattr(memmap, "CHUNK", 8)
    ids = np.ones(40)
    ids[33] = 9
    with pytest.raises(ValueError, match="id 9 at offset 33"):
        check_token_range(open_token_file(_file(tmp_path, ids)), 5)


def test_largest_id_is_scanned_once(tmp_path):
    path = _cycle(tmp_path, 200, 50)
    assert check_token_range(open_token_file(path), 50) == 49
    again = open_token_file(path)
    assert check_token_range(again, 50) == 49
    assert "tokens" not in vars(again)


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"max_id": 3}'])
def test_damaged_cache_of_the_range_is_made_anew(tmp_path, content):
    cache = tmp_path / "t.bin.max_id.json"
    cache.write_text(content, encoding="utf-8")
    assert check_token_range(open_token_file(_cycle(tmp_path, 200, 50)), 50) == 49
    assert json.loads(cache.read_text(encoding="utf-8"))["max_id"] == 49


def test_changed_file_is_scanned_again(tmp_path):
    check_token_range(open_token_file(_cycle(tmp_path, 200, 50)), 50)
    with pytest.raises(ValueError, match="id 50 at offset 50"):
        check_token_range(open_token_file(_cycle(tmp_path, 200, 60)), 50)


def test_folder_that_takes_no_cache_is_no_error(tmp_path):
    (tmp_path / "t.bin.max_id.json").mkdir()
    assert check_token_range(open_token_file(_cycle(tmp_path, 200, 50)), 50) == 49
    assert not list(tmp_path.glob("*.tmp"))


@pytest.mark.parametrize("place", [0, 5_000, 123_456, 262_143])
def test_fingerprint_covers_every_byte_of_a_small_file(tmp_path, place):
    path = tmp_path / "t.bin"
    path.write_bytes(bytes(262_144))
    before = content_fingerprint(path)
    with path.open("r+b") as file:
        file.seek(place)
        file.write(b"\1")
    assert content_fingerprint(path) != before


def test_fingerprint_sees_a_byte_cut_off(tmp_path):
    assert content_fingerprint(_file(tmp_path, [0] * 9)) != content_fingerprint(
        _file(tmp_path, [0] * 8)
    )


def test_windows_make_every_token_but_the_first_a_target_once(tmp_path):
    windows = Windows(open_token_file(_cycle(tmp_path, 33, 64)), 16)
    batch = windows.__getitems__([0, 1])
    rows = sorted(batch["input_ids"].tolist())
    assert len(windows) == 2
    assert rows == [list(range(17)), list(range(16, 33))]
    assert batch["input_ids"].dtype == torch.int64
    assert (batch["labels"] == batch["input_ids"]).all()


def test_random_windows_start_anywhere_they_fit(tmp_path):
    windows = Windows(open_token_file(_cycle(tmp_path, 33, 64)), 16, order="random")
    assert len(windows) == 17
    assert sorted(set(windows.starts(range(400)).tolist())) == list(range(17))
    assert windows.__getitems__(range(400))["input_ids"].max() == 32


def test_window_holds_the_ids_at_its_start(tmp_path):
    windows = Windows(open_token_file(_cycle(tmp_path, 100, 64)), 7, seed=3)
    firsts = windows.__getitems__([5, 20, 31])["input_ids"][:, 0].tolist()
    assert firsts == (windows.starts([5, 20, 31]) % 64).tolist()


def test_each_epoch_takes_every_window_in_another_order(tmp_path):
    windows = Windows(open_token_file(_cycle(tmp_path, 100, 64)), 7, seed=3)
    first, second = windows.starts(range(28)).reshape(2, 14)
    assert sorted(first) == sorted(second) == list(range(0, 98, 7))
    assert (first != second).any()


def test_fixed_windows_do_not_depend_on_the_seed(tmp_path):
    file = open_token_file(_cycle(tmp_path, 100, 64))
    fixed = [Windows(file, 7, seed=seed, order="fixed").starts(range(14)) for seed in (1, 2)]
    assert (fixed[0] == fixed[1]).all()
    assert sorted(fixed[0]) == list(range(0, 98, 7))


def test_sample_past_the_fixed_windows_is_a_row_without_targets(tmp_path):
    windows = Windows(open_token_file(_cycle(tmp_path, 33, 64)), 16, order="fixed")
    batch = windows.__getitems__([1, 2, 900])
    assert windows.starts([2, 900]).tolist() == [-1, -1]
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
        Windows(open_token_file(_cycle(tmp_path, 10, 50)), 16, order=order)


def test_file_of_exactly_one_window_is_enough(tmp_path):
    windows = Windows(open_token_file(_cycle(tmp_path, 17, 50)), 16, order="random")
    assert (len(windows), windows.n_windows) == (1, 1)


def test_windows_in_use_pickle_small_and_open_their_file_anew(tmp_path):
    windows = Windows(open_token_file(_cycle(tmp_path, 200_001, 50)), 16, seed=3)
    batch = windows.__getitems__([4, 8])["input_ids"]
    pickled = pickle.dumps(windows)
    assert len(pickled) < 10_000
    assert (pickle.loads(pickled).__getitems__([4, 8])["input_ids"] == batch).all()


def test_batch_is_handed_on_whole_by_a_loader(tmp_path):
    windows = Windows(open_token_file(_cycle(tmp_path, 200, 50)), 16, seed=3)
    assert (_batches(windows, 0)[2] == windows.__getitems__([6, 7, 8])["input_ids"]).all()


def test_spawned_workers_give_the_same_batches(tmp_path):
    windows = Windows(open_token_file(_cycle(tmp_path, 200, 50)), 16, seed=3)
    assert (_batches(windows, 2) == _batches(windows, 0)).all()


def test_reading_a_large_file_leaves_our_own_memory_as_it_is(tmp_path):
    path = tmp_path / "t.bin"
    with path.open("wb") as file:
        file.truncate(512 << 20)
    windows = Windows(open_token_file(path), 512, order="random")
    windows.__getitems__(range(8))
    before = _anonymous_mb()
    for batch in range(2000):
        windows.__getitems__(range(8 * batch, 8 * batch + 8))
    assert _anonymous_mb() - before < 20
