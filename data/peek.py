"""Samples as the model gets them, for people: the first thing to look at when a loss is strange."""

from collections.abc import Iterator
from itertools import groupby

from jaxtyping import Int
from torch import Tensor

from data.text.continuation import continuation
from data.text.tokenizer import TextTokenizer
from data.windows import IGNORE_INDEX, Samples

# Around what nothing is learned from.
MARKS = "⟦", "⟧"


def peek(
    samples: Samples, tokenizer: TextTokenizer, first: int, count: int
) -> Iterator[tuple[str, str]]:
    """Head and text of each of `count` samples of a run.

    The text is decoded, special tokens spelled out. What is no target stands in `MARKS`, the first
    id always; padding on the right is a count.
    """
    for number in range(first, first + count):
        batch = samples.__getitems__([number])
        ids, labels = batch["input_ids"][0], batch["labels"][0]
        targets = int((labels[1:] != IGNORE_INDEX).sum())
        padding = _padding(labels)
        head = f"sample {number}: {samples.describe(number)}; {targets} targets"
        text = _marked(ids[: len(ids) - padding], labels, tokenizer)
        if padding:
            text += f"{MARKS[0]}{padding} × padding, id {ids[-1]}{MARKS[1]}"
        yield head, text


def _padding(labels: Int[Tensor, " L"]) -> int:
    """Positions on the right that are no target."""
    real = (labels != IGNORE_INDEX).nonzero()
    return len(labels) - 1 - int(real[-1]) if len(real) else len(labels)


def _marked(ids: Int[Tensor, " N"], labels: Int[Tensor, " L"], tokenizer: TextTokenizer) -> str:
    # The first id is given and never asked for.
    learned = [place > 0 and label != IGNORE_INDEX for place, label in enumerate(labels.tolist())]
    known, parts = ids.tolist(), []
    for is_target, places in groupby(range(len(ids)), key=learned.__getitem__):
        places = list(places)
        text = "".join(
            continuation(tokenizer, known[: places[0]], known[places[0] : places[-1] + 1])
        )
        parts.append(text if is_target else f"{MARKS[0]}{text}{MARKS[1]}")
    return "".join(parts)
