"""Text that the ids of a tokenizer do not hold, and text that reads as special tokens."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from tokenizers import pre_tokenizers

SHOWN = 8
"""Characters that a report names, the most frequent first."""

COUNTED = 1 << 20
"""Characters that are counted at once."""

SPELLED = {
    "eos": "the end of a document: replace it in the texts, or name another token by --eos",
    "bos": "the beginning of a document: replace it in the texts",
    "pad": "padding: replace it in the texts, or name another token by --pad",
    "added": "that added token",
}
"""What text that spells a token of a kind is read as."""


@dataclass
class TextLoss:
    """Counts over documents."""

    n_characters: int = 0
    """Characters of text."""
    lost: Counter[str] = field(default_factory=Counter)
    """Characters that the decoded ids lack."""
    tokens: Counter[str] = field(default_factory=Counter)
    """Ids that texts gave: by kind, "unk" or one of `SPELLED`, a space, and the token."""

    def __add__(self, other: "TextLoss") -> "TextLoss":
        return TextLoss(
            self.n_characters + other.n_characters,
            self.lost + other.lost,
            self.tokens + other.tokens,
        )

    @classmethod
    def read(cls, content: dict[str, Any]) -> "TextLoss":
        """The counts that `content` wrote."""
        return cls(
            content.get("characters", 0),
            Counter(content.get("lost", {})),
            Counter(content.get("tokens", {})),
        )

    @property
    def content(self) -> dict[str, Any]:
        """As JSON holds it."""
        return {"characters": self.n_characters, "lost": self.lost, "tokens": self.tokens}

    @property
    def n_lost_bytes(self) -> int:
        """UTF-8 bytes of the lost characters."""
        return sum(len(char.encode("utf-8")) * count for char, count in self.lost.items())

    @property
    def share(self) -> str:
        """Number and share of the lost characters, and which they are most of all."""
        n_lost = self.lost.total()
        named = [f"{char!r} {count:,}" for char, count in self.lost.most_common(SHOWN)]
        more = ", …" if len(self.lost) > SHOWN else ""
        return (
            f"{n_lost:,} of {self.n_characters:,} characters "
            f"({n_lost / max(1, self.n_characters):.2%}; {', '.join(named)}{more})"
        )

    @property
    def losses(self) -> list[str]:
        """A line for each kind of text that the ids do not hold."""
        lines = []
        if self.lost:
            lines.append(
                f"{self.share} do not come back from their ids: the tokenizer lacks or changes "
                "them; take one that holds every byte, such as --tokenizer byte or one trained by "
                "--vocab_size"
            )
        for key, count in sorted(self.tokens.items()):
            kind, _, name = key.partition(" ")
            if kind == "unk":
                lines.append(f"{count:,} ids are {name}, the unknown token")
        return lines

    @property
    def warnings(self) -> list[str]:
        """A line for each kind of loss, and for each special token that texts spell."""
        lines = [f"warning: {line}" for line in self.losses]
        for key, count in sorted(self.tokens.items()):
            kind, _, name = key.partition(" ")
            if kind in SPELLED:
                times = f"{count:,} time{'s' * (count > 1)}"
                lines.append(f"warning: texts spell {name} {times}, read as {SPELLED[kind]}")
        return lines


def lost_characters(texts: Sequence[str], decoded: Sequence[str]) -> Counter[str]:
    """Characters that decoded texts have less often than the texts themselves."""
    lost: Counter[str] = Counter()
    for text, found in zip(texts, decoded, strict=True):
        if text != found:
            lost += counted(text) - counted(found)
    return lost


def counted(text: str) -> Counter[str]:
    """Each character of a text, and how often it is there."""
    counts: Counter[str] = Counter()
    # Counting a long text at once would keep the main thread from hearing signals.
    for begin in range(0, len(text), COUNTED):
        counts.update(text[begin : begin + COUNTED])
    return counts


def keeps_text(content: dict[str, Any]) -> bool:
    """Whether any text comes back whole from its ids, as far as a tokenizer.json alone tells.

    True for byte-level BPE with all bytes and nothing that removes or rewrites text.
    """
    model = content["model"]
    found = content.get("pre_tokenizer") or {}
    *before, last = found["pretokenizers"] if found.get("type") == "Sequence" else [found]
    splits = all(part["type"] == "Split" and part["behavior"] != "Removed" for part in before)
    added = content.get("added_tokens", [])
    return bool(
        model.get("type") == "BPE"
        and not model.get("continuing_subword_prefix")
        and not model.get("end_of_word_suffix")
        and not content.get("normalizer")
        and splits
        and last.get("type") == "ByteLevel"
        and (content.get("decoder") or {}).get("type") == "ByteLevel"
        and all(token["special"] or not (token["lstrip"] or token["rstrip"]) for token in added)
        and all(letter in model["vocab"] for letter in pre_tokenizers.ByteLevel.alphabet())
    )
