"""What a preparation says at its end: counts, text that was left out, splits without text."""

import math
from pathlib import Path
from typing import Any

from data.prepare.texts import BLANK, EMPTY, NULS, OVERLAP, REPLACED, UNDECODED, UNSPLIT
from data.prepare.work import SPLITS
from data.text.text_loss import TextLoss

WARNINGS = {
    REPLACED: "documents with invalid UTF-8, replaced by U+FFFD",
    UNDECODED: "characters of the inputs are U+FFFD, which stands for bytes that another program "
    "could not decode: fetch or convert the text again",
    NULS: "documents hold NUL characters, which are kept",
    UNSPLIT: "text files do not hold the separator of --split_documents: each is one document",
    OVERLAP: "training documents are in the validation files too: the validation loss is too low; "
    "take them out of either",
}
"""Counted reasons that get a line of their own, which begins with the count."""


def summary(meta: dict[str, Any], output: Path) -> list[str]:
    """Lines on what was written and what was left out; a warning where that was a fault."""
    lines = []
    for split in SPLITS:
        counts, files = meta[split], meta[split]["files"]
        lines.append(
            f"{output / files[0]}{f' … {files[-1]}' if files[1:] else ''}: "
            f"{counts['tokens']:,} tokens, {counts['documents']:,} documents, "
            f"{counts['eos']:,} EOS written, {counts['bytes']:,} bytes of text"
        )
    left = dict(meta["left_out"])
    none = [(reason, left.pop(reason, 0)) for reason in (BLANK, EMPTY)]
    if skipped := [f"{count:,} {reason}{'s' * (count > 1)}" for reason, count in none if count]:
        lines.append(f"{' and '.join(skipped)} skipped")
    for reason, text in WARNINGS.items():
        if count := left.pop(reason, 0):
            lines.append(f"warning: {count:,} {text}")
    if pairs := meta.get("repeated"):
        one, other = pairs[0]
        more = f" and {len(pairs) - 1:,} more" if pairs[1:] else ""
        lines.append(
            f"warning: {len(pairs):,} inputs repeat the text of another, which counts double: "
            f"{other} that of {one}{more}; leave them out"
        )
    if left:
        reasons = ", ".join(f"{count:,} {reason}" for reason, count in left.items())
        lines.append(f"warning: {sum(left.values()):,} left out: {reasons}")
    settings, size = meta.get("made_from", {}).get("settings", {}), meta["vocab_size"]
    asked = settings.get("vocab_size")
    if asked is not None and size < asked:
        lines.append(
            f"warning: the tokenizer has {size:,} ids of the {asked:,} asked for: the text gives "
            "no more; name more text, or train with that size"
        )
    if ignored := meta.get("ignored_settings"):
        lines.append(f"warning: {', '.join(ignored)} of the tokenizer's file: not used")
    return lines + TextLoss.read(meta.get("text_loss", {})).warnings


def repeated(names: list[str], state: dict[str, Any]) -> list[list[str]]:
    """Pairs of inputs with the same texts: one, and a later one that repeats it."""
    first: dict[tuple[int, int], str] = {}
    pairs = []
    counts = zip(*(state[split]["sources"] for split in SPLITS), strict=True)
    for name, count, digest in zip(names, map(sum, counts), state.get("digests", ()), strict=False):
        if count and first.setdefault((count, digest), name) != name:
            pairs.append([first[count, digest], name])
    return pairs


def refuse_empty(name: str, state: dict[str, Any], more_text: str | None) -> None:
    """Refuse a corpus one of whose splits has no document.

    Args:
        name: of the inputs.
        state: counts of all documents.
        more_text: the way out where files say the split; None where each text says it.

    Raises:
        ValueError: there is one.
    """
    train, val = (state[split]["documents"] for split in SPLITS)
    if train and val:
        return
    left = ", ".join(f"{count:,} {reason}" for reason, count in state["left_out"].items())
    empty = f"0 documents / 0 tokens{left and f' ({left})'}"
    if not train and not val:
        raise ValueError(f"{name}: {empty}: name inputs that hold text")
    if more_text is not None:
        remedy = more_text
    elif train + val == 1:
        remedy = "validate on files given by --val_input, or cut it up by --split_documents"
    elif val:
        remedy = "give a smaller --val_fraction, or validate on files given by --val_input"
    else:
        share = math.ceil(state["lowest_share"] * 1000) / 1000
        remedy = f"give --val_fraction {share} or more, or files for it by --val_input"
    raise ValueError(
        f"{name}: its {'val' if train else 'train'} part has {empty}, the other all "
        f"{train + val:,}: {remedy}"
    )
