"""Text that is not UTF-8, and content that is no text, told by its bytes."""

import codecs

MARKS = {
    codecs.BOM_UTF32_LE: "UTF-32",  # which begins with the next but one
    codecs.BOM_UTF32_BE: "UTF-32",
    codecs.BOM_UTF16_LE: "UTF-16",
    codecs.BOM_UTF16_BE: "UTF-16",
}
"""Byte order marks, and the encodings by which iconv reads them."""

# Not among them: tab, line ends, form feed, and the escape of terminals' logs.
CONTROLS = bytes([*range(9), *range(14, 27), *range(28, 32), 127])
# Characters that are judged together, so that a part of a long text counts by itself.
WINDOW = 1 << 16


def other_encoding(head: bytes) -> str | None:
    """The UTF-16 or UTF-32 that a file begins with, marked or not; None for anything else."""
    marked = next((MARKS[mark] for mark in MARKS if head.startswith(mark)), None)
    if marked is not None or len(head) < 4:
        return marked
    wide = [_zeros(head[place::4]) for place in range(4)]
    if max(wide[0], 0.9 - wide[2], 0.9 - wide[3]) < 0.05:
        return "UTF-32LE"
    if max(wide[3], 0.9 - wide[0], 0.9 - wide[1]) < 0.05:
        return "UTF-32BE"
    even, odd = _zeros(head[::2]), _zeros(head[1::2])
    if even < 0.05 and odd > 0.3:
        return "UTF-16LE"
    return "UTF-16BE" if odd < 0.05 and even > 0.3 else None


def not_text(text: str, replaced: bool) -> str | None:
    """What makes a text look like binary data or another encoding, None where nothing does.

    Args:
        replaced: whether bytes that are not UTF-8 are U+FFFD in it.
    """
    for begin in range(0, max(1, len(text)), WINDOW):
        # The last window reaches back to be as long as the others.
        begin = min(begin, max(0, len(text) - WINDOW))
        part = text[begin : begin + WINDOW]
        data = part.encode("utf-8", "surrogatepass")
        controls = len(data) - len(data.translate(None, CONTROLS))
        invalid = controls + part.count("\ufffd") if replaced else controls
        if controls >= 10 and controls >= 0.1 * len(part):
            return f"{controls:,} of {len(part):,} characters are NUL or control characters"
        if invalid >= 32 and invalid >= 0.25 * len(part):
            return f"{invalid:,} of {len(part):,} characters are not UTF-8"
    return None


def _zeros(data: bytes) -> float:
    return data.count(0) / max(1, len(data))
