"""Bytes of a file, decompressed and cut into lines, paragraphs or pieces, in bounded memory."""

import importlib
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from data.texts import DAMAGED, Fault

MAGICS = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd", b"PAR1": "parquet"}
"""How a file begins: what it is, whatever its name."""

CHUNK = 1 << 20
# A few compressed bytes can stand for very many.
COMPRESSED_CHUNK = 1 << 13
# A longer piece is a file without its separators; its memory would end the process.
MAX_PIECE = 1 << 28

Piece = tuple[int, bytearray | None]
"""Offset in the decompressed file, and the bytes; None where they are more than `MAX_PIECE`."""


class Chunks:
    """The decompressed bytes of a file, once.

    Raises:
        ValueError: for zstd where no package can read it.
        Fault: while iterating, for compressed data that is damaged or ends too early.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.consumed = 0
        """Bytes read of the file on disk."""
        self.given = 0
        """Decompressed bytes that were taken."""
        with path.open("rb") as file:
            head = file.read(4)
        self.kind = next((MAGICS[magic] for magic in MAGICS if head.startswith(magic)), None)
        self._new = _zstd(path) if self.kind == "zstd" else lambda: zlib.decompressobj(31)

    def __iter__(self) -> Iterator[bytes]:
        with self.path.open("rb") as file:
            size = COMPRESSED_CHUNK if self.kind else CHUNK
            chunks = iter(lambda: file.read(size), b"")
            for chunk in self._inflated(chunks) if self.kind else chunks:
                self.consumed = file.tell()
                yield chunk
                self.given += len(chunk)

    def _inflated(self, chunks: Iterator[bytes]) -> Iterator[bytes]:
        engine = None
        for data in chunks:
            # Several members may follow one another, gzip's padded with zeros.
            while data := data if engine else data.lstrip(b"\0"):
                try:
                    engine = engine or self._new()
                    chunk = engine.decompress(data)
                except Exception as error:  # each library has its own
                    detail = f"damaged {self.kind} data ({error})"
                    raise Fault(DAMAGED, detail, "fetch it again") from error
                if chunk:
                    yield chunk
                data, engine = (engine.unused_data, None) if engine.eof else (b"", engine)
        if engine:
            raise Fault(DAMAGED, f"{self.kind} data that ends too early", "fetch it again")


def cut(chunks: Iterable[bytes], separator: bytes) -> Iterator[Piece]:
    """What stands between separators; all as one piece where the separator is empty."""
    rest, at, lost = bytearray(), 0, False
    for chunk in chunks:
        begin, start = 0, max(0, len(rest) - len(separator) + 1)
        rest += chunk
        while separator and (end := rest.find(separator, start)) >= 0:
            yield at + begin, None if lost else rest[begin:end]
            begin = start = end + len(separator)
            lost = False
        if len(rest) - begin > MAX_PIECE:
            begin, lost = max(begin, len(rest) - len(separator)), True
        del rest[:begin]
        at += begin
    if rest or lost:
        yield at, None if lost else rest


def paragraphs(lines: Iterable[Piece]) -> Iterator[Piece]:
    """Lines joined up to the next blank one, line ends as `\\n`."""
    first, held, lost = 0, bytearray(), False
    for at, line in lines:
        if line is None or line.strip():
            first = first if held or lost else at
            lost = lost or line is None or len(held) + len(line) > MAX_PIECE
            held = bytearray() if lost or line is None else held + line.rstrip(b"\r") + b"\n"
        elif held or lost:
            yield first, None if lost else held
            held, lost = bytearray(), False
    if held or lost:
        yield first, None if lost else held


def package(module: str, extra: str, path: object) -> Any:
    """A module that only some kinds of input need.

    Raises:
        ValueError: it is not installed.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ValueError(
            f"{path} needs the package {error.name or module}: pip install -e '.[{extra}]'"
        ) from error


def _zstd(path: Path) -> Callable[[], Any]:
    try:  # of Python 3.14
        return importlib.import_module("compression.zstd").ZstdDecompressor
    except ImportError:
        zstandard = package("zstandard", "zstd", path)
        return lambda: zstandard.ZstdDecompressor().decompressobj()
