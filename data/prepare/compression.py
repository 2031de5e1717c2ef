"""Compression by content, not by name: what is read, and a way out for what is not."""

import bz2
import importlib
import lzma
import shlex
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from data.prepare.packages import package

SUFFIXES = (".gz", ".gzip", ".bgz", ".zst", ".zstd", ".bz2", ".xz", ".lzma")
"""Ends of names that only tell the compression."""

MAGICS = {
    b"\x1f\x8b": "gzip",
    b"\x28\xb5\x2f\xfd": "zstd",
    b"BZh": "bzip2",
    b"\xfd7zXZ\x00": "xz",
    b"\x5d\x00\x00": "xz",  # its predecessor, lzma
    b"PAR1": "parquet",
}
"""How a file begins: what it is, whatever its name."""
# "BZh" and a digit may begin a text.
BZIP2_BLOCKS = (b"1AY&SY", b"\x17\x72\x45\x38\x50\x90")
# Frames of zstd and lz4 that hold no data: pzstd and seekable files begin or end with them.
SKIPPABLE = tuple(bytes([0x50 + i]) + b"\x2a\x4d\x18" for i in range(16))

UNPACK = "unpack it by {command}, and name what comes out"
UNREAD = {
    b"PK\x03\x04": ("a zip archive", "python3 -m zipfile -e {path} FOLDER"),
    b"PK\x05\x06": ("an empty zip archive", "python3 -m zipfile -e {path} FOLDER"),
    b"7z\xbc\xaf\x27\x1c": ("a 7z archive", "7z x {path}"),
    b"Rar!\x1a\x07": ("a rar archive", "unrar x {path}"),
    b"\x04\x22\x4d\x18": ("compressed by lz4", "lz4 -d {path} FILE"),
    b"\x02\x21\x4c\x18": ("compressed by lz4", "lz4 -d {path} FILE"),
    b"\xff\x06\x00\x00sNaPpY": ("compressed by snappy", "snzip -d {path}"),
    b"\x1f\x9d": ("compressed by compress", "gzip -dc {path} > FILE"),
    b"%PDF-": ("a PDF", "pdftotext {path} FILE"),
}
"""How a file begins: what it is, and how to turn it into one that is read."""
TAR = ("a tar archive", "python3 -m tarfile -e {path} FOLDER")
UNREAD_NAMES = {
    ".tar": TAR,
    ".tgz": TAR,
    ".tbz2": TAR,
    ".txz": TAR,
    ".br": ("compressed by brotli", "brotli -d {path}"),
}
"""The same for kinds that a name tells."""

# A tar archive's first header says so here.
TAR_MARK = slice(257, 262)


def kind_inside(head: bytes) -> str | None:
    """What decompressed bytes begin with where that is no text: an archive, or compressed again."""
    if head.startswith(b"BZh"):
        return "bzip2 data" if head[4:10] in BZIP2_BLOCKS else None
    found = (f"{kind} data" for magic, kind in MAGICS.items() if head.startswith(magic))
    other = (what for magic, (what, _) in UNREAD.items() if head.startswith(magic))
    return next(found, None) or next(other, None)


def compression_of(path: Path) -> str | None:
    """How a file is compressed, or "parquet"; None for plain text.

    Raises:
        ValueError: it is an archive or compressed in a way that is not read.
    """
    with path.open("rb") as file:
        # Where a pipe's copy has no name of its own, its place in the file may be shared.
        file.seek(0)
        head, skipped = file.read(512), False
        while head.startswith(SKIPPABLE) and len(head) >= 8:
            file.seek(int.from_bytes(head[4:8], "little") - len(head) + 8, 1)
            head, skipped = file.read(512), True
    found = next((MAGICS[magic] for magic in MAGICS if head.startswith(magic)), None)
    if found == "bzip2" and not head[4:].startswith(BZIP2_BLOCKS):
        found = None
    if found is None:
        unread = next((UNREAD[magic] for magic in UNREAD if head.startswith(magic)), None)
        refuse(path, TAR if is_tar(head) else unread)
    return found or ("zstd" if skipped else None)


def is_tar(head: bytes) -> bool:
    """Whether a decompressed file begins as a tar archive."""
    return head[TAR_MARK] == b"ustar"


def refuse_name(path: Path) -> None:
    """Refuse a file whose name tells a kind that is not read.

    Raises:
        ValueError: it does.
    """
    suffixes = [suffix.lower() for suffix in path.suffixes]
    refuse(path, next((UNREAD_NAMES[each] for each in suffixes if each in UNREAD_NAMES), None))


def refuse(path: Path, unread: tuple[str, str] | None) -> None:
    """Name the kind of a file that is not read, and the way out.

    Raises:
        ValueError: there is a kind.
    """
    if unread is not None:
        kind, command = unread
        remedy = UNPACK.format(command=command.format(path=shlex.quote(str(path))))
        raise ValueError(f"{path} is {kind}, which prepare does not read: {remedy}")


def decompressor(kind: str, path: Path) -> Callable[[], Any]:
    """What makes an engine for one member of a compressed file.

    Raises:
        ValueError: for zstd where no package can read it.
    """
    if kind == "zstd":
        return _zstd(path)
    engines = {
        "gzip": lambda: zlib.decompressobj(31),
        "bzip2": bz2.BZ2Decompressor,
        "xz": lzma.LZMADecompressor,
    }
    return engines[kind]


def _zstd(path: Path) -> Callable[[], Any]:
    # The format's largest window, of zstd --long=31; a file without one takes no such memory.
    try:  # of Python 3.14
        zstd = importlib.import_module("compression.zstd")
    except ImportError:
        zstandard = package("zstandard", "zstd", path)
        reader = zstandard.ZstdDecompressor(max_window_size=1 << 31)
        return lambda: reader.decompressobj()
    options = {zstd.DecompressionParameter.window_log_max: 31}
    return lambda: zstd.ZstdDecompressor(options=options)
