"""What to prepare: files, folders, globs and data sets of a hub, each as a stream of documents."""

import itertools
import json
import os
import shlex
import sys
import tempfile
import weakref
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from data.prepare import chunks, other_kinds, pipes
from data.prepare.chunks import CHUNK, Chunks, cut, paragraphs
from data.prepare.compression import SUFFIXES, is_tar, kind_inside, refuse_name
from data.prepare.encodings import other_encoding
from data.prepare.packages import package
from data.prepare.paths import named_files
from data.prepare.texts import (
    BLANK,
    BOM,
    DAMAGED,
    ENCODED,
    UNSPLIT,
    Fault,
    Note,
    ReadOptions,
    emit,
    missing,
    text_of,
)
from data.tokens.folder import is_output

KINDS = (".jsonl", ".json", ".txt", ".parquet")
SUPPORTED = ".jsonl, .json, .txt (each also with .gz, .zst, .bz2 or .xz) and .parquet"


@runtime_checkable
class Input(Protocol):
    """What documents come from. Each iteration reads it from its start and gives the same."""

    name: str
    size: int
    """Bytes on disk, or rows."""
    identity: list[Any]
    """Differs when the content does."""

    @property
    def at(self) -> int:
        """How much of `size` was read."""
        ...

    def __iter__(self) -> Iterator[str | Note]: ...


def find_inputs(
    words: Iterable[str], options: ReadOptions, output: Path | None = None
) -> list[Input]:
    """Files, in order, that files, folders, globs, pipes, - and `hf:NAME[:SPLIT]` stand for.

    Args:
        output: folder that is prepared. What prepare writes there is no input, also where the
            folder lies inside one; the content of pipes is kept there while it is needed.

    Raises:
        ValueError: a word names nothing, a file is of no kind that we read, or a package is
            missing.
    """
    found: list[Input] = []
    for word in words:
        if word.startswith("hf:"):
            found.append(HubDataset(word, options))
            continue
        word = pipes.STANDARD_INPUT if word == "-" else word
        files = named_files(word)
        own = output and os.path.realpath(output)
        files = [
            file
            for file in files
            if not (is_output(file.name) and os.path.realpath(file.parent) == own)
        ]
        if not files:
            fault = "the folder holds no file" if os.path.isdir(word) else "there is no such file"
            raise ValueError(f"{word}: {fault}; name files of {SUPPORTED}")
        found += [InputFile(file, options, output) for file in files]
    return found


def refuse_twins(inputs: Iterable[Input]) -> None:
    """Refuse an input that is named twice.

    Raises:
        ValueError: there is one.
    """
    seen: set[str] = set()
    for each in inputs:
        place = os.path.realpath(each.name) if isinstance(each, InputFile) else each.name
        if place in seen:
            raise ValueError(
                f"{each.name} is named twice: its text would count double; name it once, and keep "
                "files of --val_input out of the folders of --input"
            )
        seen.add(place)


def real_identity(source: Input) -> list[Any]:
    """Return the identity of an input, with the real path where the input is a file."""
    if isinstance(source, InputFile) and source.copy is None:
        return [os.path.realpath(source.name), *source.identity[1:]]
    return source.identity


class InputFile:
    """A file, whose compression is known by its content and whose kind by its name.

    The kind of a pipe without an ending is told by its first character.
    """

    def __init__(self, path: Path, options: ReadOptions, copies: Path | None = None) -> None:
        self.name, self.options, self.copy, digest = str(path), options, None, ""
        self.path = pipes.place_of(path)
        refuse_name(self.path)
        suffixes = [each for each in map(str.lower, self.path.suffixes) if each not in SUFFIXES]
        self.kind = "".join(suffixes[-1:])
        if pipes.is_pipe(path):
            self.copy, digest = pipes.copy(path, copies or Path(tempfile.gettempdir()))
            weakref.finalize(self, self.copy.close)
            self.path = pipes.name_of(self.copy)
        stat, self._chunks = self.path.stat(), Chunks(self.path)
        self.size, self.identity = stat.st_size, [str(path), stat.st_size, stat.st_mtime_ns]
        if self.copy is not None:
            self.identity = ["pipe", stat.st_size, digest]
            if self.kind not in KINDS and self._chunks.kind != "parquet":
                begins = self._chunks.head().removeprefix(BOM).lstrip()[:1]
                self.kind = ".jsonl" if begins in (b"{", b"[") else ".txt"
                print(f"{path}: read as {self.kind}", file=sys.stderr)
        if self._chunks.kind == "parquet":
            self.kind = ".parquet"
            package("pyarrow", "parquet", path)
        if self.kind not in KINDS:
            raise ValueError(
                f"{path} is of no kind that is read, which are {SUPPORTED}: "
                f"{other_kinds.way_out(path)}"
            )

    @property
    def at(self) -> int:
        return self._chunks.consumed

    def __iter__(self) -> Iterator[str | Note]:
        self._chunks = Chunks(self.path)
        read = {".parquet": self._parquet, ".txt": self._texts}.get(self.kind, self._lines)
        try:
            if self.kind != ".parquet":
                self._refuse_other_encoding()
            yield from read()
        except Fault as fault:
            yield fault.note(f"{self.name}, byte {self._chunks.given}")

    def _refuse_other_encoding(self) -> None:
        beginning = Chunks(self.path)
        head = beginning.head()
        if is_tar(head):
            raise Fault(
                ENCODED, "a tar archive", "unpack it, such as by tar -xf, and name what comes out"
            )
        if beginning.kind is not None and (inner := kind_inside(head)):
            raise Fault(
                ENCODED,
                f"{inner} inside {beginning.kind} data",
                "unpack it until its text is plain, and name what comes out",
            )
        if encoding := other_encoding(head):
            command = f"iconv -f {encoding} -t UTF-8"
            remedy = f"pipe its text through {command}"
            if self.copy is None and beginning.kind is None:
                new = self.path.with_name(f"utf8-{self.path.name}")
                remedy = (
                    f"convert it by {command} {shlex.quote(self.name)} > {shlex.quote(str(new))}"
                )
            raise Fault(ENCODED, f"{encoding}, and only UTF-8 is read", remedy)

    def _lines(self) -> Iterator[str | Note]:
        for number, (at, line) in enumerate(cut(self._chunks, b"\n"), 1):
            if line is not None and not line.removeprefix(BOM).strip():
                yield Note(BLANK)
            else:
                place = f"{self.name}, line {number}"
                way_out = "divide it into several rows"
                yield from self._emit(place, at, line, self._parse, way_out)

    def _emit(
        self, place: str, at: int, piece: bytearray | None, parse: Callable[[Any], Any], cure: str
    ) -> Iterator[str | Note]:
        if piece is not None:
            yield from emit(place, at, piece, parse, self.options)
        else:
            detail = f"longer than a document may be, which is {chunks.MAX_PIECE:,} bytes"
            yield Fault("too long", detail, cure).note(f"{place}, byte {at}")

    def _parse(self, line: str) -> str | bytes:
        try:
            row = _DECODER.decode(line)
        except json.JSONDecodeError as error:
            detail, remedy = f"not valid JSON ({error.msg})", "mend it"
            way = {"[": ".[]", "{": "."}.get(line.rstrip()[:1] if line[0] == "[" else line.rstrip())
            if way is not None:
                detail += ": one object per line is read"
                remedy = f"rewrite the file by jq -c {way!r}"
            elif "\r" in line.rstrip("\r"):
                detail += ": its lines end with CR alone"
                remedy = r"rewrite the file by tr '\r' '\n'"
            at = len(line[: error.pos].encode("utf-8"))
            raise Fault("not valid JSON", detail, remedy, at=at) from error
        except (ValueError, RecursionError) as error:  # a number too long, lists too deep
            raise Fault("not valid JSON", f"not valid JSON ({error})") from error
        return text_of(row, self.options.field)

    def _texts(self) -> Iterator[str | Note]:
        rule = self.options.split_documents
        own = rule not in ("file", "blank_line")
        separator = {"file": "", "blank_line": "\n"}.get(rule, rule.replace("\r\n", "\n"))
        pieces = cut(self._chunks, separator.encode("utf-8"), any_line_end=own)
        pieces = paragraphs(pieces) if rule == "blank_line" else pieces
        n_bytes = 0
        for number, (at, piece) in enumerate(pieces, 1):
            n_bytes = len(piece or b"")
            place = f"{self.name}, document {number}"
            way_out = "cut it up by --split_documents, such as blank_line"
            yield from self._emit(place, at, piece, self._unix, way_out)
        if own and n_bytes and n_bytes == self._chunks.given:
            yield Note(UNSPLIT)

    def _unix(self, text: str) -> str:
        text = text.replace("\r\n", "\n")
        return text if self.options.split_documents == "file" else text.strip("\n")

    def _parquet(self) -> Iterator[str | Note]:
        arrow, field, done = package("pyarrow", "parquet", self.path), self.options.field, 0
        try:
            opened = package("pyarrow.parquet", "parquet", self.path).ParquetFile
            file = opened(self.path, buffer_size=CHUNK)
            names = file.schema_arrow.names
            column = field if field in names else field.partition(".")[0]
            if column not in names:
                note = missing(field, names).note(self.name)
                yield from itertools.repeat(note, file.metadata.num_rows)
                return
            for batch in file.iter_batches(batch_size=256, columns=[column]):
                values = batch.column(0)
                if arrow.types.is_string(values.type) or arrow.types.is_large_string(values.type):
                    values = values.cast(arrow.large_binary())  # it may be no UTF-8
                for number, value in enumerate(values, done + 1):
                    row, place = {column: value.as_py()}, f"{self.name}, row {number}"
                    yield from emit(place, None, row, self._row, self.options)
                done += len(values)
                self._chunks.consumed = self.size * done // file.metadata.num_rows
        except (arrow.ArrowException, OSError) as error:
            if getattr(error, "errno", None) is not None:
                raise OSError(error.errno, error.strerror, str(self.path)) from error
            detail = f"parquet that cannot be read after row {done} ({error})"
            raise Fault(DAMAGED, detail, "fetch it again") from error

    def _row(self, row: dict[str, Any]) -> str | bytes:
        return text_of(row, self.options.field)


class HubDataset:
    """A data set of the Hugging Face hub, or a folder that its library loads: hf:NAME[:SPLIT]."""

    def __init__(self, word: str, options: ReadOptions) -> None:
        self.name, self.options, self.at = word, options, 0
        _, name, *split = word.split(":")
        datasets = package("datasets", "hf", word)
        try:
            rows = datasets.load_dataset(name, split=split[0] if split else "train")
        except Exception as error:  # of the network, the hub, the disk or the data
            first = str(error).partition("\n")[0]
            raise ValueError(
                f"{word} could not be loaded ({type(error).__name__}: {first}): check its name "
                "and the network, or give files"
            ) from error
        self.size, self.identity = len(rows), [word, rows._fingerprint]
        field = options.field
        column = field if field in rows.column_names else field.partition(".")[0]
        self._rows = rows.select_columns([column]) if column in rows.column_names else rows

    def __iter__(self) -> Iterator[str | Note]:
        field = self.options.field
        for number, row in enumerate(self._rows, 1):
            self.at = number
            place = f"{self.name}, row {number}"
            yield from emit(place, None, row, lambda row: text_of(row, field), self.options)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    row = dict(pairs)
    if len(row) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise Fault("duplicate key", f'key "{twice}" stands twice in one object')
    return row


_DECODER = json.JSONDecoder(object_pairs_hook=_object)
