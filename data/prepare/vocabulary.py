"""Tokenizers to prepare with: trained, of bytes, of tiktoken, or read from a file."""

import json
import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from data.prepare.packages import package
from data.prepare.pieces import LONGEST, Pieces
from data.system.threads import Threads
from data.text.specials import END_OF_TEXT, UNUSED
from data.text.tokenizer import TextTokenizer

BYTE_SPECIALS = (END_OF_TEXT, "<|bos|>", "<|pad|>")
"""Ids 256, 257, 258 of the byte tokenizer."""

# Texts on which a converted vocabulary must agree with the one it was made from.
PROBES = (
    "Hello, world!  It's 12345 o'clock;\n\n\tdef f(x):\r\n        return x ** 2   \n",
    "  naïve ΛΟΓΟΣ Straße 東京は3月 привет 👩\u200d💻 \u00a0 a\u0301 I'LL we'Re\n \n",
    "".join(map(chr, range(1, 0x250))) + "   ",
    "x" * 50 + "1" * 20 + " " * 30 + "\n" * 7 + "=" * 40,
)


def find_tokenizer(word: str) -> TextTokenizer:
    """The tokenizer that `--tokenizer` names: byte, tiktoken:NAME, a file or a folder.

    Raises:
        ValueError: for one that cannot be had.
    """
    if word == "byte":
        return byte_tokenizer()
    if word.startswith("tiktoken:"):
        return from_tiktoken(word)
    return TextTokenizer.load(Path(word))


def train_bpe(
    documents: Iterable[str], vocab_size: int, specials: Sequence[str] = (END_OF_TEXT,)
) -> TextTokenizer:
    """Learn a byte-level BPE vocabulary; the same documents give the same one.

    A corpus too small for `vocab_size` merges gives a smaller vocabulary.

    Args:
        specials: tokens that are no text; their ids are the first.

    Raises:
        ValueError: where `vocab_size` has no room for every byte and the special tokens.
    """
    if vocab_size < (least := 256 + len(specials)):
        raise ValueError(
            f"vocab_size is {vocab_size}: a byte-level tokenizer needs at least {least} "
            f"(256 bytes and {', '.join(specials)})"
        )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        show_progress=False,
        special_tokens=[AddedToken(name, special=True, normalized=False) for name in specials],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    pieces = Pieces(documents)
    with Threads() as threads:
        texts = threads.checked(pieces)
        threads.start(lambda: tokenizer.train_from_iterator(texts, trainer=trainer)).result()
    if pieces.n_cuts:
        print(
            f"warning: text without a break for {2 * LONGEST:,} characters and more: cut "
            f"{pieces.n_cuts:,} times to train the tokenizer",
            file=sys.stderr,
        )
    trained = TextTokenizer(tokenizer.to_str(pretty=True), "the trained tokenizer")
    assert trained.size <= vocab_size
    return trained


def byte_tokenizer() -> TextTokenizer:
    """A tokenizer whose ids 0 to 255 are the bytes of UTF-8."""
    tokenizer = Tokenizer(models.BPE({_letter(i): i for i in range(256)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    specials = [AddedToken(name, special=True, normalized=False) for name in BYTE_SPECIALS]
    tokenizer.add_special_tokens(specials)
    return TextTokenizer(tokenizer.to_str(pretty=True), "byte")


def from_tiktoken(word: str) -> TextTokenizer:
    """A vocabulary of tiktoken, fetched by it, as a tokenizer.json that gives the same ids.

    Raises:
        ValueError: it cannot be loaded, or does not give the same ids.
    """
    tiktoken = package("tiktoken", "tiktoken", f"--tokenizer {word}")
    try:
        encoding = tiktoken.get_encoding(word.removeprefix("tiktoken:"))
    except Exception as error:  # of the network, or of an unknown name
        first = str(error).partition("\n")[0]
        raise ValueError(
            f"--tokenizer {word} could not be loaded ({type(error).__name__}: {first}): check its "
            "name and the network, or give a tokenizer.json"
        ) from error
    return convert(encoding, word)


def convert(encoding: Any, source: str) -> TextTokenizer:
    """The tokenizer.json of a tiktoken `Encoding`.

    Raises:
        ValueError: the ids of some texts are not the same.
    """
    ranks: dict[bytes, int] = encoding._mergeable_ranks
    names = {token: "".join(map(_letter, token)) for token in ranks}
    pairs = [
        (ranks[token], ranks[token[:cut]], ranks[token[cut:]], token, cut)
        for token in ranks
        for cut in range(1, len(token))
        if token[:cut] in ranks and token[cut:] in ranks
    ]
    merges = [(names[token[:cut]], names[token[cut:]]) for *_, token, cut in sorted(pairs)]
    vocab = {names[token]: rank for token, rank in ranks.items()}
    tokenizer = Tokenizer(models.BPE(vocab, merges, ignore_merges=True))
    # This library's patterns count {1,3}+ as a repetition and $ as the end of a line.
    pattern = re.sub(r"(\{[\d,]+\})\+", r"\1", encoding._pat_str).replace("+$", r"+\z")
    split = pre_tokenizers.Split(Regex(pattern), "isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    content = json.loads(tokenizer.to_str())
    special = {token_id: name for name, token_id in encoding._special_tokens.items()}
    content["added_tokens"] = [
        {"id": i, "content": special.get(i, UNUSED.format(i)), "special": True}
        | dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        for i in range(len(ranks), encoding.n_vocab)  # the library knows no gaps
    ]
    converted = TextTokenizer(json.dumps(content, ensure_ascii=False), source)
    for text in PROBES:
        if converted.encode(text) != encoding.encode_ordinary(text):
            raise ValueError(
                f"--tokenizer {source}: its ids cannot be reproduced (found by a test on "
                f"{text[:20]!r}): give a tokenizer.json"
            )
    return converted


def _letter(byte: int) -> str:
    """How byte-level vocabularies write a byte: itself where it is printable Latin-1."""
    if byte in PRINTABLE:
        return chr(byte)
    return chr(256 + sum(other not in PRINTABLE for other in range(byte)))


PRINTABLE = {*range(33, 127), *range(161, 173), *range(174, 256)}
