"""Where a long text may be cut so that its pieces have the ids of the whole."""

import json
import re
from typing import Any

from tokenizers import pre_tokenizers

# What in a pattern looks at letters that it does not take; spaces at an end are seen to.
LOOKS_AROUND = re.compile(r"\(\?<?[=!]|\\[bBAGKyYzZ]|\$|(?<![\[\\])\^")
SPACES_AT_END = re.compile(r"\\s\+\+?(\(\?!\\S\)|\$|\\z)")
SPACED = re.compile(r"\w \w")
# They end a word at each space between two ASCII letters or numbers.
AT_SPACES = ("BertPreTokenizer", "Whitespace", "WhitespaceSplit", "Metaspace", "ByteLevel")
# They look at no further text than the letters themselves.
IN_WORDS = ("Punctuation", "Digits")
COMPOSING = ("NFC", "NFD", "NFKC", "NFKD")
OF_LETTERS = (*COMPOSING, "Lowercase", "StripAccents", "BertNormalizer", "Nmt", "Precompiled")
MARK = "\u2581"
"""How SentencePiece writes a space."""


class Cuts:
    """Places at which the texts of a tokenizer.json may be cut; false where there are none.

    Words that a pre-tokenizer parts are encoded one by one. Inside a word, BPE never joins letters
    across a place that no token of the vocabulary covers.
    """

    def __init__(self, content: dict[str, Any]) -> None:
        model, added = content["model"], content.get("added_tokens", [])
        self._normalizers = _parts(content.get("normalizer"), "normalizers")
        self._parts = _parts(content.get("pre_tokenizer"), "pretokenizers")
        known = {part["type"] for part in self._normalizers}
        named = [token for token in added if not token["special"]]
        apart = not any(
            token["lstrip"] or token["rstrip"] or token["single_word"] for token in named
        )
        self._added = {token["content"] for token in named}
        self._from_left = apart and known <= {*COMPOSING} and _splits_from_left(self._parts)
        spaced = any(SPACED.search(word) for word in self._added)
        self._at_spaces = not (self._from_left or spaced) and apart
        self._at_spaces &= _ends_words_at_spaces(self._normalizers, self._parts)
        plain = model.get("type") == "BPE" and not (
            model.get("ignore_merges")
            or model.get("continuing_subword_prefix")
            or model.get("end_of_word_suffix")
        )
        self._bytes = plain and self._from_left and not known
        self._marks = plain and apart and _is_one_word(self._normalizers, self._parts)
        self._vocab = {*model["vocab"]} if self._bytes or self._marks else set()
        self._longest_added = max(map(len, self._added), default=0)
        self._longest_word = max(map(len, self._vocab), default=0)

    def __bool__(self) -> bool:
        return self._from_left or self._at_spaces or self._marks

    def rest(self, content: dict[str, Any]) -> str:
        """The tokenizer.json for all pieces but the first, before which nothing is put."""
        content = json.loads(json.dumps(content))
        for part in _parts(content.get("pre_tokenizer"), "pretokenizers"):
            if part["type"] == "Metaspace" and self._marks:
                part["prepend_scheme"] = "never"
        kept = [part for part in self._normalizers if part["type"] != "Prepend"]
        content["normalizer"] = {"type": "Sequence", "normalizers": kept} if kept else None
        return json.dumps(content, ensure_ascii=False)

    def place(self, text: str, at: int, new_word: bool, inside: bool) -> int | None:
        """Where the text may be cut at a token that begins `at` that place.

        Args:
            new_word: whether the pre-tokenizer begins a word there.
            inside: whether a place inside a word of the pre-tokenizer will do.
        """
        if self._at_spaces:
            at -= text[at - 1] == " "
            free = text[at] == " " and _is_plain(text[at - 1]) and _is_plain(text[at + 1 : at + 2])
        elif self._from_left and new_word:
            # Spaces at an end are one word, which they may not be inside a text.
            free = not text[at - 1].isspace() and (text[at].isascii() or not self._normalizers)
        elif self._marks or (inside and self._bytes):
            letters = self._marks or (text[at - 1].isalpha() and text[at].isalpha())
            free = letters and not self._covered(text, at, self._vocab)
        else:
            free = False
        return at if free and not self._covered(text, at, self._added) else None

    def _covered(self, text: str, at: int, tokens: set[str]) -> bool:
        most = self._longest_word if tokens is self._vocab else self._longest_added
        if not most:
            return False
        before, after = text[max(0, at - most) : at], text[at : at + most]
        if tokens is self._vocab:
            before, after = self._written(before)[-most:], self._written(after)[:most]
            if before[-1] not in tokens or after[0] not in tokens:
                return True  # unknown letters may become one token
        return any(
            before[-left:] + after[:right] in tokens
            for left in range(1, min(len(before), most - 1) + 1)
            for right in range(1, min(len(after), most - left) + 1)
        )

    def _written(self, text: str) -> str:
        if self._marks:
            return text.replace(" ", MARK)
        return "".join(word for word, _ in BYTES.pre_tokenize_str(text))


BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)


def _parts(found: dict[str, Any] | None, key: str) -> list[dict[str, Any]]:
    if found is None:
        return []
    return found[key] if found["type"] == "Sequence" else [found]


def _is_plain(letter: str) -> bool:
    return letter.isascii() and letter.isalnum()


def _splits_from_left(parts: list[dict[str, Any]]) -> bool:
    """Whether byte-level words depend on nothing before them."""
    kinds = [part["type"] for part in parts]
    if kinds[-1:] != ["ByteLevel"] or parts[-1]["add_prefix_space"]:
        return False
    if kinds == ["ByteLevel"]:
        return parts[0].get("use_regex", True)
    pattern = parts[0].get("pattern", {}).get("Regex")
    isolated = kinds == ["Split", "ByteLevel"] and parts[0]["behavior"] == "Isolated"
    simple = pattern and not LOOKS_AROUND.search(SPACES_AT_END.sub("", pattern))
    return bool(
        isolated and simple and not parts[0]["invert"] and not parts[1].get("use_regex", True)
    )


def _ends_words_at_spaces(normalizers: list[dict[str, Any]], parts: list[dict[str, Any]]) -> bool:
    kinds = {part["type"] for part in parts}
    words = all(part.get("use_regex", True) and part.get("split", True) for part in parts)
    # Replaced runs of spaces are none between two letters.
    runs = {"type": "Replace", "pattern": {"Regex": " {2,}"}}
    known = all(
        part["type"] in OF_LETTERS or {k: part.get(k) for k in runs} == runs for part in normalizers
    )
    return bool(kinds & {*AT_SPACES}) and kinds <= {*AT_SPACES, *IN_WORDS} and words and known


def _is_one_word(normalizers: list[dict[str, Any]], parts: list[dict[str, Any]]) -> bool:
    """Whether a whole text is one word in which spaces are marks, as in Llama 2 and Gemma."""
    marked = {"type": "Replace", "pattern": {"String": " "}, "content": MARK}
    prepend = {"type": "Prepend", "prepend": MARK}
    if any(part not in (marked, prepend) for part in normalizers):
        return False
    if marked in normalizers:  # there are no spaces left to split at
        return all(part["type"] == "Split" and part["pattern"] == {"String": " "} for part in parts)
    return [part["type"] for part in parts] == ["Metaspace"] and not parts[0].get("split", True)
