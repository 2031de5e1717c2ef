"""The text of a row, or what is wrong with it, where, and what can be done."""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from data.prepare.encodings import MARKS, not_text

BOM = b"\xef\xbb\xbf"
BLANK, EMPTY, REPLACED, NULS = "blank line", "empty text", "invalid UTF-8 replaced", "NUL in text"
UNDECODED = "U+FFFD in text"
UNSPLIT, OVERLAP = "file without the separator", "training document that validates too"
"""What is counted and is no fault."""
DAMAGED, ENCODED, BINARY = "damaged file", "file of another kind", "control characters"
OF_FILES = (DAMAGED, ENCODED)
"""Reasons that end the reading of a file."""
TO_UTF8 = "convert the file, read U+FFFD for it by --encoding_errors replace"
CONVERT = "convert it by iconv -f ITS_ENCODING -t UTF-8"
IF_TEXT = f"{CONVERT} if it is text"
# Not \\newpage and the like, which texts hold.
ESCAPES = re.compile(r"\\[nrt](?![A-Za-z])")
SHOWN = 80
"""Characters of a bad row that its error shows."""


@dataclass(frozen=True, kw_only=True)
class ReadOptions:
    """How files become documents."""

    field: str = "text"
    """Key of the text in a row; dots lead into nested objects."""
    split_documents: str = "file"
    """In .txt: file (each is a document), blank_line, or the text that stands between two."""
    encoding_errors: Literal["strict", "replace"] = "strict"
    """What is not UTF-8: a fault, or read as U+FFFD."""

    def __post_init__(self) -> None:
        for name in ("field", "split_documents"):
            if not getattr(self, name):
                raise ValueError(f"--{name} is empty: leave it out or give it a value")
        if ESCAPES.search(rule := self.split_documents):
            raise ValueError(
                f"--split_documents is {rule}, with backslashes and letters where line ends or "
                f"tabs may be meant: give them to the shell as $'{rule}'"
            )


@dataclass(frozen=True)
class Note:
    """What is counted but gives no document; a fault has the text of its error."""

    reason: str
    fault: str | None = None
    count: int = 1


class Fault(Exception):
    """What is wrong with a row or a file.

    Args:
        reason: by which such faults are counted.
        at: its offset in the row's bytes.
    """

    def __init__(self, reason: str, detail: str = "", remedy: str = "mend it", at: int = 0) -> None:
        super().__init__(detail or reason)
        self.reason, self.remedy, self.at = reason, remedy, at

    def note(self, place: str, shown: str = "") -> Note:
        """The fault as it is counted or, where it stops the work, reported."""
        rest = "the rest of the file" if self.reason in OF_FILES else "such rows"
        remedy = f"{self.remedy}, or leave {rest} out by --on_bad_row skip"
        return Note(self.reason, f"{place}: {self}{shown}; {remedy}")


def emit(
    place: str, at: int | None, data: Any, parse: Callable[[Any], Any], options: ReadOptions
) -> Iterator[str | Note]:
    """The text of one row or piece, or a note of why there is none.

    Args:
        place: where it stands, for the error.
        at: its byte offset in the file, if it has one.
        data: what `parse` takes, or UTF-8 bytes of it.
        parse: gives the text, as str or UTF-8 bytes.
    """
    replaced, value, head = False, data, b""
    del data
    try:
        if isinstance(value, bytearray):
            if value.startswith(BOM):
                del value[: len(BOM)]
                at = (at or 0) + len(BOM)
            head, raw = bytes(value[: 4 * SHOWN]), value
            value, replaced = _decode(raw, options)
            raw.clear()  # callers hold a long row too, whose memory is needed now
        text = parse(value)
        del value
        if not isinstance(text, str):
            text, replaced = _decode(text, options)
        if not text.isascii():
            text, half = _pair(text, options)
            replaced |= half
        if found := not_text(text, replaced):
            raise Fault(BINARY, f"no text, or in another encoding ({found})", IF_TEXT)
    except Fault as fault:
        byte = "" if at is None else f", byte {at + fault.at}"
        yield fault.note(place + byte, _shown(head))
    else:
        if replaced:
            yield Note(REPLACED)
        elif not text.isascii() and (count := text.count("\ufffd")):
            yield Note(UNDECODED, count=count)
        if "\0" in text:
            yield Note(NULS)
        yield text or Note(EMPTY)


def text_of(row: Any, field: str) -> str | bytes:
    """The text at a field of a row.

    Raises:
        Fault: it is missing or no text.
    """
    if not isinstance(row, dict):
        raise Fault(
            "row that is no object", f"the row is {_named(row)}, no object with a field {field}"
        )
    value: Any = row
    for key in [field] if field in row else field.split("."):
        if not isinstance(value, dict) or key not in value:
            raise missing(field, value if isinstance(value, dict) else ())
        value = value[key]
    if not isinstance(value, str | bytes):
        raise Fault(
            "field that is no text",
            f"{field} is {_named(value)}",
            "name another field by --field NAME",
        )
    return value


def missing(field: str, keys: Any) -> Fault:
    """The fault of a row without the field."""
    found = ", ".join(f'"{key}"' for key in list(keys)[:20]) or "none"
    detail = f'missing field "{field}", keys found: {found}'
    return Fault("missing field", detail, "name the field by --field NAME")


def _decode(data: bytes | bytearray, options: ReadOptions) -> tuple[str, bool]:
    try:
        return data.decode("utf-8"), False
    except UnicodeDecodeError as error:
        text = data.decode("utf-8", "replace")
        wide = data.startswith((*MARKS,))
        if options.encoding_errors == "replace" and not wide:
            return text, True
        detail = f"invalid UTF-8 ({error.reason})"
        if wide:
            detail += "; it looks like UTF-16"
        # U+FFFD everywhere would be refused too.
        remedy = CONVERT if wide or not_text(text, True) else TO_UTF8
        raise Fault("invalid UTF-8", detail, remedy, error.start) from error


def _pair(text: str, options: ReadOptions) -> tuple[str, bool]:
    try:
        text.encode("utf-8")
        return text, False
    except UnicodeEncodeError as error:
        if options.encoding_errors == "replace":
            return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace"), True
        # JSON can spell what is no letter.
        detail = f"half a surrogate pair, {text[error.start]!r}, which is no Unicode"
        raise Fault("half a surrogate pair", detail, TO_UTF8) from error


def _named(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    kinds = {dict: "an object", list: "a list", str: "a text"}
    return kinds.get(type(value), f"a number ({value})")


def _shown(head: bytes) -> str:
    text = head.decode("utf-8", "replace")[:SHOWN]
    return f": {''.join(c if c.isprintable() else ' ' for c in text).rstrip()}" if head else ""
