import json
from pathlib import Path

import numpy as np
import pytest

from data import prepare
from data.tokenizer import TextTokenizer, train_bpe

VAL_NAME = "doc292.py"
"""A name whose hash falls in the validation share."""
TEXTS = {
    "a.py": b"ab\n",
    "b.py": "x = 'λ漢'\n".encode(),
    "bad.py": b"x = '\xff'\n",
    "empty.py": b"",
    "eos.py": b"'<|endoftext|>'\n",
    VAL_NAME: b"def f(x):\n    return x\n",
}


@pytest.fixture
def sources(tmp_path, monkeypatch):
    """A folder whose files are the corpus "tiny"."""
    folder = tmp_path / "sources"
    folder.mkdir()
    for name, content in TEXTS.items():
        (folder / name).write_bytes(content)
    monkeypatch.setattr(
        prepare, "python_files", lambda _: sorted((p.name, p) for p in folder.iterdir())
    )
    monkeypatch.setattr(prepare, "describe", lambda name: {"name": name, "versions": {}})
    return folder


@pytest.fixture
def output(sources, tmp_path):
    """A prepared folder."""
    prepare.prepare_corpus("tiny", tmp_path / "out", 270, progress=False)
    return tmp_path / "out"


def _documents(output, split):
    """The texts of a token file, told apart by its separators."""
    ids = np.fromfile(output / f"{split}.bin", "<u2").tolist()
    text = TextTokenizer.load(output / "tokenizer.json").decode([i for i in ids if i])
    return text, ids.count(0), ids[-1]


def _change_meta(output, **changes):
    path = output / "meta.json"
    meta = json.loads(path.read_text(encoding="utf-8")) | changes
    path.write_text(json.dumps(meta), encoding="utf-8")


def test_prepared_folder_holds_the_four_files_and_no_other(output):
    assert sorted(p.name for p in output.iterdir()) == sorted(prepare.FILES)
    assert prepare.missing_files(output) == []


def test_every_document_is_written_and_ends_with_one_eos(output):
    text = b"".join(TEXTS[name] for name in ("a.py", "b.py", "eos.py")).decode("utf-8")
    assert _documents(output, "train") == (text, 3, 0)
    assert _documents(output, "val") == (TEXTS[VAL_NAME].decode("utf-8"), 1, 0)


def test_meta_counts_what_was_written_and_what_was_skipped(output):
    meta = prepare.load_meta(output)
    counts = {key: meta["train"][key] for key in ("documents", "eos", "empty", "undecodable")}
    assert counts == {"documents": 3, "eos": 3, "empty": 1, "undecodable": 1}
    assert meta["train"]["bytes"] == sum(len(TEXTS[n]) for n in ("a.py", "b.py", "eos.py"))
    assert meta["train"]["tokens"] * 2 == (output / "train.bin").stat().st_size


def test_meta_describes_the_tokens(output):
    meta = prepare.load_meta(output)
    tokenizer = TextTokenizer.load(output / "tokenizer.json")
    assert (meta["dtype"], meta["byte_order"], meta["special_ids"]) == (
        "uint16",
        "little",
        {"eos": 0},
    )
    assert meta["vocab_size"] == tokenizer.size == len(meta["token_bytes"])
    assert meta["tokenizer_fingerprint"] == tokenizer.fingerprint
    assert meta["corpus"] == {"name": "tiny", "versions": {}}


def test_meta_is_what_the_call_returns(sources, tmp_path):
    returned = prepare.prepare_corpus("tiny", tmp_path / "out", 270, progress=False)
    assert prepare.load_meta(tmp_path / "out") == returned


def test_same_corpus_gives_the_same_files(output, sources, tmp_path):
    prepare.prepare_corpus("tiny", tmp_path / "again", 270, progress=False)
    again = [(tmp_path / "again" / name).read_bytes() for name in prepare.FILES]
    assert again == [(output / name).read_bytes() for name in prepare.FILES]


def test_about_two_percent_of_names_are_validation():
    assert sum(prepare.is_validation(f"{i}.py") for i in range(10_000)) == pytest.approx(
        200, rel=0.2
    )


def test_one_line_a_stage_where_there_is_no_terminal(sources, tmp_path, capsys):
    prepare.prepare_corpus("tiny", tmp_path / "out", 270)
    lines = ["train tokenizer: 5 documents", "encode train: 5 documents", "encode val: 1 documents"]
    assert capsys.readouterr() == ("", "\n".join(lines) + "\n")


def test_small_batches_write_the_same_tokens(output, sources, tmp_path, monkeypatch):
    monkeypatch.setattr(prepare, "BATCH_CHARACTERS", 1)
    prepare.prepare_corpus("tiny", tmp_path / "again", 270, progress=False)
    assert (tmp_path / "again/train.bin").read_bytes() == (output / "train.bin").read_bytes()


def test_leftover_of_a_killed_run_is_removed(output, sources):
    (output / "val.bin.tmp").write_bytes(b"half")
    prepare.prepare_corpus("tiny", output, 270, progress=False)
    assert not list(output.glob("*.tmp"))


def test_failed_run_leaves_the_older_set_and_no_temporary_file(output, sources):
    before = (output / "train.bin").read_bytes()
    with pytest.raises(ValueError, match="at least 257"):
        prepare.prepare_corpus("tiny", output, 256, progress=False)
    assert (output / "train.bin").read_bytes() == before
    assert sorted(p.name for p in output.iterdir()) == sorted(prepare.FILES)


def test_death_while_files_are_replaced_leaves_no_meta(output, sources, monkeypatch):
    def killed(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(prepare.os, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        prepare.prepare_corpus("tiny", output, 270, progress=False)
    assert prepare.missing_files(output) == ["meta.json"]


@pytest.mark.parametrize(
    ("gone", "split"), [([VAL_NAME], "val"), ([n for n in TEXTS if n != VAL_NAME], "train")]
)
def test_split_without_a_document_is_refused(sources, tmp_path, gone, split):
    for name in gone:
        (sources / name).unlink()
    with pytest.raises(ValueError, match=f"'tiny': its {split} part has 0 documents / 0 tokens"):
        prepare.prepare_corpus("tiny", tmp_path / "out", 270, progress=False)


def test_split_of_empty_documents_is_refused(sources, tmp_path):
    (sources / VAL_NAME).write_bytes(b"")
    with pytest.raises(ValueError, match="'tiny': its val part has 0 documents / 0 tokens"):
        prepare.prepare_corpus("tiny", tmp_path / "out", 270, progress=False)
    assert list((tmp_path / "out").iterdir()) == []


@pytest.mark.parametrize(("n_ids", "dtype"), [(65_536, "uint16"), (65_537, "uint32")])
def test_type_is_the_narrowest_that_holds_every_id(n_ids, dtype):
    assert prepare.token_dtype(n_ids) == dtype


def test_wide_ids_are_written_little_endian(tmp_path):
    ids = np.array([5, 69_999])
    assert prepare.narrow(ids, "uint32", tmp_path).tobytes().hex() == "050000006f110100"


def test_id_that_would_wrap_is_refused():
    with pytest.raises(
        ValueError, match=r"t\.bin: id 69999 does not fit uint16, .* below 65536: write uint32"
    ):
        prepare.narrow(np.array([5, 69_999]), "uint16", Path("t.bin"))


def test_tokens_written_are_the_texts_and_one_eos_each(tmp_path):
    tokenizer = train_bpe([], 257)
    counts = prepare.write_tokens(iter(["ab", "λ"]), tokenizer, tmp_path / "t.bin", "uint16")
    assert counts == {"tokens": 6, "documents": 2, "eos": 2, "bytes": 4}
    assert np.fromfile(tmp_path / "t.bin", "<u2")[[2, 5]].tolist() == [0, 0]


def test_missing_meta_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"meta\.json does not exist: prepare the data again"):
        prepare.load_meta(tmp_path)


@pytest.mark.parametrize("content", [b'{"format": 1', b"\xff"])
def test_damaged_meta_is_refused(tmp_path, content):
    (tmp_path / "meta.json").write_bytes(content)
    with pytest.raises(ValueError, match=r"meta\.json is damaged"):
        prepare.load_meta(tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"train": {"tokens": 1}}, "lacks train.bytes, train.documents, train.fingerprint"),
        ({"val": 3}, "lacks val.bytes, val.documents, val.fingerprint, val.tokens"),
        ({"format": 2}, r"format is 2, must be in \[1\]"),
        ({"dtype": "uint23"}, r"dtype is 'uint23', must be in \['uint16', 'uint32'\]"),
        ({"byte_order": "big"}, r"byte_order is 'big', must be in \['little'\]"),
    ],
)
def test_meta_that_cannot_be_trusted_is_refused(output, changes, message):
    _change_meta(output, **changes)
    with pytest.raises(ValueError, match=rf"meta\.json:? {message}: prepare the data again"):
        prepare.load_meta(output)


def test_meta_of_no_keys_is_refused(tmp_path):
    (tmp_path / "meta.json").write_text("[]", encoding="utf-8")
    with pytest.raises(ValueError, match="lacks byte_order, corpus, dtype, format"):
        prepare.load_meta(tmp_path)


def test_prepared_folder_passes_its_check(output):
    prepare.check_files(output, prepare.load_meta(output))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (
            "train.bin",
            b"\1\0",
            r"train\.bin has 2 bytes, meta\.json says \d+ \(\d+ tokens of uint16\)",
        ),
        ("tokenizer.json", None, r"out lacks tokenizer\.json"),
    ],
)
def test_file_of_another_size_or_none_is_refused(output, name, content, message):
    meta = prepare.load_meta(output)
    (output / name).unlink()
    if content is not None:
        (output / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        prepare.check_files(output, meta)


def test_file_of_the_same_size_but_other_content_is_refused(output):
    path = output / "val.bin"
    path.write_bytes(path.read_bytes()[:-2] + b"\7\0")
    with pytest.raises(ValueError, match=r"val\.bin has other content than meta\.json says"):
        prepare.check_files(output, prepare.load_meta(output))


def test_other_tokenizer_is_refused(output):
    train_bpe(["other"], 260).save(output / "tokenizer.json")
    with pytest.raises(ValueError, match=r"tokenizer\.json is another tokenizer"):
        prepare.check_files(output, prepare.load_meta(output))
