"""Bytes of a file, decompressed and cut into lines, paragraphs or pieces, in bounded memory."""

import contextlib
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any

from data.atomic import naming
from data.compression import compression_of, decompressor
from data.texts import DAMAGED, Fault

CHUNK = 1 << 20
# Of a file's beginning, which tells its kind and encoding.
HEAD_BYTES = 1 << 12
# A few compressed bytes can stand for very many.
COMPRESSED_CHUNK = 1 << 13
# A longer piece is a file without its separators; its memory would end the process.
MAX_PIECE = 1 << 28

Piece = tuple[int, bytearray | None]
"""Offset in the decompressed file, and the bytes; None where they are more than `MAX_PIECE`."""


class Chunks:
    """The decompressed bytes of a file, once.

    Raises:
        ValueError: for an archive, or zstd where no package can read it.
        Fault: while iterating, for compressed data that is damaged or ends too early.
        OSError: naming the file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.consumed = 0
        """Bytes read of the file on disk."""
        self.given = 0
        """Decompressed bytes that were taken."""
        self.kind = compression_of(path)
        if self.kind not in (None, "parquet"):
            self._new = decompressor(self.kind, path)

    def __iter__(self) -> Iterator[bytes]:
        with self.path.open("rb") as file:
            file.seek(0)  # see compression_of
            size = COMPRESSED_CHUNK if self.kind else CHUNK
            chunks = iter(lambda: self._read(file, size), b"")
            for chunk in self._inflated(chunks) if self.kind else chunks:
                self.consumed = file.tell()
                yield chunk
                self.given += len(chunk)

    def head(self) -> bytes:
        """The first bytes, fewer where the file ends or is damaged there."""
        head = bytearray()
        with contextlib.suppress(Fault):
            for chunk in self:
                head += chunk
                if len(head) >= HEAD_BYTES:
                    break
        return bytes(head[:HEAD_BYTES])

    def _read(self, file: IO[bytes], size: int) -> bytes:
        with naming(self.path):
            return file.read(size)

    def _inflated(self, chunks: Iterator[bytes]) -> Iterator[bytes]:
        engine = None
        for data in chunks:
            # Several members may follow one another, padded with zeros.
            while data := data if engine else data.lstrip(b"\0"):
                engine = engine or self._new()
                yield from self._decompressed(engine, data)
                data, engine = (engine.unused_data, None) if engine.eof else (b"", engine)
        if engine:
            raise Fault(DAMAGED, f"{self.kind} data that ends too early", "fetch it again")

    def _decompressed(self, engine: Any, data: bytes) -> Iterator[bytes]:
        # The engines of the standard library give as much as they are asked for.
        most = [CHUNK] if hasattr(engine, "needs_input") else []
        more = True
        while more:
            try:
                chunk = engine.decompress(data, *most)
            except Exception as error:  # each library has its own
                detail, remedy = f"damaged {self.kind} data ({error})", "fetch it again"
                if "ictionary" in str(error):
                    detail = f"{self.kind} data that needs a dictionary"
                    remedy = "decompress it by zstd -d -D DICTIONARY"
                raise Fault(DAMAGED, detail, remedy) from error
            if chunk:
                yield chunk
            data, more = b"", bool(most) and not (engine.eof or engine.needs_input)


def cut(chunks: Iterable[bytes], separator: bytes, any_line_end: bool = False) -> Iterator[Piece]:
    """What stands between separators; all as one piece where the separator is empty.

    Args:
        any_line_end: let a line end in the separator be \\r\\n in the file, too.
    """
    pattern, longest = re.escape(separator), len(separator)
    if any_line_end:
        pattern, longest = pattern.replace(b"\\\n", b"\r?\n"), longest + separator.count(b"\n")
    search = re.compile(pattern).search
    rest, at = bytearray(), 0
    lost: int | None = None  # where a piece began that is too long to be held
    for chunk in chunks:
        begin, start = 0, max(0, len(rest) - longest + 1)
        rest += chunk
        while separator and (found := search(rest, start)):
            if lost is None:
                yield at + begin, rest[begin : found.start()]
            else:
                yield lost, None
            begin = start = found.end()
            lost = None
        if len(rest) - begin > MAX_PIECE:
            lost = at + begin if lost is None else lost
            begin = max(begin, len(rest) - longest)
        del rest[:begin]
        at += begin
    if lost is not None:
        yield lost, None
    elif rest:
        yield at, rest


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
