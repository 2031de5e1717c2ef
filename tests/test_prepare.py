"""Raw text to token files: what is written, what is refused, and what a kill costs."""

import gzip
import json
import os
import random
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from conftest import Lightning
from hypothesis import HealthCheck, given, settings, strategies

from data.prepare import encode, prepare, work
from data.prepare.prepare import Settings, prepare_files
from data.prepare.summary import summary
from data.prepare.texts import ReadOptions
from data.prepare.vocabulary import train_bpe
from data.text.tokenizer import TextTokenizer
from data.tokens.folder import FILES, check_files, load_meta, missing_files
from data.tokens.memmap import content_fingerprint

ROOT = Path(__file__).resolve().parent.parent
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
A, EOS, BOS = 4, 2, 1
"""Ids of the tokenizer `tok`, whose letters are a = 4, b = 5, …"""


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


@pytest.fixture
def tok(tmp_path):
    """A tokenizer.json of letters: pad 0, bos 1, eos 2, unk 3, a to z from 4 on."""
    names = ["<pad>", "<bos>", "<eos>", "<unk>"]
    vocab = {name: i for i, name in enumerate([*names, *map(chr, range(97, 123))])}
    model = {"type": "BPE", "vocab": vocab, "merges": [], "unk_token": "<unk>"}
    added = [
        {"id": i, "content": name, "special": True, "normalized": False}
        | dict.fromkeys(("single_word", "lstrip", "rstrip"), False)
        for i, name in enumerate(names)
    ]
    content = {"version": "1.0", "model": model, "decoder": None, "added_tokens": added}
    (tmp_path / "tok.json").write_text(json.dumps(content), encoding="utf-8")
    return tmp_path / "tok.json"


@pytest.fixture
def make(tmp_path, tok):
    """Factory: prepares the content of files by name; returns what `meta.json` holds.

    Validates on a file of one row, "z", unless told otherwise. Replaces an older set.
    """

    def run(files: dict[str, bytes], overwrite=True, **changes) -> dict:
        options = {"tokenizer": str(tok), "val_input": [str(tmp_path / "val.jsonl")], **changes}
        for name, content in {"val.jsonl": b'{"text":"z"}', **files}.items():
            path = tmp_path / name
            if not path.is_file() or path.read_bytes() != content:
                path.write_bytes(content)
        names = [str(tmp_path / name) for name in files]
        settings = Settings(**options)
        return prepare_files(names, tmp_path / "o", settings, overwrite=overwrite, progress=False)

    return run


def _ids(folder: Path, split: str = "train", dtype: str = "<u2") -> list[int]:
    meta = load_meta(folder)
    return [i for name in meta[split]["files"] for i in np.fromfile(folder / name, dtype).tolist()]


def _offsets(folder: Path, split: str = "train") -> list[int]:
    return np.load(folder / f"{split}.docs.npy").tolist()


def _names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def _files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def _rows(*texts: str) -> bytes:
    return "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()


def _documents(output, split):
    """The texts of a token file, told apart by its separators."""
    ids = _ids(output, split)
    text = TextTokenizer.load(output / "tokenizer.json").decode([i for i in ids if i])
    return text, ids.count(0), ids[-1]


def _change_meta(output, **changes):
    path = output / "meta.json"
    meta = json.loads(path.read_text(encoding="utf-8")) | changes
    path.write_text(json.dumps(meta), encoding="utf-8")


# The corpora of the package


def test_prepared_folder_holds_its_files_and_no_other(output):
    assert _names(output) == sorted(FILES)
    assert missing_files(output) == []
    check_files(output, load_meta(output))


def test_every_document_is_written_and_ends_with_one_eos(output):
    text = b"".join(TEXTS[name] for name in ("a.py", "b.py", "eos.py")).decode("utf-8")
    assert _documents(output, "train") == (text, 3, 0)
    assert _documents(output, "val") == (TEXTS[VAL_NAME].decode("utf-8"), 1, 0)


def test_meta_counts_what_was_written_and_what_was_left_out(output):
    meta = load_meta(output)
    assert {key: meta["train"][key] for key in ("documents", "eos")} == {"documents": 3, "eos": 3}
    assert meta["left_out"] == {"empty text": 1, "undecodable file": 1}
    assert meta["train"]["bytes"] == sum(len(TEXTS[n]) for n in ("a.py", "b.py", "eos.py"))
    assert meta["train"]["tokens"] * 2 == (output / "train.bin").stat().st_size
    named = [(source["name"], source["documents"]) for source in meta["sources"]["train"]]
    assert named == [("a.py", 1), ("b.py", 1), ("eos.py", 1)]


def test_meta_describes_the_tokens(output):
    meta = load_meta(output)
    tokenizer = TextTokenizer.load(output / "tokenizer.json")
    described = (meta["dtype"], meta["byte_order"], meta["special_ids"], meta["bos_stored"])
    assert described == ("uint16", "little", {"eos": 0}, False)
    assert meta["vocab_size"] == tokenizer.size == len(meta["token_bytes"])
    assert meta["tokenizer_fingerprint"] == tokenizer.fingerprint
    assert meta["corpus"] == {"name": "tiny", "versions": {}}
    assert meta["train"]["files"] == ["train.bin"]


def test_meta_is_what_the_call_returns(sources, tmp_path):
    returned = prepare.prepare_corpus("tiny", tmp_path / "out", 270, progress=False)
    assert load_meta(tmp_path / "out") == returned


def test_same_corpus_gives_the_same_files(output, sources, tmp_path):
    prepare.prepare_corpus("tiny", tmp_path / "again", 270, progress=False)
    assert _files(tmp_path / "again") == _files(output)


def test_set_that_is_whole_is_taken_where_it_may_be(output, sources):
    before = (output / "meta.json").stat().st_mtime_ns
    assert prepare.prepare_corpus("tiny", output, 999, made_already=True) == load_meta(output)
    assert (output / "meta.json").stat().st_mtime_ns == before


def test_about_two_percent_of_names_are_validation():
    assert sum(prepare.is_validation(f"{i}.py") for i in range(10_000)) == pytest.approx(
        200, rel=0.2
    )


def test_small_batches_write_the_same_tokens(output, sources, tmp_path, monkeypatch):
    monkeypatch.setattr(encode, "BATCH_BYTES", 1)
    prepare.prepare_corpus("tiny", tmp_path / "again", 270, progress=False)
    assert _files(tmp_path / "again") == _files(output)


def test_failed_run_leaves_the_older_set_and_no_work(output, sources):
    before = _files(output)
    with pytest.raises(ValueError, match="at least 257"):
        prepare.prepare_corpus("tiny", output, 256, overwrite=True, progress=False)
    assert _files(output) == before


@pytest.mark.parametrize(
    ("gone", "split", "left_out", "others"),
    [
        ([VAL_NAME], "val", "1 undecodable file, 2 empty text", 3),
        (["a.py", "b.py", "eos.py"], "train", "4 empty text, 1 undecodable file", 1),
    ],
)
def test_split_without_a_document_is_refused(sources, tmp_path, gone, split, left_out, others):
    for name in gone:
        (sources / name).write_bytes(b"")
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        prepare.prepare_corpus("tiny", tmp_path / "out", 270, progress=False)
    assert str(caught.value) == (
        f"corpus 'tiny': its {split} part has 0 documents / 0 tokens ({left_out}), the "
        f"other all {others}: use a larger corpus"
    )
    assert _names(tmp_path / "out") == []


@pytest.mark.slow
def test_standard_library_is_prepared_as_it_always_was(tmp_path):
    folder = ROOT / "corpora" / "stdlib-2k"
    if not folder.is_dir():
        pytest.skip("there is no older set to compare with")
    old, new = load_meta(folder), prepare.prepare_corpus("stdlib", tmp_path, 2048, progress=False)
    if old["corpus"] != new["corpus"]:
        pytest.skip("the older set is of another Python")
    for key in ("tokenizer_fingerprint", "token_bytes", "special_ids", "dtype"):
        assert new[key] == old[key]
    assert [new[s]["fingerprint"] for s in work.SPLITS] == [
        old[s]["fingerprint"] for s in work.SPLITS
    ]


# Documents to ids


def test_documents_end_with_one_eos_and_are_found_by_their_offsets(make, tmp_path):
    make({"s19.jsonl": _rows("ab", "c")})
    assert _ids(tmp_path / "o") == [A, A + 1, EOS, A + 2, EOS]
    assert _offsets(tmp_path / "o") == [0, 3, 5]
    assert (_ids(tmp_path / "o", "val"), _offsets(tmp_path / "o", "val")) == ([A + 25, EOS], [0, 2])


def test_bos_is_stored_where_asked_for(make, tmp_path):
    meta = make({"s19.jsonl": _rows("ab", "c")}, bos=True)
    assert _ids(tmp_path / "o") == [BOS, A, A + 1, EOS, BOS, A + 2, EOS]
    assert (_offsets(tmp_path / "o"), meta["bos_stored"]) == ([0, 4, 7], True)
    assert meta["special_ids"] == {"eos": 2, "bos": 1, "pad": 0}


def test_long_document_is_written_whole(make):
    assert make({"s20.jsonl": _rows("a" * 1000)})["train"]["tokens"] == 1001


def test_mark_line_ends_and_compression_change_no_byte(make, tmp_path):
    rows = _rows("abc", "de", "f")
    make({"a.jsonl": rows})
    plain = _ids(tmp_path / "o")
    marked, crlf = b"\xef\xbb\xbf" + rows, rows.replace(b"\n", b"\r\n")
    for content in (marked, crlf, rows.rstrip(), gzip.compress(rows)):
        make({"a.jsonl": content})
        assert _ids(tmp_path / "o") == plain
    assert plain == [4, 5, 6, 2, 7, 8, 2, 9, 2]


def test_blank_lines_and_empty_texts_are_counted(make):
    meta = make({"c.jsonl": b'{"text":"ab"}\r\n\r\n{"text":"cd"}\r\n\n{"text":""}\n{"text":"e"}'})
    assert meta["left_out"] == {"blank line": 2, "empty text": 1}
    assert meta["train"]["documents"] == 3


def test_null_is_never_the_word_none(make, tmp_path):
    rows = b'{"text":null}\n{"text":""}\n{"text":"ab"}\n'
    meta = make({"a.jsonl": rows}, on_bad_row="skip")
    assert _ids(tmp_path / "o") == [A, A + 1, EOS]
    assert meta["left_out"] == {"field that is no text": 1, "empty text": 1}


def test_wide_vocabulary_is_written_as_uint32(make, tmp_path):
    vocab = {f"w{i}": i for i in range(69_999)} | {"</s>": 69_999}
    model = {"type": "WordLevel", "vocab": vocab, "unk_token": "w0"}
    text = json.dumps({"model": model, "decoder": None, "pre_tokenizer": {"type": "Whitespace"}})
    (tmp_path / "wide.json").write_text(text, encoding="utf-8")
    wide = {"tokenizer": str(tmp_path / "wide.json")}
    assert make({"a.jsonl": _rows("w5 w69998")}, **wide)["dtype"] == "uint32"
    assert _ids(tmp_path / "o", dtype="<u4") == [5, 69_998, 69_999]
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        make({"a.jsonl": _rows("w5")}, **wide, dtype="uint16")
    assert str(caught.value) == (
        f"--dtype is uint16, whose ids are below 65536, but {tmp_path / 'wide.json'} has vocab "
        "size 70000: leave --dtype out or give uint32"
    )


def test_dtype_may_be_wider_than_needed(make, tmp_path):
    assert make({"a.jsonl": _rows("ab")}, dtype="uint32")["dtype"] == "uint32"
    assert _ids(tmp_path / "o", dtype="<u4") == [A, A + 1, EOS]


def test_names_of_special_tokens_may_be_given(make, tmp_path):
    meta = make({"a.jsonl": _rows("ab")}, eos="z", pad="<eos>")
    assert _ids(tmp_path / "o") == [A, A + 1, A + 25]
    assert meta["special_ids"] == {"eos": 29, "bos": 1, "pad": 2}
    assert TextTokenizer.load(tmp_path / "o" / "tokenizer.json").eos_id == 29


@pytest.mark.parametrize(("n_ids", "dtype"), [(65_536, "uint16"), (65_537, "uint32")])
def test_type_is_the_narrowest_that_holds_every_id(n_ids, dtype):
    assert prepare.token_dtype(n_ids) == dtype


def test_wide_ids_are_written_little_endian(tmp_path):
    ids = np.array([5, 69_999])
    assert work.narrow(ids, np.dtype("<u4"), tmp_path).tobytes().hex() == "050000006f110100"


def test_id_that_would_wrap_is_refused():
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        work.narrow(np.array([5, 69_999]), np.dtype("<u2"), Path("t.bin"))
    assert str(caught.value) == (
        "t.bin: id 69999 does not fit uint16, whose ids are below 65536: write uint32"
    )


@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    texts=strategies.lists(strategies.text(max_size=9), min_size=1, max_size=7),
    shard=strategies.none() | strategies.integers(1, 40),
    batch=strategies.sampled_from([1, 9, 1 << 20]),
    bos=strategies.booleans(),
    ascii_only=strategies.booleans(),
)
def test_any_texts_are_found_again(
    make, monkeypatch, tmp_path, texts, shard, batch, bos, ascii_only
):
    monkeypatch.setattr(encode, "BATCH_BYTES", batch)
    rows = "\n".join(json.dumps({"text": text}, ensure_ascii=ascii_only) for text in [*texts, "x"])
    meta = make({"a.jsonl": rows.encode()}, tokenizer="byte", bos=bos, shard_tokens=shard)
    ids, ends, first = _ids(tmp_path / "o"), _offsets(tmp_path / "o"), [257] if bos else []
    documents = [ids[begin:end] for begin, end in pairwise(ends)]
    kept = [text.encode() for text in [*texts, "x"] if text]
    assert documents == [[*first, *text, 256] for text in kept]
    assert (meta["train"]["documents"], ends[-1]) == (len(kept), meta["train"]["tokens"])
    assert meta["left_out"].get("empty text", 0) == texts.count("")


# Shards


@pytest.mark.parametrize("batch", [1, 1 << 20])
@pytest.mark.parametrize(("shard", "files"), [(4, 3), (3, 3), (9, 1), (5, 2), (1, 9)])
def test_shards_are_one_stream(make, tmp_path, monkeypatch, shard, files, batch):
    monkeypatch.setattr(encode, "BATCH_BYTES", batch)
    meta = make({"a.jsonl": _rows("abc", "de", "f")}, shard_tokens=shard)
    assert meta["train"]["files"] == [f"train-{i:05d}.bin" for i in range(files)]
    sizes = [(tmp_path / "o" / name).stat().st_size // 2 for name in meta["train"]["files"]]
    assert sizes == [shard] * (files - 1) + [9 - shard * (files - 1)]
    assert _ids(tmp_path / "o") == [4, 5, 6, 2, 7, 8, 2, 9, 2]
    assert _offsets(tmp_path / "o") == [0, 4, 7, 9]
    check_files(tmp_path / "o", load_meta(tmp_path / "o"))


def test_fingerprint_of_shards_is_of_all_of_theirs(make, tmp_path):
    whole = make({"a.jsonl": _rows("abc", "de")})["train"]["fingerprint"]
    assert whole == content_fingerprint(tmp_path / "o" / "train.bin")
    meta = make({"a.jsonl": _rows("abc", "de")}, shard_tokens=4)
    shards = [tmp_path / "o" / name for name in meta["train"]["files"]]
    assert meta["train"]["fingerprint"] == prepare.split_fingerprint(shards) != whole


def test_files_of_an_older_set_do_not_stay(make, tmp_path):
    make({"a.jsonl": _rows("abcdef")}, shard_tokens=3)
    (tmp_path / "o" / "train-00000.bin.max_id.json").touch()
    (tmp_path / "o" / "notes.bin").touch()
    make({"a.jsonl": _rows("abcdef")})
    assert _names(tmp_path / "o") == sorted([*FILES, "notes.bin"])


# Faults, as the command line says them


@pytest.fixture
def refusal(lightning: Lightning, tmp_path, tok, monkeypatch):
    """Factory: the error of `prepare` on a file's content, after which nothing is left."""
    monkeypatch.chdir(tmp_path)

    def run(name: str, content: bytes, *options: str) -> str:
        (tmp_path / name).write_bytes(content)
        command = ["prepare", "--input", name, "--output", "o", "--tokenizer", "tok.json"]
        code, out, err = lightning(*command, *options)
        assert (code, out) == (2, "")
        assert not (tmp_path / "o").exists() or _names(tmp_path / "o") == []
        return err.splitlines()[-1].removeprefix("error: ")

    return run


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (
            "s03.jsonl",
            b'{"text":"a"}\n{"prompt":"b"}\n{"text":"c"}\n',
            's03.jsonl, line 2, byte 13: missing field "text", keys found: "prompt": '
            '{"prompt":"b"}; name the field by --field NAME, or leave such rows out by '
            "--on_bad_row skip",
        ),
        (
            "s04.jsonl",
            b'{"text":null}\n{"text":""}\n{"text":"ab"}\n',
            's04.jsonl, line 1, byte 0: text is null: {"text":null}; name another field by --field '
            "NAME, or leave such rows out by --on_bad_row skip",
        ),
        (
            "s05.jsonl",
            b'{"text":"ab"}\n{"text":"cd"}\n{"text":"abc',
            "s05.jsonl, line 3, byte 36: not valid JSON (Unterminated string starting at): "
            '{"text":"abc; mend it, or leave such rows out by --on_bad_row skip',
        ),
        (
            "s06.jsonl",
            b'{"text":"ok"}\n{"text":"a\xff\xfeb"}\n',
            "s06.jsonl, line 2, byte 24: invalid UTF-8 (invalid start byte): "
            '{"text":"a\ufffd\ufffdb"}; '
            "convert the file, read U+FFFD for it by --encoding_errors replace, or leave such rows "
            "out by --on_bad_row skip",
        ),
        (
            "s07.jsonl",
            b"",
            "s07.jsonl: 0 documents / 0 tokens: name inputs that hold text",
        ),
        (
            "blank.jsonl",
            b'\n\n{"text":""}\n',
            "blank.jsonl: 0 documents / 0 tokens (2 blank line, 1 empty text): name inputs that "
            "hold text",
        ),
        (
            "s08.foo",
            b"x",
            "s08.foo is of no kind that is read, which are .jsonl, .json, .txt (each also with "
            ".gz, .zst, .bz2 or .xz) and .parquet: if it is plain text, copy it by cp s08.foo "
            "s08.foo.txt, and name that; else name other files",
        ),
    ],
)
def test_fault_is_one_line_that_can_be_acted_on(refusal, name, content, message):
    assert refusal(name, content) == message


def test_many_inputs_are_not_all_named(make):
    with pytest.raises(ValueError, match=r"b\.txt, .*c\.txt, .*d\.txt and 2 more: its train part"):
        make({"b.txt": b"", "c.txt": b"", "d.txt": b"", "e.txt": b""})


def test_cut_off_compression_stops_the_work(refusal):
    data = gzip.compress(_rows(*(f"row {i}" for i in range(999))))[:1000]
    message = refusal("t.jsonl.gz", data)
    assert message.endswith(
        ": gzip data that ends too early; fetch it again, or leave the rest of the file out by "
        "--on_bad_row skip"
    )


def test_tokenizer_without_eos_is_refused_before_any_work(refusal, tmp_path):
    content = (tmp_path / "tok.json").read_text(encoding="utf-8").replace("<eos>", "<end>")
    (tmp_path / "tok.json").write_text(content, encoding="utf-8")
    assert refusal("a.jsonl", _rows("ab")).startswith(
        "tok.json has no eos token: documents could not be told apart; name one of its tokens by "
        "--eos or add one of "
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--eos", "<end>"], "--eos is '<end>', which is no token of tok.json: name one that it"),
        (
            ["--vocab_size", "300"],
            "--tokenizer takes a tokenizer, --vocab_size trains one, and both are given: give one "
            "of them",
        ),
        (
            ["--val_fraction", "1"],
            "--val_fraction is 1.0: must be above 0 and below 1; validation files of their own are "
            "given by --val_input",
        ),
        (["--shard_tokens", "0"], "--shard_tokens is 0: must be at least 1"),
        (["--workers", "0"], "--workers is 0: must be at least 1"),
        (["--val_input", "a.jsonl"], "a.jsonl is named twice: its text would count double"),
        (["--dtype", "uint23"], "argument --dtype: invalid choice: 'uint23' (choose from"),
        (["--on_bad_rows", "skip"], "unrecognized arguments: --on_bad_rows skip; did you mean --"),
    ],
)
def test_impossible_option_is_refused(refusal, options, message):
    assert refusal("a.jsonl", _rows("ab"), *options).startswith(message)


def test_neither_tokenizer_nor_size_is_refused():
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        Settings()
    assert str(caught.value) == (
        "--tokenizer takes a tokenizer, --vocab_size trains one, and neither is given: give one of "
        "them"
    )


def test_bos_that_the_tokenizer_lacks_is_refused(make, tmp_path):
    train_bpe(["ab"], 300).save(tmp_path / "t.json")
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        make({"a.jsonl": _rows("ab")}, tokenizer=str(tmp_path / "t.json"), bos=True)
    assert str(caught.value) == (
        f"--bos is given, but {tmp_path / 't.json'} has no bos token: leave it out, or take a "
        "tokenizer that has one"
    )


# What the command line prints


def test_summary_counts_documents_and_what_was_left_out(lightning, tmp_path, tok, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.jsonl").write_bytes(
        b'{"text":"ab"}\n\n\n{"prompt":"b"}\n{"text":"c"}\n{"text":1}\n{"text":""}\n{"text":"\xff"}'
    )
    (tmp_path / "v.jsonl").write_bytes(_rows("z"))
    skip = ["--val_input", "v.jsonl", "--on_bad_row", "skip", "--encoding_errors", "replace"]
    command = ["prepare", "--input=a.jsonl", "--output=o", "--tokenizer=tok.json", *skip]
    code, out, err = lightning(*command)
    assert (code, out.splitlines()) == (
        0,
        [
            "o/train.bin: 7 tokens, 3 documents, 3 EOS written, 6 bytes of text",
            "o/val.bin: 2 tokens, 1 documents, 1 EOS written, 1 bytes of text",
            "2 blank lines and 1 empty text skipped",
        ],
    )
    assert err.splitlines()[-4:] == [
        "warning: 1 documents with invalid UTF-8, replaced by U+FFFD",
        "warning: 2 left out: 1 missing field, 1 field that is no text",
        "warning: 1 of 5 characters (20.00%; '\ufffd' 1) do not come back from their ids: the "
        "tokenizer lacks or changes them; take one that holds every byte, such as --tokenizer byte "
        "or one trained by --vocab_size",
        "warning: 1 ids are <unk>, the unknown token",
    ]


@pytest.mark.parametrize("batch", [1, 1 << 20])
def test_text_of_training_that_validates_too_is_counted(make, tmp_path, monkeypatch, batch):
    monkeypatch.setattr(encode, "BATCH_BYTES", batch)
    meta = make({"a.jsonl": _rows("a", "z", "b", "z"), "b.txt": b"z"}, tokenizer="byte")
    assert summary(meta, Path("o"))[-2:] == [
        "warning: 3 training documents are in the validation files too: the validation loss is too "
        "low; take them out of either",
        f"warning: 1 inputs repeat the text of another, which counts double: {tmp_path}/val.jsonl "
        f"that of {tmp_path}/b.txt; leave them out",
    ]


def test_inputs_with_the_same_text_are_counted(make, tmp_path):
    rows = _rows("ab", "c")
    files = {"a.jsonl": rows, "b.jsonl": _rows("c", "ab"), "c.jsonl.gz": gzip.compress(rows)}
    meta = make(files | {"d.jsonl": b"\n", "e.jsonl": b"\n\n"} | {"f.jsonl": b"\n" + rows})
    a, c, f = (str(tmp_path / name) for name in ("a.jsonl", "c.jsonl.gz", "f.jsonl"))
    assert meta["repeated"] == [[a, c], [a, f]]
    assert f"double: {c} that of {a} and 1 more; leave" in summary(meta, Path("o"))[-1]


def test_rows_of_a_file_without_the_field_are_counted(make, tmp_path):
    table = pyarrow.table({"body": ["a", "b", "c"]})
    pyarrow.parquet.write_table(table, tmp_path / "p.parquet")
    files = {"a.jsonl": _rows("ab"), "p.parquet": (tmp_path / "p.parquet").read_bytes()}
    assert make(files, on_bad_row="skip")["left_out"] == {"missing field": 3}


def test_files_without_the_separator_are_counted(make):
    read = ReadOptions(split_documents="--")
    meta = make({"a.txt": b"a--b", "b.txt": b"ab", "c.txt": b"c", "d.txt": b"d--"}, read=read)
    assert meta["train"]["documents"] == 5
    assert summary(meta, Path("o"))[-1] == (
        "warning: 2 text files do not hold the separator of --split_documents: each is one document"
    )


def test_summary_names_the_first_and_the_last_shard(make, tmp_path):
    meta = make({"a.jsonl": _rows("abc", "de")}, shard_tokens=3)
    assert summary(meta, Path("o"))[0] == (
        "o/train-00000.bin … train-00002.bin: 7 tokens, 2 documents, 2 EOS written, 5 bytes of text"
    )


def test_help_shows_both_ways(lightning):
    code, out, _ = lightning("prepare", "--help")
    assert code == 0
    assert "usage: lightning prepare --input FILE ... --output DIR" in out
    assert "--on_bad_row {stop,skip}" in out
    assert "--data.corpus" in out


def test_progress_is_lines_where_there_is_no_terminal(make, tmp_path, tok, capsys, monkeypatch):
    monkeypatch.setattr(encode, "PART_BYTES", 3)
    monkeypatch.setattr(encode, "BATCH_BYTES", 3)
    (tmp_path / "a.jsonl").write_bytes(_rows("abc", "de", "f"))
    (tmp_path / "v.jsonl").write_bytes(_rows("z"))
    options = Settings(vocab_size=270, val_input=[str(tmp_path / "v.jsonl")])
    prepare_files([str(tmp_path / "a.jsonl")], tmp_path / "o", options)
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "train tokenizer: 2 inputs"
    assert lines[1].startswith("train tokenizer: 0.0 MB of text done, ")
    assert lines[2] == "encode: 2 inputs"
    assert [line.split()[1:3] for line in lines[3:5]] == [["76%", "read,"]] * 2
    assert lines[3].endswith(" left")


def test_letters_of_any_language_survive_a_narrow_console(tmp_path, tok):
    (tmp_path / "λ.jsonl").write_bytes(_rows("αβγ 漢字", "ω"))
    command = [sys.executable, "-m", "cli", "prepare", "--input", str(tmp_path / "λ.jsonl")]
    command += ["--output", str(tmp_path / "o"), "--tokenizer", "byte", "--val_fraction", "0.5"]
    narrow = {"PYTHONUTF8": "0", "LC_ALL": "C", "PYTHONIOENCODING": "cp1252"}
    done = subprocess.run(command, cwd=ROOT, env=os.environ | narrow, capture_output=True)
    assert done.returncode == 0, done.stderr
    ids = _ids(tmp_path / "o") + _ids(tmp_path / "o", "val")
    texts = bytes(i if i < 256 else 10 for i in ids).decode("utf-8").split("\n")
    assert sorted(texts) == ["", "αβγ 漢字", "ω"]


# Training and validation


def test_equal_texts_land_in_one_split(make, tmp_path):
    rows = _rows(*(chr(97 + i % 26) for i in range(130)))
    make({"a.jsonl": rows}, val_input=[], val_fraction=0.3)
    train, val = ({*_ids(tmp_path / "o", split)} for split in work.SPLITS)
    assert (train & val, train | val) == ({EOS}, {EOS, *range(A, A + 26)})
    assert len(val) == pytest.approx(9, abs=5)


def test_split_depends_on_the_text_alone(make, tmp_path):
    texts = [f"text number {i}" for i in range(60)]
    make({"a.jsonl": _rows(*texts)}, val_input=[], val_fraction=0.2, tokenizer="byte")
    first = (tmp_path / "o" / "val.bin").read_bytes()
    make({"b.txt": "\n\n".join(texts).encode()}, val_input=[], val_fraction=0.2, tokenizer="byte",
         read=ReadOptions(split_documents="blank_line"))  # fmt: skip
    assert (tmp_path / "o" / "val.bin").read_bytes() == first


FIVE = [f"document {i}" for i in range(5)]


def test_five_documents_without_one_to_validate_name_the_share_that_takes_one(refusal):
    message = refusal("a.jsonl", _rows(*FIVE), "--val_fraction", "0.01")
    start = (
        "a.jsonl: its val part has 0 documents / 0 tokens, the other all 5: give --val_fraction "
    )
    end = " or more, or files for it by --val_input"
    assert (message[: len(start)], message[-len(end) :]) == (start, end)
    share = message[len(start) : -len(end)]
    options = Settings(tokenizer="tok.json", val_fraction=float(share))
    assert prepare_files(["a.jsonl"], Path("o"), options, progress=False)["val"]["documents"] == 1


def test_one_document_cannot_be_split(refusal):
    assert refusal("a.txt", b"abc") == (
        "a.txt: its val part has 0 documents / 0 tokens, the other all 1: validate on files given "
        "by --val_input, or cut it up by --split_documents"
    )


def test_share_that_validates_all_is_refused(refusal):
    message = refusal("a.jsonl", _rows("ab", "cd"), "--val_fraction", "0.99999")
    assert message.endswith(
        "its train part has 0 documents / 0 tokens, the other all 2: give a smaller "
        "--val_fraction, or validate on files given by --val_input"
    )


def test_validation_files_without_text_are_refused_with_the_reasons(refusal, tmp_path):
    (tmp_path / "v.jsonl").write_bytes(b'{"body":"b"}\n{"text":7}\n\n{"text":8}')
    options = ["--val_input", "v.jsonl", "--on_bad_row", "skip"]
    assert refusal("a.jsonl", _rows("ab"), *options) == (
        "a.jsonl, v.jsonl: its val part has 0 documents / 0 tokens (1 missing field, 2 field that "
        "is no text, 1 blank line), the other all 1: name inputs that hold text for it"
    )


def test_vocabulary_that_the_text_does_not_fill_is_told(make, tmp_path):
    meta = make({"a.jsonl": _rows("abab")}, tokenizer=None, vocab_size=1_000_000)
    assert summary(meta, Path("o"))[-1] == (
        "warning: the tokenizer has 259 ids of the 1,000,000 asked for: the text gives no more; "
        "name more text, or train with that size"
    )
    full = make({"a.jsonl": _rows("abab")}, tokenizer=None, vocab_size=meta["vocab_size"])
    assert len(summary(full, Path("o"))) == 2


def test_inputs_keep_their_order_and_are_counted(make, tmp_path):
    meta = make({"b.jsonl": _rows("b", "c"), "a.txt": b"a"})
    assert _ids(tmp_path / "o") == [A + 1, EOS, A + 2, EOS, A, EOS]
    sources = [(Path(s["name"]).name, s["documents"]) for s in meta["sources"]["train"]]
    assert sources == [("b.jsonl", 2), ("a.txt", 1)]
    assert [Path(s["name"]).name for s in meta["sources"]["val"]] == ["val.jsonl"]


# Training a tokenizer


def test_tokenizer_is_trained_on_the_training_split(make, tmp_path):
    meta = make({"a.jsonl": _rows("ab" * 9)}, tokenizer=None, vocab_size=300, pad="<p>", bos=True)
    tokenizer = TextTokenizer.load(tmp_path / "o" / "tokenizer.json")
    expected = train_bpe(["ab" * 9], 300, ["<|endoftext|>", "<|bos|>", "<p>"]).named(pad="<p>")
    assert tokenizer.fingerprint == expected.fingerprint
    assert meta["special_ids"] == {"eos": 0, "bos": 1, "pad": 2}


@pytest.mark.parametrize(("bound", "texts"), [(99, "abcdef"), (4, "abde"), (2, "ad"), (5, "abdef")])
def test_tokenizer_is_trained_on_the_beginning_of_each_input(
    tmp_path, monkeypatch, capsys, bound, texts
):
    monkeypatch.setattr(encode, "SAMPLE_BYTES", bound)
    for name, content in (("a.jsonl", _rows(*"abc")), ("b.jsonl", _rows(*"def"))):
        (tmp_path / name).write_bytes(content)
    found = prepare.find_inputs([str(tmp_path)], ReadOptions())
    sources = encode.Sources(inputs=[("train", each) for each in found])
    assert "".join(encode.training_texts(sources, show=True)) == texts
    told = "tokenizer: trained on the beginning of" in capsys.readouterr().err
    assert told == (texts != "abcdef")


def test_fault_while_a_tokenizer_is_trained_is_the_fault(make, tmp_path):
    with pytest.raises(ValueError, match=r"a\.jsonl, line 2, byte 13: missing field"):
        make({"a.jsonl": b'{"text":"a"}\n{}'}, tokenizer=None, vocab_size=300)
    assert _names(tmp_path / "o") == []


# Killed and started again

DRIVER = """
import os, sys
from pathlib import Path
from data.prepare import encode
from data.prepare import prepare
from data.prepare import work
from data.prepare.prepare import Settings

encode.BATCH_BYTES, encode.PART_BYTES = 40, 100
real, folder, log = os.replace, Path(sys.argv[1]), []
inputs = [str(folder / "a.jsonl"), str(folder / "b.jsonl.gz")]

def run(output, kill_at=None):
    child = os.fork()
    if child:
        return os.waitpid(child, 0)[1]
    moves = 0
    def replace(source, target):
        nonlocal moves
        moves += 1
        if moves == kill_at:
            os._exit(9)
        real(source, target)
    work.os.replace = replace
    write = encode._write
    def written(*args):
        log.append(1)
        write(*args)
    encode._write = written
    kinds = {"tokenizer": "byte"} if sys.argv[2] == "byte" else {"vocab_size": 270}
    settings = Settings(val_fraction=0.3, shard_tokens=300, on_bad_row="skip", **kinds)
    prepare.prepare_files(inputs, output, settings, progress=False)
    (folder / "batches").write_text(str(len(log)))
    os._exit(0)

assert run(folder / "whole") == 0
whole = {p.name: p.read_bytes() for p in (folder / "whole").iterdir()}
every, kill_at, batches = int((folder / "batches").read_text()), 1, []
while run(folder / str(kill_at), kill_at):
    assert "meta.json" not in os.listdir(folder / str(kill_at))
    assert run(folder / str(kill_at)) == 0
    batches.append(int((folder / "batches").read_text()))
    found = {p.name: p.read_bytes() for p in (folder / str(kill_at)).iterdir()}
    assert found == whole, (kill_at, sorted(found))
    kill_at += 1
print(every, *batches)
"""


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["byte", "trained"])
def test_killed_at_any_commit_or_move_the_same_call_goes_on(tmp_path, kind):
    draw = random.Random(kind)
    rows = [_rows("".join(draw.choices("abc λ\n", k=draw.randrange(60)))) for _ in range(40)]
    (tmp_path / "a.jsonl").write_bytes(b"".join(rows[:20]) + b"\n{}\n" + b"".join(rows[20:30]))
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(b"".join(rows[30:]) + b"{}\n"))
    command = [sys.executable, "-c", DRIVER, str(tmp_path), kind]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    every, *again = map(int, done.stdout.split())
    # Each part that is whole makes the second call shorter, down to none while files are moved.
    assert again[1:] == sorted(again[1:], reverse=True)
    assert (again[1], again[-1]) == (every, 0)
    assert len({*again}) > 5


@pytest.fixture
def killed(make, monkeypatch):
    """Factory: as `make`, but killed after its first part; nothing is cleaned up."""

    def run(files, **changes):
        monkeypatch.setattr(encode, "BATCH_BYTES", 1)
        monkeypatch.setattr(encode, "PART_BYTES", 4)
        monkeypatch.setattr(encode, "MOST_AHEAD", 2)
        commit = work.Work.commit

        def die(self):
            commit(self)
            if self.state["next"] != [0, 0]:
                raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(work.Work, "commit", die)
            with pytest.raises(KeyboardInterrupt):
                make(files, **changes)

    return run


@pytest.fixture
def batches(monkeypatch):
    """Counts the batches that are written."""
    written: list[int] = []
    write = encode._write
    monkeypatch.setattr(encode, "_write", lambda *args: written.append(1) or write(*args))
    return written


TWO = {"a.jsonl": _rows("abc", "de", "f", "g"), "b.jsonl": _rows("hij", "k", "l")}
"""Of 7 documents, and one to validate: 8 batches, and an empty one at the end."""
BAD = {"a.jsonl": _rows("abc", "de", "f", "g", "h", "i") + b"{}\n", "b.jsonl": b'{"text":"\xff"}'}


def test_call_goes_on_behind_the_last_whole_part(killed, make, batches, tmp_path):
    killed(TWO)
    assert (len(batches), _names(tmp_path / "o")) == (2, [".work"])
    meta = make(TWO)
    assert (len(batches), meta["train"]["documents"]) == (9, 7)
    assert _ids(tmp_path / "o") == [4, 5, 6, 2, 7, 8, 2, 9, 2, 10, 2, 11, 12, 13, 2, 14, 2, 15, 2]
    assert _offsets(tmp_path / "o") == [0, 4, 7, 9, 11, 15, 17, 19]
    assert [source["documents"] for source in meta["sources"]["train"]] == [4, 3]


@pytest.mark.parametrize(
    "changed",
    [
        {"files": TWO | {"b.jsonl": _rows("hij", "k", "m")}},
        {"files": dict(reversed(TWO.items()))},
        {"files": TWO, "bos": True},
        {"files": TWO, "tokenizer": "byte"},
        {"files": TWO, "read": ReadOptions(split_documents="blank_line")},
        {"files": TWO, "dtype": "uint32"},
    ],
)
def test_work_of_another_job_is_begun_anew(killed, make, batches, changed):
    killed(TWO)
    assert make(**changed)["train"]["documents"] == 7
    assert len(batches) == 2 + 9


def test_rows_may_be_skipped_in_the_middle_of_the_work(killed, make, batches):
    killed(BAD)
    with pytest.raises(ValueError, match=r"a\.jsonl, line 7"):
        make(BAD)
    before = len(batches)
    meta = make(BAD, on_bad_row="skip", read=ReadOptions(encoding_errors="replace"))
    assert (len(batches) - before, meta["train"]["documents"]) == (7, 7)
    assert meta["left_out"] == {"missing field": 1, "invalid UTF-8 replaced": 1}


def test_skipped_rows_are_not_taken_for_good_ones(killed, make, batches):
    killed(BAD, on_bad_row="skip")
    with pytest.raises(ValueError, match=r"a\.jsonl, line 7"):
        make(BAD)
    assert len(batches) >= 2 + 4


def test_work_that_lost_a_file_is_begun_anew(killed, make, batches, tmp_path):
    killed(TWO)
    (tmp_path / "o" / ".work" / "train.bin").unlink()
    assert make(TWO)["train"]["documents"] == 7
    assert len(batches) == 2 + 9
    assert _ids(tmp_path / "o")[:4] == [4, 5, 6, 2]


def test_older_set_stays_whole_while_a_new_one_is_made(killed, make, tmp_path):
    make({"a.jsonl": _rows("ab")})
    before = _files(tmp_path / "o")
    killed(TWO)
    assert {name: (tmp_path / "o" / name).read_bytes() for name in before} == before


# Memory and threads (S18)


def _prepared_by(command: list[str], tmp_path: Path, **environment: str) -> tuple[dict, float]:
    """The files that a process of its own wrote, and its peak memory in MB."""
    script = (
        "import cli, sys; code = cli.main(sys.argv[1:]); status = open('/proc/self/status').read();"
        "print(int(status.split('VmHWM:')[1].split()[0]) / 1024); sys.exit(code)"
    )
    words = [sys.executable, "-c", script, "prepare", "--overwrite", *command]
    words += ["--output", str(tmp_path / "o")]
    done = subprocess.run(words, cwd=ROOT, env=os.environ | environment, capture_output=True)
    assert done.returncode == 0, done.stderr.decode()
    return _files(tmp_path / "o"), float(done.stdout.split()[-1])


@pytest.mark.slow
def test_result_does_not_depend_on_workers(tmp_path, monkeypatch):
    draw = random.Random(0)
    texts = ["".join(draw.choices("ab cd\n", k=draw.randrange(9000))) for _ in range(500)]
    (tmp_path / "a.jsonl").write_bytes(_rows(*texts))
    command = ["--input", str(tmp_path / "a.jsonl"), "--vocab_size", "280", "--workers"]
    one, three = (_prepared_by([*command, n], tmp_path)[0] for n in ("1", "3"))
    assert one == three


@pytest.fixture
def peak(tmp_path):
    """Factory: peak memory in MB of preparing rows of so many MB."""

    def run(megabytes: int) -> float:
        text = "abc def ghi " * 80
        train_bpe([text], 300).save(tmp_path / "t.json")
        with (tmp_path / "a.jsonl").open("w", encoding="utf-8") as file:
            for i in range(megabytes * 1000):
                file.write(json.dumps({"text": f"{i} {text}"}) + "\n")
        command = ["--input", str(tmp_path / "a.jsonl"), "--tokenizer", str(tmp_path / "t.json")]
        return _prepared_by(command, tmp_path)[1]

    return run


@pytest.mark.slow
def test_memory_does_not_grow_with_the_input(peak):
    small, large = peak(50), peak(200)
    assert large < 500
    assert large < 1.5 * small


@pytest.mark.slow
def test_line_of_50_megabytes_works(tmp_path):
    text = "hello world, " * (50_000_000 // 13)
    train_bpe(["hello world, hello"], 290).save(tmp_path / "t.json")
    (tmp_path / "a.jsonl").write_bytes(_rows(text, "abc"))
    (tmp_path / "v.jsonl").write_bytes(_rows("hello world"))
    command = ["--input", str(tmp_path / "a.jsonl"), "--tokenizer", str(tmp_path / "t.json")]
    _, memory = _prepared_by([*command, "--val_input", str(tmp_path / "v.jsonl")], tmp_path)
    tokenizer, ids = TextTokenizer.load(tmp_path / "t.json"), _ids(tmp_path / "o")
    assert tokenizer.decode(ids) == f"{text}<|endoftext|>abc<|endoftext|>"
    assert ids[:600] == tokenizer.encode(text[:13000])[:600]
    assert memory < 700


def test_preparing_own_text_does_not_load_torch():
    # It is slow to start and half of all memory, and no tensor is made.
    code = "import sys; import data.prepare.prepare; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
