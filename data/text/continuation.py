"""Text of new ids behind a prompt, as soon as it is certain."""

import os
from collections.abc import Iterable, Iterator, Sequence

from data.text.tokenizer import TextTokenizer

# Ids decoded at once while a text grows, and how many of them a new stretch of ids begins with.
MOST_IDS, KEPT_IDS = 1024, 64


def continuation(
    tokenizer: TextTokenizer, prompt: Sequence[int], new: Iterable[int]
) -> Iterator[str]:
    """One piece of text for each new id and a last one.

    Together they are the decoding of all ids without that of the prompt: decoding new ids alone
    may drop the space before them. A piece is empty while later ids can still change its text, as
    with the bytes of a character.
    """
    ids = list(prompt)
    given = tokenizer.decode(ids)
    for token_id in new:
        ids.append(token_id)
        text = "" if tokenizer.may_change(token_id) else tokenizer.decode(ids)
        certain = text.rstrip("\ufffd")
        if len(certain) <= len(given) or not certain.startswith(given):
            yield ""
            continue
        yield certain[len(given) :]
        given = certain
        if len(ids) > MOST_IDS and text == certain:
            del ids[:-KEPT_IDS]
            given = tokenizer.decode(ids)
    whole = tokenizer.decode(ids)
    yield whole[len(os.path.commonprefix([whole, given])) :]  # noqa: RUF071
