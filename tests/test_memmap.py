"""Token files as they lie on disk: what is read, and what is refused."""

import json
import pickle
from itertools import pairwise

import numpy as np
import pytest

from data.tokens import memmap
from data.tokens.memmap import (
    TokenFile,
    TokenStream,
    check_token_range,
    content_fingerprint,
    open_token_file,
)


def _file(folder, ids, dtype="<u2", name="t.bin"):
    (folder / name).write_bytes(np.asarray(ids).astype(dtype).tobytes())
    return folder / name


def _cycle(folder, n, vocab):
    """A file of n ids that count 0 … vocab - 1 round and round."""
    return _file(folder, np.arange(n) % vocab)


@pytest.mark.parametrize(("dtype", "item"), [("uint16", "<u2"), ("uint32", "<u4")])
def test_tokens_are_the_ids_that_were_written(tmp_path, dtype, item):
    file = open_token_file(_file(tmp_path, [5, 300, 7], item), dtype)
    assert (file.n_tokens, file.map().tolist()) == (3, [5, 300, 7])
    assert file.dtype == np.dtype(item)


def test_tokens_cannot_be_written_to(tmp_path):
    file = open_token_file(_cycle(tmp_path, 9, 5))
    with pytest.raises(ValueError, match="read-only"):
        file.map()[0] = 1


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


@pytest.mark.parametrize("ids", [[0] * 80, [5, 0] * 15], ids=["zeros", "a few words of one token"])
def test_zeros_are_not_taken_for_wide_ids(tmp_path, ids):
    assert open_token_file(_file(tmp_path, ids)).n_tokens == len(ids)


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
    path, cache = _cycle(tmp_path, 200, 50), tmp_path / "t.bin.max_id.json"
    assert check_token_range(open_token_file(path), 50) == 49
    known = json.loads(cache.read_text(encoding="utf-8"))
    cache.write_text(json.dumps(known | {"max_id": 48}), encoding="utf-8")
    assert check_token_range(open_token_file(path), 50) == 48


def test_zeros_in_long_runs_are_counted_once(tmp_path):
    ids = np.concatenate([np.ones(5000), np.zeros(10_000), np.ones(9)])
    file = open_token_file(path := _file(tmp_path, ids))
    again = open_token_file(path)  # reads what the first one kept
    assert (file.zero_ids, again.zero_ids, check_token_range(again, 50)) == (4096, 4096, 1)


def test_scan_that_cannot_be_kept_is_not_repeated(tmp_path):
    file = open_token_file(_cycle(tmp_path, 200, 50))
    (tmp_path / "t.bin.max_id.json").mkdir()
    assert check_token_range(file, 50) == 49
    file.path.unlink()  # a second scan would fail
    assert (file.zero_ids, check_token_range(file, 50)) == (0, 49)


def test_cache_of_an_older_version_tells_of_no_zeros(tmp_path):
    file, cache = open_token_file(_cycle(tmp_path, 200, 50)), tmp_path / "t.bin.max_id.json"
    check_token_range(file, 50)
    content = json.loads(cache.read_text(encoding="utf-8"))
    del content["zeros"]
    cache.write_text(json.dumps(content), encoding="utf-8")
    assert open_token_file(file.path).zero_ids == 0


@pytest.mark.parametrize("known", [None, "49", 49.0, -1, True, 1e400])
def test_cached_maximum_that_is_no_id_is_not_trusted(tmp_path, known):
    path, cache = _cycle(tmp_path, 200, 50), tmp_path / "t.bin.max_id.json"
    file = open_token_file(path)
    assert check_token_range(file, 50) == 49
    content = json.loads(cache.read_text(encoding="utf-8"))
    cache.write_text(json.dumps(content | {"max_id": known}), encoding="utf-8")
    assert check_token_range(file, 50) == 49


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"max_id": 3}', "\ufeff"])
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


@pytest.mark.parametrize("dtype", ["<i2", ">i4", "<i8"])
def test_negative_id_is_refused(tmp_path, dtype):
    path = _file(tmp_path, [5, 3, -1, 64], dtype)
    with pytest.raises(ValueError, match=r"t\.bin holds id -1 at offset 2: ids must be 0 or more;"):
        check_token_range(TokenFile(path, np.dtype(dtype)), 64)


@pytest.mark.parametrize("dtype", ["u1", ">u2", "<i4", ">i8"])
def test_largest_id_is_found_whatever_the_type(tmp_path, dtype):
    path = _file(tmp_path, [5, 63, 3], dtype)
    assert check_token_range(TokenFile(path, np.dtype(dtype)), 64) == 63


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


# Several files as one


def _stream(folder, *sizes, dtypes=("<u2", ">u4", "u1")):
    """Files of these sizes and mixed types that together count 0, 1, 2 …"""
    ends = np.cumsum([0, *sizes])
    files = []
    for i, (begin, end) in enumerate(pairwise(ends)):
        dtype = dtypes[i % len(dtypes)]
        path = _file(folder, np.arange(begin, end), dtype, f"part{i}.bin")
        files.append(TokenFile(path, np.dtype(dtype)))
    return TokenStream(files)


def _read(stream, offset, count):
    out = np.full(count, -1)
    stream.copy(offset, out)
    return out.tolist()


@pytest.mark.parametrize("count", [1, 4, 9, 23])
def test_run_of_ids_crosses_the_borders_of_files(tmp_path, count):
    stream = _stream(tmp_path, 7, 1, 15)
    assert stream.n_tokens == 23
    for offset in range(23 - count + 1):
        assert _read(stream, offset, count) == list(range(offset, offset + count))


def test_offset_is_told_in_its_own_file(tmp_path):
    stream = _stream(tmp_path, 7, 1, 15)
    places = [(path.name, offset) for path, offset in map(stream.locate, (0, 6, 7, 8, 22))]
    expected = [("part0.bin", 0), ("part0.bin", 6), ("part1.bin", 0), ("part2.bin", 0)]
    assert places == [*expected, ("part2.bin", 14)]


def test_label_names_the_first_file_and_how_many_follow(tmp_path):
    assert _stream(tmp_path, 7).label == f"{tmp_path}/part0.bin (uint16)"
    assert _stream(tmp_path, 7, 1, 15).label == f"{tmp_path}/part0.bin and 2 more (uint16)"


def test_stream_in_use_pickles_small_and_opens_its_files_anew(tmp_path):
    stream = _stream(tmp_path, 70_000, 50_000, dtypes=("<u4",))
    before = _read(stream, 69_990, 20)
    pickled = pickle.dumps(stream)
    assert len(pickled) < 10_000
    assert _read(pickle.loads(pickled), 69_990, 20) == before


def test_more_files_than_are_held_open_are_read_all_the_same(tmp_path, monkeypatch):
    monkeypatch.setattr(memmap, "MOST_MAPPED", 2)
    stream = _stream(tmp_path, 3, 3, 3, 3, 3)
    assert _read(stream, 0, 15) == _read(stream, 0, 15) == list(range(15))
    assert len(stream._mapped) == 2
