"""Text to token ids and back: train, load, measure and identify a tokenizer."""

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
from jaxtyping import Int
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

END_OF_TEXT = "<|endoftext|>"
"""The document separator of the tokenizers we train; always id 0."""

EOS_NAMES = (END_OF_TEXT, "</s>", "<eos>", "<|end_of_text|>", "<|eot_id|>", "<|im_end|>", "[EOS]")
"""Names of the end of a document; the first that a vocabulary has is taken."""

MIN_VOCAB_SIZE = 257
"""The 256 bytes and the document separator."""


class TextTokenizer:
    """A `tokenizer.json`, held so that no text is cut, padded or read as a special token.

    Text that spells a special token is encoded letter by letter: an id of the separator always
    is a separator. Pickles whole.

    Raises:
        ValueError: where the text is not that of a `tokenizer.json`.
    """

    def __init__(self, text: str, source: str = "tokenizer.json") -> None:
        try:
            self._tokenizer = Tokenizer.from_str(text)
        except Exception as error:  # the library raises nothing narrower
            what = f"{source} is not a tokenizer.json of the tokenizers library ({error})"
            raise ValueError(f"{what}: name another file or prepare the data again") from error
        # Files saved for fine-tuning carry truncation and padding that would act in silence.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._tokenizer.encode_special_tokens = True
        self._text, self.source = text, source
        self.size: int = max(self._tokenizer.get_vocab(with_added_tokens=True).values()) + 1
        """One more than the largest id."""

    @classmethod
    def load(cls, path: Path) -> "TextTokenizer":
        """Read a `tokenizer.json`.

        Raises:
            ValueError: where the file is missing or is no tokenizer.
        """
        if not path.is_file():
            raise ValueError(f"{path} does not exist: name a tokenizer.json or prepare the data")
        return cls(path.read_text(encoding="utf-8"), str(path))

    @property
    def eos_id(self) -> int:
        """The id that ends a document.

        Raises:
            ValueError: where the vocabulary has none of `EOS_NAMES`.
        """
        for name in EOS_NAMES:
            if (token_id := self._tokenizer.token_to_id(name)) is not None:
                return token_id
        raise ValueError(
            f"{self.source} has no eos token: documents could not be told apart; "
            f"add one of {', '.join(EOS_NAMES)}"
        )

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the file's content; spacing and the order of keys do not count."""
        canonical = json.dumps(json.loads(self._text), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(canonical.encode("utf-8")).hexdigest()

    def encode(self, text: str) -> list[int]:
        """The ids of the text alone, no special token added."""
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of each text, on all cores."""
        encodings = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [encoding.ids for encoding in encodings]

    def decode(self, ids: Sequence[int]) -> str:
        """The text of the ids, special tokens spelled out."""
        return self._tokenizer.decode(list(ids), skip_special_tokens=False)

    def decode_stream(self, ids: Iterable[int]) -> Iterator[str]:
        """One piece of text for each id, empty while the last character is not complete."""
        stream = decoders.DecodeStream(skip_special_tokens=False)
        for token_id in ids:
            yield stream.step(self._tokenizer, token_id) or ""

    def save(self, path: Path) -> None:
        """Write the `tokenizer.json`."""
        path.write_text(self._text, encoding="utf-8", newline="\n")

    def token_bytes(self) -> Int[np.ndarray, " V"]:
        """UTF-8 bytes that each id stands for; 0 for special and unused ids.

        Exact for byte-level vocabularies: over the ids of a text they add up to its bytes. For
        others they leave out what the tokenizer itself drops or adds, such as a first space.
        """
        lengths = np.zeros(self.size, dtype=np.int64)
        byte_level = '"ByteLevel"' in json.dumps(json.loads(self._text)["decoder"])
        for token, token_id in self._tokenizer.get_vocab(with_added_tokens=False).items():
            # A byte-level vocabulary writes each byte as one character.
            lengths[token_id] = len(token) if byte_level else _written_bytes(token)
        for token_id, added in self._tokenizer.get_added_tokens_decoder().items():
            lengths[token_id] = 0 if added.special else len(added.content.encode("utf-8"))
        return lengths

    def __reduce__(self) -> tuple[type, tuple[str, str]]:
        return type(self), (self._text, self.source)


def train_bpe(documents: Iterable[str], vocab_size: int) -> TextTokenizer:
    """Learn a byte-level BPE vocabulary; the same documents give the same one.

    A corpus too small for `vocab_size` merges gives a smaller vocabulary.

    Raises:
        ValueError: where `vocab_size` has no room for every byte and the separator.
    """
    if vocab_size < MIN_VOCAB_SIZE:
        raise ValueError(
            f"vocab_size is {vocab_size}: a byte-level tokenizer needs at least {MIN_VOCAB_SIZE} "
            f"(256 bytes and {END_OF_TEXT})"
        )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        show_progress=False,
        special_tokens=[AddedToken(END_OF_TEXT, special=True, normalized=False)],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(documents, trainer=trainer)
    trained = TextTokenizer(tokenizer.to_str(pretty=True))
    assert trained.size <= vocab_size
    return trained


def _written_bytes(token: str) -> int:
    # SentencePiece writes a space as U+2581 and a byte outside its alphabet as <0x0A>.
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        return 1
    return len(token.replace("\u2581", " ").encode("utf-8"))
