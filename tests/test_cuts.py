"""Long texts under tokenizers of real families: the ids of the whole, in bounded memory."""

import json
import random

import pytest
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)

from data.text import tokenizer as module
from data.text.tokenizer import TextTokenizer

WORDS = [
    "the",
    "and",
    "be",
    "Thou",
    "king",
    "a",
    "it's",
    "12",
    "x",
    "naïve",
    "cafe\u0301",
    "東京は",
]
ENDS = [" ", " ", " ", "  ", "\n", "\n\n", ", ", ". ", "\t", "\r\n", "   ", "", "-", "def", "<unk>"]
LLAMA3 = (
    r"(?i:'s|'t)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+|\s*[\r\n]+|\s+(?!\S)|\s+"
)
ALPHABET = pre_tokenizers.ByteLevel.alphabet()


def text(seed: int, n_words: int) -> str:
    draw = random.Random(seed)
    return "".join(draw.choice(WORDS) + draw.choice(ENDS) for _ in range(n_words))


def family(model, trainer, normalizer=None, pre_tokenizer=None, decoder=None) -> Tokenizer:
    tokenizer = Tokenizer(model)
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    if pre_tokenizer is not None:
        tokenizer.pre_tokenizer = pre_tokenizer
    if decoder is not None:
        tokenizer.decoder = decoder
    tokenizer.train_from_iterator([text(seed, 40) for seed in range(30)], trainer)
    return tokenizer


def bytes_of(normalizer=None, *, prefix: bool = False, split: bool = False) -> Tokenizer:
    """GPT-2 and, with a pattern of its own, Llama 3 and Qwen."""
    pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix, use_regex=not split)
    if split:
        parts = [pre_tokenizers.Split(Regex(LLAMA3), "isolated"), pre_tokenizer]
        pre_tokenizer = pre_tokenizers.Sequence(parts)
    trainer = trainers.BpeTrainer(
        vocab_size=320, initial_alphabet=ALPHABET, show_progress=False, special_tokens=["</s>"]
    )
    return family(models.BPE(), trainer, normalizer, pre_tokenizer, decoders.ByteLevel())


def marked(normalizer=None, pre_tokenizer=None, added: tuple[str, ...] = ()) -> Tokenizer:
    """Llama 2 and Gemma: the whole text is one word, other letters are bytes."""
    names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=names, show_progress=False, limit_alphabet=25
    )
    model = models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    split = pre_tokenizers.Metaspace(prepend_scheme="never")
    made = family(model, trainer, None, split, decoders.Sequence(parts))
    content = json.loads(made.to_str())
    content["added_tokens"] = content["added_tokens"][:3]
    content["pre_tokenizer"] = None
    tokenizer = Tokenizer.from_str(json.dumps(content))
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    if pre_tokenizer is not None:
        tokenizer.pre_tokenizer = pre_tokenizer
    tokenizer.add_tokens([AddedToken(name, normalized=False) for name in added])
    return tokenizer


def bert() -> Tokenizer:
    trainer = trainers.WordPieceTrainer(
        vocab_size=60, special_tokens=["[UNK]", "[EOS]"], show_progress=False, limit_alphabet=20
    )
    lower = normalizers.BertNormalizer(lowercase=True)
    split = pre_tokenizers.BertPreTokenizer()
    model = models.WordPiece(unk_token="[UNK]")
    return family(model, trainer, lower, split, decoders.WordPiece())


def t5(pre_tokenizer, normalizer=None) -> Tokenizer:
    trainer = trainers.UnigramTrainer(
        vocab_size=70, special_tokens=["</s>", "<unk>"], unk_token="<unk>", show_progress=False
    )
    return family(models.Unigram(), trainer, normalizer, pre_tokenizer, decoders.Metaspace())


METASPACE = pre_tokenizers.Metaspace()
MARKS = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
RUNS = [normalizers.NFKC(), normalizers.Replace(Regex(" {2,}"), " ")]
WHOLE = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
FAMILIES = {
    "gpt2": lambda: bytes_of(),
    "llama3": lambda: bytes_of(split=True),
    "qwen": lambda: bytes_of(normalizers.NFC(), split=True),
    "roberta": lambda: bytes_of(prefix=True),
    "llama2": lambda: marked(normalizers.Sequence(MARKS)),
    "llama2-metaspace": lambda: marked(None, WHOLE),
    "gemma": lambda: marked(
        MARKS[1], pre_tokenizers.Split(" ", "merged_with_previous"), ("\n\n", "\r\n", "def")
    ),
    "bert": bert,
    "t5": lambda: t5(
        pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), METASPACE]),
        normalizers.Sequence(RUNS),
    ),
    "albert": lambda: t5(METASPACE),
}


@pytest.fixture
def short_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PIECE_CHARACTERS", 90)
    monkeypatch.setattr(module, "UNSURE_TOKENS", 12)
    monkeypatch.setattr(module, "MOST_UNCUT", 400)


@pytest.mark.parametrize("name", FAMILIES)
def test_long_texts_have_the_ids_of_the_whole(short_pieces, name: str):
    tokenizer = TextTokenizer(FAMILIES[name]().to_str())
    for seed in range(40):
        long = text(seed, 400)
        pieces = list(tokenizer._pieces(long))
        assert "".join(piece for piece, _ in pieces) == long
        assert [i for _, ids in pieces for i in ids] == tokenizer.encode(long)
        assert max(len(piece) for piece, _ in pieces) <= 400


@pytest.mark.parametrize("name", FAMILIES)
def test_characters_that_a_long_text_loses_are_counted_as_in_the_whole(short_pieces, name: str):
    tokenizer, long = TextTokenizer(FAMILIES[name]().to_str()), text(1, 400)
    _, lost = tokenizer.encode_counted(["a", long, "the"], lambda: None)
    whole = tokenizer.lost([long], [tokenizer.encode(long)])
    short = tokenizer.lost(["a", "the"], [tokenizer.encode("a"), tokenizer.encode("the")])
    assert (lost["ï"], lost["\n"]) == ((whole + short)["ï"], (whole + short)["\n"])


def test_words_without_an_end_are_cut_where_no_token_covers_the_place(short_pieces):
    tokenizer = TextTokenizer(bytes_of().to_str())
    long = "".join(random.Random(0).choices("abcdefghijklmnopqrstuvwxyz", k=3000))
    pieces = list(tokenizer._pieces(long))
    assert [i for _, ids in pieces for i in ids] == tokenizer.encode(long)
    assert max(len(piece) for piece, _ in pieces) <= 90


def test_text_without_any_place_to_cut_is_refused_with_a_way_out(short_pieces):
    tokenizer = TextTokenizer(bytes_of().to_str(), "t.json")
    with pytest.raises(ValueError, match="as a whole") as error:
        tokenizer.encode_batch(["the " + "=" * 2000])
    assert str(error.value) == (
        "a text has 720 characters and more, from ' ===================' on, that t.json can only "
        "encode as a whole: divide it into several documents, a .txt such as by --split_documents "
        "blank_line"
    )
