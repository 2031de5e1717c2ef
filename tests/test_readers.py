"""Files to documents: every kind that is read, and what is said of those that cannot be."""

import gzip
import json
import subprocess
import sys
import types
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
import zstandard

from data.prepare import chunks, readers
from data.prepare.readers import HubDataset, InputFile, find_inputs, refuse_twins
from data.prepare.texts import BLANK, EMPTY, REPLACED, UNSPLIT, Note, ReadOptions
from data.tokens.folder import FILES

REMEDY = "mend it, or leave such rows out by --on_bad_row skip"
RENAME = "name the field by --field NAME, or leave such rows out by --on_bad_row skip"
CONVERT = (
    "convert the file, read U+FFFD for it by --encoding_errors replace, "
    "or leave such rows out by --on_bad_row skip"
)
REFETCH = "fetch it again, or leave the rest of the file out by --on_bad_row skip"
ROWS = b'{"text":"abc"}\n{"text":"de"}\n{"text":"f"}\n'


def _write(folder: Path, name: str, content: bytes) -> Path:
    (folder / name).write_bytes(content)
    return folder / name


def _read(path: Path, **options) -> list[str | Note]:
    return list(InputFile(path, ReadOptions(**options)))


def _fault(path: Path, **options) -> tuple[str, str]:
    """The only item of a file that is a fault: its reason and its text after the file's name."""
    (note,) = [item for item in _read(path, **options) if isinstance(item, Note) and item.fault]
    assert note.fault is not None
    return note.reason, note.fault.removeprefix(str(path))


# Lines (S01, S02, S04)


@pytest.mark.parametrize(
    ("content", "items"),
    [
        (ROWS, ["abc", "de", "f"]),
        (b"\xef\xbb\xbf" + ROWS, ["abc", "de", "f"]),
        (ROWS + b"\xef\xbb\xbf" + ROWS, ["abc", "de", "f"] * 2),
        (b"\xef\xbb\xbf\n", [Note(BLANK)]),
        (
            b'{"text":"ab"}\r\n\r\n{"text":"cd"}\r\n\n{"text":"e"}',
            ["ab", Note(BLANK), "cd", Note(BLANK), "e"],
        ),
        (b'{"text":""}\n{"text":"ab"}\n', [Note(EMPTY), "ab"]),
        ('{"text":"a\\u2028b\u2028\x0bc\\r\\n"}'.encode(), ["a\u2028b\u2028\x0bc\r\n"]),
        ('{"text":"Ω漢","n":[1,{"a":2}]}'.encode(), ["Ω漢"]),
        (b'{"text":"\\ud83d\\ude42"}', ["🙂"]),
        (b"", []),
    ],
)
def test_lines_become_the_texts_they_hold(tmp_path, content, items):
    # A vertical tab stands bare in JSON only by mistake; here it is escaped.
    content = content.replace(b"\x0b", b"\\u000b")
    assert _read(_write(tmp_path, "a.jsonl", content)) == items


@pytest.mark.parametrize(
    ("row", "field", "text"),
    [
        ({"a": {"b": {"c": "x"}}}, "a.b.c", "x"),
        ({"a.b": "flat", "a": {"b": "nested"}}, "a.b", "flat"),
        ({"content": "y", "text": "z"}, "content", "y"),
    ],
)
def test_field_is_found_by_its_name_or_nested_by_dots(tmp_path, row, field, text):
    path = _write(tmp_path, "a.jsonl", json.dumps(row).encode())
    assert _read(path, field=field) == [text]


def test_chunks_may_end_anywhere(tmp_path, monkeypatch):
    monkeypatch.setattr(chunks, "CHUNK", 3)
    content = '{"text":"ab λ"}\r\n\n{"text":"c"}\n'.encode()
    assert _read(_write(tmp_path, "a.jsonl", content)) == ["ab λ", Note(BLANK), "c"]


# Faults (S03 to S06)


@pytest.mark.parametrize(
    ("line", "reason", "detail", "remedy"),
    [
        (
            '{"prompt":"b"}',
            "missing field",
            ', line 2, byte 13: missing field "text", keys found: "prompt"',
            RENAME,
        ),
        (
            "{}",
            "missing field",
            ', line 2, byte 13: missing field "text", keys found: none',
            RENAME,
        ),
        ('{"text":null}', "field that is no text", ", line 2, byte 13: text is null", None),
        ('{"text":7}', "field that is no text", ", line 2, byte 13: text is a number (7)", None),
        ('{"text":[1]}', "field that is no text", ", line 2, byte 13: text is a list", None),
        ('{"text":{}}', "field that is no text", ", line 2, byte 13: text is an object", None),
        ('{"text":true}', "field that is no text", ", line 2, byte 13: text is true", None),
        (
            "[1]",
            "row that is no object",
            ", line 2, byte 13: the row is a list, no object with a field text",
            REMEDY,
        ),
        (
            '{"text":"a","text":"b"}',
            "duplicate key",
            ', line 2, byte 13: key "text" stands twice in one object',
            REMEDY,
        ),
        (
            '{"text":"a","n":{"k":1,"k":1}}',
            "duplicate key",
            ', line 2, byte 13: key "k" stands twice in one object',
            REMEDY,
        ),
        (
            '{"text":"abc',
            "not valid JSON",
            ", line 2, byte 21: not valid JSON (Unterminated string starting at)",
            REMEDY,
        ),
        (
            '{"λ":0, text}',
            "not valid JSON",
            ", line 2, byte 22: not valid JSON (Expecting property name enclosed in double quotes)",
            REMEDY,
        ),
        (
            '[{"text":"b"},',
            "not valid JSON",
            ", line 2, byte 27: not valid JSON (Expecting value): one object per line is read",
            REMEDY.replace("mend it", "rewrite the file by jq -c '.[]'"),
        ),
        (
            "{",
            "not valid JSON",
            ", line 2, byte 14: not valid JSON (Expecting property name enclosed in double "
            "quotes): one object per line is read",
            REMEDY.replace("mend it", "rewrite the file by jq -c '.'"),
        ),
        (
            '{"text":"a\\ud83d"}',
            "half a surrogate pair",
            r", line 2, byte 13: half a surrogate pair, '\ud83d', which is no Unicode",
            CONVERT,
        ),
    ],
)
def test_bad_row_is_named_by_file_line_and_byte(tmp_path, line, reason, detail, remedy):
    path = _write(tmp_path, "a.jsonl", f'{{"text":"a"}}\n{line}\n{{"text":"c"}}\n'.encode())
    remedy = remedy or RENAME.replace("the field", "another field")
    assert _fault(path) == (reason, f"{detail}: {line}; {remedy}")
    assert [item for item in _read(path) if isinstance(item, str)] == ["a", "c"]


@pytest.mark.parametrize(
    ("line", "why"),
    [('{"text":' + "9" * 5000 + "}", "Exceeds the limit"), ('{"text":' + "[" * 100_000, "maximum")],
)
def test_json_that_the_parser_gives_up_on_is_a_fault(tmp_path, line, why):
    reason, text = _fault(_write(tmp_path, "a.jsonl", line.encode()))
    assert reason == "not valid JSON"
    assert text.startswith(f", line 1, byte 0: not valid JSON ({why}")
    assert text.endswith(f"{line[:80]}; {REMEDY}")


def test_error_shows_80_characters_that_print(tmp_path):
    line = '{"prompt":"' + "\\t\x7f" + "λ" * 100 + '"}'
    _, text = _fault(_write(tmp_path, "a.jsonl", line.encode()))
    assert text.endswith(f': {{"prompt":"\\t {"λ" * 66}; {RENAME}')


def test_invalid_utf8_is_named_by_its_byte_in_the_file(tmp_path):
    path = _write(tmp_path, "u.jsonl", b'{"text":"ok"}\n{"text":"a\xff\xfeb"}\n')
    detail = ', line 2, byte 24: invalid UTF-8 (invalid start byte): {"text":"a\ufffd\ufffdb"}; '
    assert _fault(path) == ("invalid UTF-8", detail + CONVERT)


def test_byte_counts_the_mark_at_the_start(tmp_path):
    path = _write(tmp_path, "u.jsonl", b'\xef\xbb\xbf{"text":"\xff"}')
    assert _fault(path)[1].startswith(", line 1, byte 12: invalid UTF-8")


@pytest.mark.parametrize(
    ("line", "text"),
    [(b'{"text":"a\xff\xfeb"}', "a\ufffd\ufffdb"), (b'{"text":"a\\ud83d"}', "a\ufffd")],
)
def test_replacement_is_counted(tmp_path, line, text):
    path = _write(tmp_path, "u.jsonl", line)
    assert _read(path, encoding_errors="replace") == [Note(REPLACED), text]


@pytest.mark.parametrize("chunk", [5, 1 << 20])
def test_line_without_an_end_is_a_fault_not_a_full_memory(tmp_path, monkeypatch, chunk):
    monkeypatch.setattr(chunks, "MAX_PIECE", 20)
    monkeypatch.setattr(chunks, "CHUNK", chunk)
    path = _write(tmp_path, "a.jsonl", b'{"text":"a"}\n{"text":"' + b"b" * 30 + b'"}\n{"text":"c"}')
    texts = [item for item in _read(path) if isinstance(item, str)]
    assert texts == (["a", "c"] if chunk == 5 else ["a", "b" * 30, "c"])


def test_long_document_is_named_by_its_begin_with_the_limit_and_a_way_out(tmp_path, monkeypatch):
    monkeypatch.setattr(chunks, "MAX_PIECE", 9)
    path = _write(tmp_path, "a.txt", b"0123\n\n456789")
    detail = ", document 1, byte 0: longer than a document may be, which is 9 bytes; cut it up by "
    remedy = "--split_documents, such as blank_line, or leave such rows out by --on_bad_row skip"
    assert _fault(path) == ("too long", detail + remedy)
    assert _read(path, split_documents="blank_line") == ["0123", "456789"]


@pytest.mark.parametrize("chunk", [2, 5, 1 << 20])
def test_long_row_is_named_by_its_line_and_byte(tmp_path, monkeypatch, chunk):
    monkeypatch.setattr(chunks, "MAX_PIECE", 20)
    monkeypatch.setattr(chunks, "CHUNK", chunk)
    rows = b'{"text":"a"}\n{"text":"' + b"b" * 70 + b'"}\n{"text":"c"}'
    notes = [item for item in _read(_write(tmp_path, "a.jsonl", rows)) if isinstance(item, Note)]
    assert [note.fault for note in notes] == [
        f"{tmp_path / 'a.jsonl'}, line 2, byte 13: longer than a document may be, which is 20 "
        "bytes; divide it into several rows, or leave such rows out by --on_bad_row skip"
    ] * (chunk < 100)


def test_read_error_of_parquet_is_no_damage(tmp_path, monkeypatch):
    path = _parquet(tmp_path, {"text": ["ab"]})

    def fail(*_, **__):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(pyarrow.parquet, "ParquetFile", fail)
    with pytest.raises(OSError, match=rf"^\[Errno 5\] Input/output error: '{path}'$"):
        _read(path)


# Text files


@pytest.mark.parametrize(
    ("rule", "content", "items"),
    [
        ("file", b"\xef\xbb\xbfa\r\n\r\nb\n", ["a\n\nb\n"]),
        ("file", b"", []),
        ("blank_line", b"a\r\nb\r\n \r\n\r\nc\n\n\n", ["a\nb", "c"]),
        ("blank_line", b"\n\n", []),
        ("<|endoftext|>", b"a\n<|endoftext|>\nb<|endoftext|>", ["a", "b"]),
        ("--", b"a--b---c", ["a", "b", "-c"]),
        ("--", b"----a", [Note(EMPTY), Note(EMPTY), "a"]),
        ("\n--\n", b"a\n--\nb\nc\n--\n", ["a", "b\nc"]),
        ("\n--\n", b"a\r\n--\r\nb\r\nc\r\n--\n", ["a", "b\nc"]),
        ("\r\n--\r\n", b"a\n--\nb\r\n--\r\nc\r", ["a", "b", "c\r"]),
        ("\n\n", b"a\r\n\r\n\r\nb", ["a", "b"]),
        ("\\newpage", b"a\\newpage b", ["a", " b"]),
        ("--", b"a", ["a", Note(UNSPLIT)]),
        ("--", b"--a", [Note(EMPTY), "a"]),
    ],
)
@pytest.mark.parametrize("chunk", [1, 4, 1 << 20])
def test_text_is_split_by_its_rule(tmp_path, monkeypatch, rule, content, items, chunk):
    monkeypatch.setattr(chunks, "CHUNK", chunk)
    assert _read(_write(tmp_path, "a.txt", content), split_documents=rule) == items


def test_bad_paragraph_is_named_by_its_number_and_byte(tmp_path):
    path = _write(tmp_path, "a.txt", b"abc\n\nd\xffe\n")
    detail = ", document 2, byte 6: invalid UTF-8 (invalid start byte): d\ufffde; "
    assert _fault(path, split_documents="blank_line") == ("invalid UTF-8", detail + CONVERT)


@pytest.mark.parametrize("most", [3, 6])
def test_paragraph_without_an_end_is_a_fault(tmp_path, monkeypatch, most):
    monkeypatch.setattr(chunks, "MAX_PIECE", most)
    path = _write(tmp_path, "a.txt", b"ab\ncd\nef\n\ng\n")
    assert _fault(path, split_documents="blank_line")[0] == "too long"


# Compression (S08)

COMPRESS = {"gz": gzip.compress, "zst": zstandard.ZstdCompressor().compress}


@pytest.mark.parametrize("compress", COMPRESS.values(), ids=COMPRESS)
@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.jsonl", "a.jsonl.zst"])
def test_compression_is_known_by_content_not_by_name(tmp_path, compress, name):
    assert _read(_write(tmp_path, name, compress(ROWS))) == ["abc", "de", "f"]


@pytest.mark.parametrize("compress", COMPRESS.values(), ids=COMPRESS)
def test_compressed_files_may_be_joined(tmp_path, compress):
    path = _write(tmp_path, "a.jsonl.gz", compress(ROWS) + compress(ROWS))
    assert _read(path) == ["abc", "de", "f"] * 2


def test_zeros_behind_gzip_are_padding(tmp_path):
    assert len(_read(_write(tmp_path, "a.jsonl.gz", gzip.compress(ROWS) + bytes(9)))) == 3


@pytest.mark.parametrize(("kind", "given"), [("gzip", 42), ("zstd", 0)])
def test_cut_off_compression_is_a_fault_behind_what_could_be_read(tmp_path, kind, given):
    data = COMPRESS["gz" if kind == "gzip" else "zst"](ROWS)
    path = _write(tmp_path, "a.jsonl", data[:-9] if kind == "gzip" else data[:-1])
    message = f", byte {given}: {kind} data that ends too early; {REFETCH}"
    assert _fault(path) == ("damaged file", message)
    assert len(_read(path)) == (4 if given else 1)


@pytest.mark.parametrize(("kind", "byte"), [("gzip", 10), ("zstd", 4)])
def test_damaged_compression_is_a_fault(tmp_path, kind, byte):
    data = bytearray(COMPRESS["gz" if kind == "gzip" else "zst"](ROWS))
    data[byte : byte + 4] = b"\xff\xff\xff\xff"
    reason, text = _fault(_write(tmp_path, "a.jsonl", bytes(data)))
    assert (reason, text.endswith(f"); {REFETCH}")) == ("damaged file", True)
    assert text.startswith(f", byte 0: damaged {kind} data (")


def test_missing_zstd_names_its_package(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "zstandard", None)
    monkeypatch.setitem(sys.modules, "compression.zstd", None)
    path = _write(tmp_path, "a.jsonl.zst", COMPRESS["zst"](ROWS))
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        InputFile(path, ReadOptions())
    assert str(caught.value) == f"{path} needs the package zstandard: pip install -e '.[zstd]'"


# Parquet


def _parquet(folder: Path, columns: dict, name: str = "a.parquet") -> Path:
    pyarrow.parquet.write_table(pyarrow.table(columns), folder / name)
    return folder / name


@pytest.mark.parametrize("name", ["a.parquet", "a.bin"])
def test_parquet_is_known_by_content(tmp_path, name):
    path = _parquet(tmp_path, {"text": ["ab", "λ"], "n": [1, 2]}, name)
    assert _read(path) == ["ab", "λ"]


def test_nested_column_of_parquet_is_read(tmp_path):
    path = _parquet(tmp_path, {"meta": [{"text": "ab", "n": 1}], "n": [2]})
    assert _read(path, field="meta.text") == ["ab"]


def test_null_in_parquet_is_named_by_its_row(tmp_path):
    path = _parquet(tmp_path, {"text": ["ab", None, ""]})
    remedy = RENAME.replace("the field", "another field")
    assert _fault(path) == ("field that is no text", f", row 2: text is null; {remedy}")
    assert _read(path)[2] == Note(EMPTY)


def test_column_that_parquet_lacks_is_missing_from_each_row(tmp_path):
    path = _parquet(tmp_path, {"body": ["a", "b", "c"], "n": [1, 2, 3]})
    fault = f'{path}: missing field "text", keys found: "body", "n"; {RENAME}'
    assert _read(path) == [Note("missing field", fault)] * 3


def test_invalid_utf8_in_parquet_is_a_fault(tmp_path):
    bad = pyarrow.array([b"a\xff"]).cast(pyarrow.binary()).view(pyarrow.string())
    path = _parquet(tmp_path, {"text": bad})
    assert _fault(path) == (
        "invalid UTF-8",
        f", row 1: invalid UTF-8 (invalid start byte); {CONVERT}",
    )
    assert _read(path, encoding_errors="replace") == [Note(REPLACED), "a\ufffd"]


def test_cut_off_parquet_is_a_fault(tmp_path):
    path = _parquet(tmp_path, {"text": ["ab"] * 50})
    path.write_bytes(path.read_bytes()[:-4])
    reason, text = _fault(path)
    assert (reason, text.endswith(f"); {REFETCH}")) == ("damaged file", True)
    assert text.startswith(", byte 0: parquet that cannot be read after row 0 (")


def test_missing_parquet_names_its_package(tmp_path, monkeypatch):
    path = _parquet(tmp_path, {"text": ["ab"]})
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        InputFile(path, ReadOptions())
    assert str(caught.value) == f"{path} needs the package pyarrow: pip install -e '.[parquet]'"


# Data sets of the hub


@pytest.fixture
def hub(monkeypatch):
    """A stand-in for the `datasets` package, which holds one data set of two splits."""

    class Rows(list):
        column_names, _fingerprint = ("text", "n"), "f00d"

        def select_columns(self, names):
            return [{name: row[name] for name in names} for row in self]

    def load_dataset(name, split):
        if (name, split) not in {("a/b", "train"), ("a/b", "test")}:
            raise ConnectionError(f"Couldn't reach {name}\nand more")
        return Rows([{"text": split, "n": 1}, {"text": None, "n": 2}])

    module = types.ModuleType("datasets")
    monkeypatch.setattr(module, "load_dataset", load_dataset, raising=False)
    monkeypatch.setitem(sys.modules, "datasets", module)


@pytest.mark.parametrize(("word", "text"), [("hf:a/b", "train"), ("hf:a/b:test", "test")])
def test_data_set_of_the_hub_is_read_by_name_and_split(hub, word, text):
    rows = HubDataset(word, ReadOptions())
    first, second = rows
    assert (first, rows.size, rows.identity, rows.at) == (text, 2, [word, "f00d"], 2)
    assert isinstance(second, Note)
    assert second.fault == (
        f"{word}, row 2: text is null; {RENAME.replace('the field', 'another field')}"
    )


def test_data_set_that_cannot_be_had_says_so_in_one_line(hub):
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        HubDataset("hf:no/no", ReadOptions())
    assert str(caught.value) == (
        "hf:no/no could not be loaded (ConnectionError: Couldn't reach no/no): check its name "
        "and the network, or give files"
    )


def test_missing_datasets_names_its_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        find_inputs(["hf:a/b"], ReadOptions())
    assert str(caught.value) == "hf:a/b needs the package datasets: pip install -e '.[hf]'"


# Which files


@pytest.mark.parametrize(
    ("field", "rule", "name"), [("", "x", "field"), ("x", "", "split_documents")]
)
def test_empty_option_is_refused(field, rule, name):
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        ReadOptions(field=field, split_documents=rule)
    assert str(caught.value) == f"--{name} is empty: leave it out or give it a value"


@pytest.mark.parametrize("rule", [r"\n\n", r"\n---\n", r"\t", r"EOD\r\n"])
def test_separator_of_backslashes_is_refused_by_a_way_out_that_works(rule):
    with pytest.raises(ValueError, match="with backslashes") as caught:
        ReadOptions(split_documents=rule)
    assert str(caught.value) == (
        f"--split_documents is {rule}, with backslashes and letters where line ends or tabs may be "
        f"meant: give them to the shell as $'{rule}'"
    )
    word = str(caught.value).rpartition(" ")[2]
    done = subprocess.run(["bash", "-c", f"printf %s {word}"], capture_output=True, check=True)
    meant = done.stdout.decode()
    assert ReadOptions(split_documents=meant).split_documents == rule.encode().decode(
        "unicode_escape"
    )


@pytest.fixture
def texts(tmp_path, monkeypatch):
    """A folder with files at two depths, some hidden; the working directory is above it."""
    for name in ("b.txt", "a.jsonl", "z/c.txt.gz", ".hidden/d.txt", ".e.txt"):
        (tmp_path / "texts" / name).parent.mkdir(parents=True, exist_ok=True)
        _write(tmp_path / "texts", name, b"")
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("words", "names"),
    [
        (["texts"], ["texts/a.jsonl", "texts/b.txt", "texts/z/c.txt.gz"]),
        (["texts/*.txt"], ["texts/b.txt"]),
        (["texts/**/*.gz", "texts/a.jsonl"], ["texts/z/c.txt.gz", "texts/a.jsonl"]),
        (["texts/b.txt"], ["texts/b.txt"]),
    ],
)
def test_words_stand_for_files_in_order(texts, words, names):
    assert [each.name for each in find_inputs(words, ReadOptions())] == names


@pytest.mark.parametrize("word", ["nix.txt", "nix/*.txt"])
def test_word_that_names_nothing_is_refused(texts, word):
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        find_inputs([word], ReadOptions())
    assert str(caught.value) == (
        f"{word}: there is no such file; name files of {readers.SUPPORTED}"
    )


def test_rows_that_end_with_cr_alone_are_told_how_to_become_lines(tmp_path):
    path = _write(tmp_path, "a.jsonl", b'{"text":"b"}\r{"text":"c"}\r')
    (note,) = InputFile(path, ReadOptions())
    assert isinstance(note, Note)
    assert note.fault == (
        f"{path}, line 1, byte 13: not valid JSON (Extra data): its lines end with CR alone: "
        '{"text":"b"} {"text":"c"}; '
        + REMEDY.replace("mend it", r"rewrite the file by tr '\r' '\n'")
    )


def test_folder_without_files_is_refused_for_what_it_is(tmp_path):
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        find_inputs([str(tmp_path)], ReadOptions())
    assert str(caught.value) == (
        f"{tmp_path}: the folder holds no file; name files of {readers.SUPPORTED}"
    )


@pytest.mark.parametrize("output", [".", "out"])
def test_files_that_prepare_writes_are_no_input_of_it(tmp_path, output):
    made = tmp_path / output
    made.mkdir(exist_ok=True)
    for name in (*FILES, "train-00001.bin", "val-00000.bin.max_id.json"):
        (made / name).write_bytes(b"{}")
    (tmp_path / "a.txt").write_text("text")
    found = find_inputs([str(tmp_path)], ReadOptions(), made)
    assert [each.name for each in found] == [str(tmp_path / "a.txt")]


@pytest.mark.parametrize("name", ["a.foo", "a.jsonl.z", "a", "a.gz", "a.xz"])
def test_file_of_an_unknown_kind_is_refused_with_the_known_ones(tmp_path, name):
    path = _write(tmp_path, name, b"x")
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        find_inputs([str(tmp_path)], ReadOptions())
    assert str(caught.value) == (
        f"{path} is of no kind that is read, which are .jsonl, .json, .txt (each also with .gz, "
        ".zst, .bz2 or .xz) and .parquet: if it is plain text, copy it by "
        f"cp {path} {path}.txt, and name that; else name other files"
    )


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a b.csv", b'id,text\n1,"hello, ""world"""\n2,"two\nlines"\n'),
        ("c.tsv", b'id\ttext\n1\t"hello, ""world"""\n2\t"two\nlines"\n'),
    ],
)
def test_table_becomes_rows_by_the_command_of_its_refusal(tmp_path, name, content):
    path = _write(tmp_path, name, content)
    with pytest.raises(ValueError, match=r"convert it by .*, and name that with") as caught:
        find_inputs([str(path)], ReadOptions())
    command = str(caught.value).partition("convert it by ")[2].rpartition(", and name")[0]
    subprocess.run(command, shell=True, check=True)
    (rows,) = find_inputs([f"{path}.jsonl"], ReadOptions())
    assert [*rows] == ['hello, "world"', "two\nlines"]


def test_file_named_twice_is_refused(texts):
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        refuse_twins(find_inputs(["texts", "texts/../texts/b.txt"], ReadOptions()))
    assert str(caught.value) == (
        "texts/../texts/b.txt is named twice: its text would count double; name it once, and keep "
        "files of --val_input out of the folders of --input"
    )


@pytest.mark.parametrize("size", [1, 2, 3, 5, 50])
@pytest.mark.parametrize("separator", [b"\n", b"ab", b"a\nb"])
def test_pieces_do_not_depend_on_how_the_bytes_arrive(separator: bytes, size: int):
    data = b"xabya\nbzab\r\nababa\r\nb--\n\na\n"
    parts = [data[i : i + size] for i in range(0, len(data), size)]
    whole = [(at, bytes(piece or b"")) for at, piece in chunks.cut([data], separator, True)]
    assert [(at, bytes(piece or b"")) for at, piece in chunks.cut(parts, separator, True)] == whole
    assert all(data[at:].startswith(piece) for at, piece in whole)


def test_time_of_a_paragraph_does_not_grow_with_the_square_of_its_lines():
    lines = ((40 * i, bytearray(b"x" * 39)) for i in range(100_000))
    [(first, held)] = chunks.paragraphs(lines)  # which took over a minute with the square
    assert (first, len(held or b"")) == (0, 4_000_000)
