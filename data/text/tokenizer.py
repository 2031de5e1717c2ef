"""Text to token ids and back: load, measure and identify a tokenizer."""

import hashlib
import json
import re
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from pathlib import Path

import numpy as np
from jaxtyping import Int
from tokenizers import Encoding, Tokenizer

from data.system.atomic import replace_text
from data.text.cuts import Cuts
from data.text.specials import (
    EOS_NAMES,
    SPECIAL_NAMES,
    UNUSED,
    declared_bos,
    declared_names,
    ignored_settings,
    neutralize,
    read_text,
    told_names,
    with_bos,
    with_told_names,
)
from data.text.text_loss import counted, keeps_text, lost_characters

# Longer texts are encoded piece by piece.
PIECE_CHARACTERS = 1 << 18
# Tokens at a piece's end that what follows may change.
UNSURE_TOKENS = 64
# More without a place to cut takes some 200 bytes of memory a character.
MOST_UNCUT = 1 << 24
BYTE_TOKEN = re.compile(r"<0x[0-9A-F]{2}>")


class TextTokenizer:
    """A `tokenizer.json`, held so that no text is cut, padded or read as a special token.

    Text that spells a special token, or the eos, bos or pad whatever its mark, is encoded letter by
    letter where the vocabulary allows it. A text always has the same ids. Pickles whole.

    Raises:
        ValueError: where the text is not that of a `tokenizer.json`.
    """

    def __init__(self, text: str, source: str = "tokenizer.json") -> None:
        try:
            self._tokenizer = Tokenizer.from_str(text)
        except Exception as error:  # the library raises nothing narrower
            what = f"{source} is not a tokenizer.json of the tokenizers library ({error})"
            raise ValueError(f"{what}: name another file or prepare the data again") from error
        self._text, self.source = text, source
        content = json.loads(text)
        self._told = told_names(content)
        self.ignored = ignored_settings(content)
        """Settings of the file that would make encoding random or cut text."""
        if neutralize(content, {self.special_id(kind) for kind in SPECIAL_NAMES}):
            self._tokenizer = Tokenizer.from_str(json.dumps(content, ensure_ascii=False))
        self._content = content
        _encode_only(self._tokenizer)
        self._cuts = Cuts(content)
        self._keeps_text = keeps_text(content)
        decoder = json.dumps(content.get("decoder"))
        # Bytes that follow one another are one text or, where they are no UTF-8, U+FFFD each.
        self._falls_back = '"ByteFallback"' in decoder
        # Such decoders remove spaces that stand before what comes next.
        self._rewrites = '"cleanup": true' in decoder
        self.size: int = max(self._tokenizer.get_vocab(with_added_tokens=True).values()) + 1
        """One more than the largest id."""

    @classmethod
    def load(cls, path: Path) -> "TextTokenizer":
        """Read a `tokenizer.json`, or a folder of the Hugging Face form that holds one.

        A folder's `special_tokens_map.json` and `tokenizer_config.json` name eos, bos and pad.

        Raises:
            ValueError: where the file is missing or is no tokenizer.
        """
        file = path / "tokenizer.json" if path.is_dir() else path
        if not file.is_file():
            raise ValueError(f"{file} does not exist: name a tokenizer.json or prepare the data")
        tokenizer = cls(read_text(file), str(file))
        if not path.is_dir():
            return tokenizer
        has = tokenizer._tokenizer.token_to_id
        declared = {k: n for k, n in declared_names(path).items() if has(n) is not None}
        tokenizer = tokenizer.named(**declared)
        if (adds_bos := declared_bos(path)) is not None:
            tokenizer.adds_bos = adds_bos and tokenizer.special_id("bos") is not None
        return tokenizer

    def named(self, **names: str | None) -> "TextTokenizer":
        """The tokenizer that knows which of its tokens are `eos`, `bos` or `pad`.

        Where they would not be found by their usual names, its file is another one: it lists them
        as the tokens of a template that adds nothing, which other libraries read too.

        Raises:
            ValueError: for a name that is not in the vocabulary.
        """
        told = dict(self._told)
        for kind, name in names.items():
            token_id = None if name is None else self._tokenizer.token_to_id(name)
            if name is not None and token_id is None:
                raise ValueError(
                    f"--{kind} is {name!r}, which is no token of {self.source}: name one that it "
                    "has, or train a tokenizer that has it by --vocab_size"
                )
            if name is not None and self.special_id(kind) != token_id:
                told[kind] = name
        if told == self._told:
            return self
        ids = {name: self._tokenizer.token_to_id(name) for name in told.values()}
        return type(self)(with_told_names(json.loads(self._text), told, ids), self.source)

    def special_id(self, kind: str) -> int | None:
        """The id of `eos`, `bos` or `pad`, if the vocabulary has one."""
        names = [self._told[kind]] if kind in self._told else SPECIAL_NAMES[kind]
        ids = map(self._tokenizer.token_to_id, names)
        return next((token_id for token_id in ids if token_id is not None), None)

    @property
    def eos_id(self) -> int:
        """The id that ends a document.

        Raises:
            ValueError: where the vocabulary has none.
        """
        if (token_id := self.special_id("eos")) is None:
            raise ValueError(
                f"{self.source} has no eos token: documents could not be told apart; name one of "
                f"its tokens by --eos or add one of {', '.join(EOS_NAMES)}"
            )
        return token_id

    def tokens(self) -> dict[int, str]:
        """What each id is spelled like in the file."""
        return {i: token for token, i in self._tokenizer.get_vocab(with_added_tokens=True).items()}

    @cached_property
    def holes(self) -> list[int]:
        """Ids below `size` that are no token, or one that only fills a gap of tiktoken's ids."""
        names = self.tokens()
        return [i for i in range(self.size) if names.get(i) in (None, UNUSED.format(i))]

    @cached_property
    def adds_bos(self) -> bool:
        """Whether the file, as other libraries read it, begins each text with the bos."""
        bos_id = self.special_id("bos")
        return bos_id is not None and self._added_ids[:1] == [bos_id]

    @property
    def _added_ids(self) -> list[int]:
        """What other libraries add to a text by the file's template."""
        content = json.loads(self._text) | {"truncation": None, "padding": None}
        return Tokenizer.from_str(json.dumps(content, ensure_ascii=False)).encode("").ids

    def start_ids(self, bos: bool) -> list[int]:
        """What a document begins with: the bos or, without one, nothing.

        Raises:
            ValueError: where the vocabulary has no bos.
        """
        if not bos:
            return []
        if (bos_id := self.special_id("bos")) is None:
            raise ValueError(
                f"{self.source} has no bos token, which the model was trained with: give the "
                "tokenizer that the data was prepared with"
            )
        return [bos_id]

    @cached_property
    def unknown_id(self) -> int | None:
        """The id of what the vocabulary lacks, if it has one."""
        model = self._content["model"]
        name = model.get("unk_token")
        return model.get("unk_id") if name is None else self._tokenizer.token_to_id(name)

    @cached_property
    def odd_tokens(self) -> dict[int, str]:
        """Ids that text should not give, each with its key in `TextLoss.tokens`."""
        odd = {
            token_id: f"added {added.content}"
            for token_id, added in self._tokenizer.get_added_tokens_decoder().items()
            if not added.special and not added.content.isspace()
        }
        kinds = {"unk": self.unknown_id} | {k: self.special_id(k) for k in ("pad", "bos", "eos")}
        names = self.tokens()
        return odd | {i: f"{kind} {names[i]}" for kind, i in kinds.items() if i is not None}

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 of the file's content; spacing and the order of keys do not count."""
        canonical = json.dumps(json.loads(self._text), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(canonical.encode("utf-8")).hexdigest()

    def encode(self, text: str) -> list[int]:
        """The ids of the text alone, no special token added."""
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    @cached_property
    def _rest(self) -> Tokenizer:
        """What encodes all pieces of a long text but its first."""
        return _encode_only(Tokenizer.from_str(self._cuts.rest(self._content)))

    def encode_batch(
        self, texts: Sequence[str], check: Callable[[], None] = lambda: None
    ) -> list[Sequence[int]]:
        """The ids of each text, on all cores.

        Args:
            check: called between pieces of a long text, to leave by an error.
        """
        return self.encode_counted(texts, check, count=False)[0]

    def encode_counted(
        self, texts: Sequence[str], check: Callable[[], None], count: bool = True
    ) -> tuple[list[Sequence[int]], Counter[str]]:
        """The ids of each text, and the characters that they do not hold, in bounded memory.

        Raises:
            ValueError: for a text too long to be encoded as a whole, which cannot be cut.
        """
        short = [text for text in texts if len(text) <= PIECE_CHARACTERS]
        encodings = self._tokenizer.encode_batch_fast(short, add_special_tokens=False)
        known = [encoding.ids for encoding in encodings]
        lost = self.lost(short, known) if count else Counter()
        if len(short) == len(texts):
            return list[Sequence[int]](known), lost
        left, rows = iter(known), list[Sequence[int]]()
        for text in texts:
            if len(text) <= PIECE_CHARACTERS:
                rows.append(next(left))
                continue
            ids = array("I")
            for piece, new in self._pieces(text):
                check()
                if count and not self._keeps_text:
                    # With the id before, so that a space between the two is there.
                    before = ids[-1:].tolist()
                    lost += counted(piece) - (self._kept(before + new) - self._kept(before))
                ids.fromlist(new)
            rows.append(ids)
        return rows, lost

    def _pieces(self, text: str) -> Iterator[tuple[str, list[int]]]:
        """A long text piece by piece with its ids: an encoding takes over 100 bytes a character."""
        begin, size, tokenizer = 0, PIECE_CHARACTERS, self._tokenizer
        while len(text) - begin > size:
            if size > MOST_UNCUT:
                raise ValueError(
                    f"a text has {size:,} characters and more, from {text[begin : begin + 20]!r} "
                    f"on, that {self.source} can only encode as a whole: divide it into several "
                    "documents, a .txt such as by --split_documents blank_line"
                )
            encoding = _encoding(tokenizer, text[begin : begin + size])
            if found := self._last_cut(text, begin, encoding):
                n_ids, end = found
                yield text[begin:end], encoding.ids[:n_ids]
                begin, size, tokenizer = end, PIECE_CHARACTERS, self._rest
            else:
                size *= 2
        yield text[begin:], _encoding(tokenizer, text[begin:]).ids

    def _last_cut(self, text: str, begin: int, encoding: Encoding) -> tuple[int, int] | None:
        """Ids of an encoding up to where the text is cut, and that place."""
        if not self._cuts:
            return None
        for inside in (False, True):
            for token in range(len(encoding) - UNSURE_TOKENS, 0, -1):
                span, last = encoding.token_to_chars(token), encoding.token_to_chars(token - 1)
                assert span is not None
                assert last is not None
                word = encoding.token_to_word(token) != encoding.token_to_word(token - 1)
                place = self._cuts.place(text, begin + span[0], word, inside)
                if place is not None and begin + last[1] <= place:
                    return token, place
        return None

    def lost(self, texts: Sequence[str], rows: Sequence[Sequence[int]]) -> Counter[str]:
        """Characters of texts that their ids do not hold; an unknown token holds none."""
        if self._keeps_text:
            return Counter()
        kept = [[token_id for token_id in row if token_id != self.unknown_id] for row in rows]
        return lost_characters(texts, self._tokenizer.decode_batch(kept, skip_special_tokens=False))

    def _kept(self, ids: Sequence[int]) -> Counter[str]:
        return counted(self.decode([i for i in ids if i != self.unknown_id]))

    def decode(self, ids: Sequence[int]) -> str:
        """The text of the ids, special tokens spelled out."""
        return self._tokenizer.decode(list(ids), skip_special_tokens=False)

    def may_change(self, token_id: int) -> bool:
        """Whether the text up to this id may be another one once more ids follow."""
        if self._rewrites:
            return True
        name = self._tokenizer.id_to_token(token_id) if self._falls_back else None
        return name is not None and BYTE_TOKEN.fullmatch(name) is not None

    def save(self, path: Path) -> None:
        """Write the `tokenizer.json`."""
        replace_text(path, self._text)

    def save_for_others(self, path: Path, bos: bool) -> None:
        """Write the file so that other libraries read text as this tokenizer does.

        Args:
            bos: whether they put a bos before each text, and nothing else; without it the file
                keeps what it has.
        """
        content = dict(self._content)
        if self.ignored:
            content |= {"truncation": None, "padding": None}
        if bos and (start := self.start_ids(bos)) != self._added_ids:
            (bos_id,) = start
            with_bos(content, self.tokens()[bos_id], bos_id)
        text = json.dumps(content, indent=2, ensure_ascii=False)
        text = self._text if content == json.loads(self._text) else text
        path.write_text(text, encoding="utf-8", newline="\n")

    def token_bytes(self) -> Int[np.ndarray, " V"]:
        """UTF-8 bytes that each id stands for; 0 for special, unknown and unused ids.

        Exact for byte-level vocabularies: over the ids of a text they add up to its bytes. For
        others they leave out what the tokenizer itself drops or adds, such as a first space.
        """
        lengths = np.zeros(self.size, dtype=np.int64)
        byte_level = '"ByteLevel"' in json.dumps(self._content["decoder"])
        model = self._content["model"]
        prefix = model.get("continuing_subword_prefix") or ""
        suffix = model.get("end_of_word_suffix") or ""
        for token, token_id in self._tokenizer.get_vocab(with_added_tokens=False).items():
            text = token.removeprefix(prefix)
            # The end of a word is decoded as a space.
            text = text.removesuffix(suffix) + " " if suffix and text.endswith(suffix) else text
            # A byte-level vocabulary writes each byte as one character.
            lengths[token_id] = len(text) if byte_level else _written_bytes(text)
        for token_id, added in self._tokenizer.get_added_tokens_decoder().items():
            lengths[token_id] = 0 if added.special else len(added.content.encode("utf-8"))
        for token_id in (self.unknown_id, *map(self.special_id, SPECIAL_NAMES)):
            if token_id is not None:
                lengths[token_id] = 0
        return lengths

    def __reduce__(self) -> tuple[type, tuple[str, str]]:
        return type(self), (self._text, self.source)


def _encoding(tokenizer: Tokenizer, text: str) -> Encoding:
    # A batch, because a single `encode` holds the interpreter, and signals wait for its end.
    return tokenizer.encode_batch([text], add_special_tokens=False)[0]


def _encode_only(tokenizer: Tokenizer) -> Tokenizer:
    # It adds special tokens, which nobody asks for, and shifts offsets.
    tokenizer.post_processor = None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = True
    return tokenizer


def _written_bytes(token: str) -> int:
    # SentencePiece writes a space as U+2581 and a byte outside its alphabet as <0x0A>.
    if BYTE_TOKEN.fullmatch(token):
        return 1
    return len(token.replace("\u2581", " ").encode("utf-8"))


def check_same_ids(new: TextTokenizer, old: TextTokenizer, source: Path, grow: bool) -> None:
    """Compare what ids mean in the data of a run and to the weights that it begins with.

    Raises:
        ValueError: they mean other tokens, or there are more and `grow` does not allow it.
    """
    if new.fingerprint == old.fingerprint:
        return
    ours, theirs = new.tokens(), old.tokens()
    differ = [i for i in sorted(theirs) if ours.get(i) != theirs[i]]
    more = len(ours.keys() - theirs.keys())
    if differ:
        first = differ[0]
        raise ValueError(
            f"the data's tokenizer ({new.fingerprint[:12]}) is not that of model.from_weights "
            f"{source} ({old.fingerprint[:12]}): id {first} is {ours.get(first)!r} in the data "
            f"and {theirs[first]!r} there; prepare the data with lightning prepare --tokenizer "
            f"{old.source}"
        )
    if more and not grow:
        raise ValueError(
            f"the data's tokenizer has {more} tokens that model.from_weights {source} does not "
            "know: model.grow_vocab true adds rows for them"
        )
