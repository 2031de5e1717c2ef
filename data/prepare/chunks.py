"""Bytes of a file, decompressed and cut into lines, paragraphs or pieces, in bounded memory."""

import contextlib
import itertools
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any

from data.prepare.compression import compression_of, decompressor
from data.prepare.texts import DAMAGED, Fault
from data.system.atomic import naming

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
    n_line_ends = separator.count(b"\n") if any_line_end else 0
    pattern = re.compile(b"(" + re.escape(separator).replace(b"\\\n", b"\r?\n") + b")")
    longest = len(separator) + n_line_ends
    rest, at = bytearray(), 0
    lost: int | None = None  # where a piece began that is too long to be held
    for chunk in chunks:
        # A separator may begin in one chunk and end in the next.
        known = max(0, len(rest) - max(0, longest - 1))
        data = rest[known:] + chunk
        del rest[known:]
        widths: Iterable[int] = itertools.repeat(len(separator))
        pieces = data.split(separator) if separator else [data]
        if n_line_ends:  # in three times the time
            found = [*map(bytearray, pattern.split(data))]
            pieces, widths = found[::2], map(len, found[1::2])
        rest += pieces[0]
        for width, following in zip(widths, pieces[1:], strict=False):
            end = at + len(rest) + width  # before the reader of the piece empties it
            yield (at, rest) if lost is None else (lost, None)
            at, rest, lost = end, following, None
        if len(rest) > MAX_PIECE:
            lost = at if lost is None else lost
            at += len(rest) - longest
            rest = rest[len(rest) - longest :]
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
            if lost or line is None:
                held = bytearray()
            else:  # in place, so that the time does not grow with the square
                held += line.rstrip(b"\r")
                held += b"\n"
        elif held or lost:
            yield first, None if lost else held
            held, lost = bytearray(), False
    if held or lost:
        yield first, None if lost else held
