"""Pieces of texts to train a vocabulary on: the words of the whole text, in bounded memory."""

import re
from collections.abc import Iterable, Iterator

from tokenizers import pre_tokenizers

# Characters after which a piece ends at the next place where words are separate.
PIECE = 1 << 16
# Training time grows with the square of a word's length; a word of twice this is cut.
LONGEST = 1 << 10
# A word may end otherwise once more text follows, at most so many characters before its end.
UNSURE = 8

# A letter or number and a mark or space behind it are never one word. Python and the tokenizers
# library agree on these characters, whatever their versions of Unicode.
BREAK = re.compile(r"(?<=[^\W_])[\0-/:-@\[-`{-\x7f\u3001\u3002\uff01\uff0c\uff1a\uff1b\uff1f]")

SPLIT = pre_tokenizers.ByteLevel(add_prefix_space=False)


class Pieces:
    """Pieces of texts, cut where the pre-tokenizer of byte-level BPE begins a new word.

    Words of the pieces are those of the texts, except that words of 2 * `LONGEST` characters and
    more are cut: runs without any break, such as DNA or a text without spaces.
    """

    def __init__(self, texts: Iterable[str]) -> None:
        self.texts = texts
        self.n_cuts = 0
        """Cuts inside words so far."""

    def __iter__(self) -> Iterator[str]:
        for text in self.texts:
            yield from self._pieces(text)

    def _pieces(self, text: str) -> Iterator[str]:
        begin = at = 0
        while len(text) - at > 2 * LONGEST:
            found = BREAK.search(text, at + LONGEST, at + 2 * LONGEST)
            inside = False
            if found is not None:
                at = found.start()
            elif word := _last_word(text[at : at + 2 * LONGEST]):
                at += word
            else:
                inside, at = True, at + LONGEST
                self.n_cuts += 1
            if inside or at - begin >= PIECE:
                yield text[begin:at]
                begin = at
        yield text[begin:]


def _last_word(text: str) -> int:
    """Where the last word begins at which the text may be cut; 0 if there is none."""
    begins = [begin for _, (begin, _) in SPLIT.pre_tokenize_str(text)]
    # Spaces at an end are one word, which they may not be inside a text.
    sure = [b for b in begins if 0 < b <= len(text) - UNSURE and not text[b - 1].isspace()]
    return max(sure, default=0)
