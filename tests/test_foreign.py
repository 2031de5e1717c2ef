"""Token files that others made: found by their names, read as they are, or refused."""

import re
from pathlib import Path

import numpy as np
import pytest

from data.tokens.foreign import find_files, open_files

LLM_C = {"uint16": 20240520, "uint32": 20240801}


def counting(n: int, vocab: int = 50) -> np.ndarray:
    return np.arange(n) % vocab


def raw(path: Path, ids: np.ndarray, dtype: str = "<u2") -> Path:
    path.write_bytes(np.asarray(ids).astype(dtype).tobytes())
    return path


def llm_c(
    path: Path, ids: np.ndarray, dtype: str = "uint16", version: int = 1, count: int | None = None
) -> Path:
    header = np.zeros(256, "<i4")
    header[:3] = LLM_C[dtype], version, len(ids) if count is None else count
    tokens = ids.astype(f"<u{2 if dtype == 'uint16' else 4}")
    path.write_bytes(header.tobytes() + tokens.tobytes())
    return path


def npy(path: Path, ids: np.ndarray, dtype: str = "<u2") -> Path:
    np.save(path, np.asarray(ids).astype(dtype))
    return path


def read(path: Path, dtype: str | None = None, vocab_size: int = 64) -> list[int]:
    """All ids of the training stream that a path names."""
    stream = open_files(find_files(str(path)), dtype, vocab_size)["train"]
    out = np.empty(stream.n_tokens, dtype=np.int64)
    stream.copy(0, out)
    return out.tolist()


def names(path: Path | str) -> dict[str, list[str]]:
    return {split: [file.name for file in files] for split, files in find_files(str(path)).items()}


def refused(text: str):
    return pytest.raises(ValueError, match=re.escape(text))


@pytest.fixture
def touch(tmp_path: Path):
    def make(*files: str) -> Path:
        for name in files:
            raw(tmp_path / name, counting(20))
        return tmp_path

    return make


# Which files


def test_folder_of_nanogpt_holds_train_and_val(touch):
    folder = touch("train.bin", "val.bin", "meta.pkl", "test.bin", "train.bin.max_id.json")
    assert names(folder) == {"train": ["train.bin"], "val": ["val.bin"]}


def test_shards_are_read_in_the_order_of_their_numbers(touch):
    shards = [f"fineweb_train_{number}.bin" for number in (9, 10, 100)]
    folder = touch("fineweb_val_0.bin", *reversed(shards))
    assert names(folder) == {"train": shards, "val": ["fineweb_val_0.bin"]}


def test_pattern_finds_the_validation_files_beside_it(touch):
    folder = touch("a_train_0.bin", "a_train_1.bin", "a_val_0.bin", "b_train_0.bin", "b_val_0.bin")
    found = names(f"{folder}/a_train_*.bin")
    assert found == {"train": ["a_train_0.bin", "a_train_1.bin"], "val": ["a_val_0.bin"]}


def test_file_finds_its_validation_file_beside_it(touch):
    assert names(touch("train.bin", "val.bin") / "train.bin")["val"] == ["val.bin"]


def test_file_whose_name_says_nothing_is_trained_on(touch):
    assert names(touch("tokens.bin") / "tokens.bin") == {"train": ["tokens.bin"], "val": []}


def test_name_with_brackets_is_no_pattern(touch):
    assert names(touch("train[1].bin") / "train[1].bin")["train"] == ["train[1].bin"]


def test_word_inside_another_says_no_split(touch):
    folder = touch("constraint.bin", "values.bin")
    with refused(f"data.path {folder} names no token file to train on; it must name a folder made"):
        find_files(str(folder))


def test_pattern_that_matches_nothing_is_refused(tmp_path):
    with refused(f"data.path {tmp_path}/*_train.bin names no token file to train on"):
        find_files(f"{tmp_path}/*_train.bin")


def test_file_that_says_no_split_beside_those_that_do_is_refused(touch):
    folder = touch("train.bin", "val.bin", "test.bin")
    with refused(
        f"data.path {folder}/*.bin takes in {folder}/test.bin, whose name says neither train nor "
        "val; narrow the pattern or rename the file"
    ):
        find_files(f"{folder}/*.bin")


def test_two_kinds_of_files_are_not_taken_for_one_text(touch):
    folder = touch("train.bin", "train.npy")
    with refused(
        f"data.path {folder} takes in {folder}/train.bin and {folder}/train.npy, files of two "
        "kinds, perhaps of the same text; name one kind by a pattern, such as"
    ):
        find_files(str(folder))


# nanoGPT: no header


def test_uint16_is_proved_by_ids_that_uint32_would_not_have(tmp_path):
    assert read(raw(tmp_path / "train.bin", counting(200))) == counting(200).tolist()


def test_uint16_is_proved_by_a_size_that_uint32_cannot_have(tmp_path):
    assert read(raw(tmp_path / "train.bin", counting(3)), vocab_size=1 << 31) == [0, 1, 2]


def test_uint32_is_proved_by_every_second_uint16_being_zero(tmp_path):
    assert read(raw(tmp_path / "train.bin", counting(200), "<u4")) == counting(200).tolist()


def test_every_file_counts_in_the_proof(tmp_path):
    raw(tmp_path / "train.bin", np.zeros(8))
    raw(tmp_path / "val.bin", counting(200))
    assert read(tmp_path) == [0] * 8


@pytest.mark.parametrize("ids", [np.zeros(8), np.array([5, 0] * 4)], ids=["zeros", "few"])
def test_type_that_content_leaves_open_must_be_named(tmp_path, ids):
    path = raw(tmp_path / "train.bin", ids)
    with refused(
        f"{path} does not tell its type, and its content fits uint16 and uint32: say which by "
        "data.dtype"
    ):
        read(path)
    assert read(path, "uint16") == ids.tolist()


def test_uint32_is_proved_by_upper_halves_that_are_small(tmp_path):
    path = raw(tmp_path / "train.bin", counting(200, 70_000) + 65_400, "<u4")
    assert read(path, vocab_size=70_000)[-1] == 65_599


def test_named_type_against_the_content_is_refused(tmp_path):
    path = raw(tmp_path / "train.bin", counting(200), "<u4")
    with refused(
        f"{path} looks like uint32 (every second uint16 is 0 or small) but is read as uint16: "
        "name dtype uint32 or prepare the data again"
    ):
        read(path, "uint16")


def test_uint16_named_uint32_is_refused(tmp_path):
    path = raw(tmp_path / "train.bin", counting(200))
    with refused(
        f"{path} looks like uint16 (all ids are below vocab_size 64) but is read as uint32, which "
        "has larger ones: set data.dtype uint16"
    ):
        read(path, "uint32")


@pytest.mark.parametrize("largest", [50, 128_256, 1_000_000])
@pytest.mark.parametrize("dtype", [None, "uint16"])
@pytest.mark.parametrize("kept", [slice(-2), slice(2, None)], ids=["end", "begin"])
def test_uint32_ids_cut_by_two_bytes_are_not_read_as_uint16(tmp_path, largest, dtype, kept):
    path = raw(tmp_path / "train.bin", np.linspace(0, largest - 1, 500), "<u4")
    path.write_bytes(path.read_bytes()[kept])
    with refused(
        f"{path} looks like uint32 (every second uint16 is 0 or small) but has 1998 bytes, no "
        "multiple of 4: truncated; copy it again"
    ):
        read(path, dtype, vocab_size=largest)


def test_unknown_type_is_refused_with_the_allowed_names(tmp_path):
    with refused("data.dtype is 'uint23': must be one of uint16, uint32"):
        read(raw(tmp_path / "train.bin", counting(200)), "uint23")


def test_broken_last_id_is_refused(tmp_path):
    path = raw(tmp_path / "train.bin", counting(200))
    path.write_bytes(path.read_bytes() + b"x")
    with refused(f"{path} has 401 bytes, no multiple of item size 2 (uint16): truncated or other"):
        read(path)


def test_empty_file_is_refused(tmp_path):
    (tmp_path / "train.bin").touch()
    with refused(f"{tmp_path}/train.bin is empty (0 tokens)"):
        read(tmp_path)


# llm.c and modded-nanogpt


@pytest.mark.parametrize(("dtype", "version"), [("uint16", 1), ("uint32", 7), ("uint32", 1)])
def test_header_of_llm_c_is_no_token(tmp_path, dtype, version):
    path = llm_c(tmp_path / "train.bin", counting(200), dtype, version)
    assert read(path, vocab_size=60_000) == counting(200).tolist()


def test_shards_of_llm_c_are_one_stream(tmp_path):
    for number, part in enumerate(np.split(counting(200), [77, 130])):
        llm_c(tmp_path / f"x_train_{number}.bin", part)
    assert read(tmp_path) == counting(200).tolist()


@pytest.mark.parametrize("count", [199, 201, -1])
def test_header_that_tells_another_count_is_refused(tmp_path, count):
    path = llm_c(tmp_path / "train.bin", counting(200), count=count)
    with refused(
        f"{path} has 1424 bytes, but its llm.c header (magic 20240520) tells of {count} tokens of "
        f"uint16, which is {1024 + 2 * count}: truncated or damaged; copy it again"
    ):
        read(path)


def test_cut_off_header_is_refused(tmp_path):
    path = llm_c(tmp_path / "train.bin", counting(200))
    path.write_bytes(path.read_bytes()[:700])
    with refused("(magic 20240520) but has 700 bytes, less than the header's 1024: truncated"):
        read(path)


def test_header_of_another_version_is_refused(tmp_path):
    path = llm_c(tmp_path / "train.bin", counting(200), "uint32", version=2)
    with refused(
        f"{path} has an llm.c header (magic 20240801) of version 2: must be 7 or 1; write it again "
        "by llm.c's own scripts"
    ):
        read(path)


def test_header_without_tokens_is_refused(tmp_path):
    with refused("train.bin is empty (0 tokens): write it again or leave it out"):
        read(llm_c(tmp_path / "train.bin", counting(0)))


# .npy


@pytest.mark.parametrize("dtype", ["u1", "<u2", ">u2", "<u4", ">u4", "<i4", ">i8", "<u8"])
def test_array_of_any_whole_type_and_byte_order_is_read_exactly(tmp_path, dtype):
    assert read(npy(tmp_path / "train.npy", counting(200), dtype)) == counting(200).tolist()


@pytest.mark.parametrize("kind", [npy, llm_c])
def test_named_type_against_the_header_is_refused(tmp_path, kind):
    path = kind(tmp_path / f"train.{'npy' if kind is npy else 'bin'}", counting(200))
    with refused(f"{path} is uint16 by its header, but data.dtype is uint32: leave data.dtype out"):
        read(path, "uint32")
    assert len(read(path, "uint16")) == 200


def test_array_of_two_dimensions_is_refused(tmp_path):
    path = npy(tmp_path / "train.npy", counting(20).reshape(4, 5))
    with refused(
        f"{path} holds an array of shape (4, 5): must have one dimension; flatten it by "
        "np.save('train.npy', np.load('train.npy').ravel())"
    ):
        read(path)


@pytest.mark.parametrize("dtype", ["<f4", "?"])
def test_array_of_no_whole_numbers_is_refused(tmp_path, dtype):
    path = npy(tmp_path / "train.npy", counting(20), dtype)
    name = np.dtype(dtype).name
    with refused(f"{path} holds {name}: token ids are whole numbers; save it as np.uint16 or"):
        read(path)


def test_empty_array_is_refused(tmp_path):
    with refused("train.npy is empty (0 tokens): write it again or leave it out"):
        read(npy(tmp_path / "train.npy", counting(0)))
    (tmp_path / "train.npy").write_bytes(b"")
    with refused("train.npy is empty (0 tokens): write it again or leave it out"):
        read(tmp_path)


@pytest.mark.parametrize("cut", [9, 100, 300])
def test_cut_off_array_is_refused(tmp_path, cut):
    path = npy(tmp_path / "train.npy", counting(200))
    path.write_bytes(path.read_bytes()[:cut])
    with refused(f"{path} is no whole .npy file ("):
        read(path)


def test_bytes_after_an_array_are_refused(tmp_path):
    path = npy(tmp_path / "train.npy", counting(200))
    path.write_bytes(path.read_bytes() + b"12345")
    with refused(f"{path} has 5 bytes after its 200 tokens: damaged; copy it again"):
        read(path)


def test_pickled_objects_are_refused_and_not_run(tmp_path):
    np.save(tmp_path / "train.npy", np.array([{}, []], dtype=object), allow_pickle=True)
    with refused(
        f"{tmp_path / 'train.npy'} holds Python objects: token ids are whole numbers; save it as "
        "np.uint16 or np.uint32"
    ):
        read(tmp_path)


def test_npy_of_olmo_has_no_header_and_is_read_by_another_name(tmp_path):
    path = raw(tmp_path / "part-0-train.npy", counting(200))
    with refused(
        f"{path} does not begin with the header of a .npy file: copy it again if it is damaged; "
        "name it .bin if it holds nothing but ids, as OLMo writes them"
    ):
        read(path)
    assert read(path.rename(path.with_suffix(".bin"))) == counting(200).tolist()


def test_npz_named_npy_is_refused(tmp_path):
    np.savez(tmp_path / "train.npz", counting(200))
    path = (tmp_path / "train.npz").rename(tmp_path / "train.npy")
    with refused(f"{path} is a zip archive, or what torch.save or np.savez wrote by its content"):
        read(path)


def test_array_under_another_ending_is_known_by_its_begin(tmp_path):
    npy(tmp_path / "x.npy", counting(200)).rename(tmp_path / "train.bin")
    assert read(tmp_path / "train.bin") == counting(200).tolist()
