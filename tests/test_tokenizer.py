import json
import pickle
import random
import sys

import pytest
import tiktoken
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

from data.prepare.vocabulary import (
    byte_tokenizer,
    convert,
    find_tokenizer,
    from_tiktoken,
    train_bpe,
)
from data.text import tokenizer as tokenizer_module
from data.text.specials import END_OF_TEXT, EOS_NAMES
from data.text.tokenizer import TextTokenizer

DOCUMENTS = ["def add(a, b):\n    return a + b\n", "the naïve café λ 漢字 🙂\n"] * 3
TEXTS = ["", "a", "def add(x):\n\treturn x", "naïve λ漢🙂 \r\n\0", f"x {END_OF_TEXT} y"]


@pytest.fixture(scope="module")
def tokenizer():
    return train_bpe(iter(DOCUMENTS), 290)


def _saved(tokenizer, tmp_path, **changes):
    path = tmp_path / "tokenizer.json"
    tokenizer.save(path)
    content = json.loads(path.read_text(encoding="utf-8")) | changes
    path.write_text(json.dumps(content), encoding="utf-8")
    return path


def _word_level(eos):
    model = {"type": "WordLevel", "vocab": {"a": 0, eos: 1, "▁é": 2}, "unk_token": "a"}
    return TextTokenizer(json.dumps({"version": "1.0", "model": model, "decoder": None}), "w.json")


@pytest.mark.parametrize("text", TEXTS)
def test_text_survives_encoding_and_decoding(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize("text", TEXTS)
def test_bytes_of_the_ids_add_up_to_the_bytes_of_the_text(tokenizer, text):
    assert tokenizer.token_bytes()[tokenizer.encode(text)].sum() == len(text.encode("utf-8"))


def test_batch_is_encoded_as_its_texts_are(tokenizer):
    assert tokenizer.encode_batch(TEXTS) == [tokenizer.encode(text) for text in TEXTS]


def test_text_that_spells_the_separator_is_no_separator(tokenizer):
    assert tokenizer.eos_id == 0
    assert tokenizer.eos_id not in tokenizer.encode(END_OF_TEXT)
    assert tokenizer.token_bytes()[tokenizer.eos_id] == 0
    assert tokenizer.decode([tokenizer.eos_id]) == END_OF_TEXT


def test_same_documents_train_the_same_vocabulary(tokenizer):
    again, other = train_bpe(iter(DOCUMENTS), 290), train_bpe(iter(DOCUMENTS), 289)
    assert again.fingerprint == tokenizer.fingerprint != other.fingerprint


def test_vocabulary_has_the_size_asked_for(tokenizer):
    assert tokenizer.size == 290


def test_small_corpus_gives_a_smaller_vocabulary():
    assert train_bpe(["ab"], 300).size == 258


def test_vocabulary_without_room_for_every_byte_is_refused():
    with pytest.raises(ValueError, match=r"vocab_size is 256: .* needs at least 257"):
        train_bpe(DOCUMENTS, 256)
    with pytest.raises(ValueError, match=r"needs at least 258 \(256 bytes and <e>, <p>\)"):
        train_bpe(DOCUMENTS, 257, ["<e>", "<p>"])


def test_special_tokens_asked_for_have_the_first_ids():
    trained = train_bpe(["ab"], 300, ["<end>", "<|bos|>"]).named(eos="<end>")
    assert (trained.eos_id, trained.special_id("bos"), trained.special_id("pad")) == (0, 1, None)
    assert trained.encode("<end>") == [trained.encode(letter)[0] for letter in "<end>"]


def test_saved_tokenizer_loads_as_the_same(tokenizer, tmp_path):
    loaded = TextTokenizer.load(_saved(tokenizer, tmp_path))
    assert loaded.fingerprint == tokenizer.fingerprint
    assert loaded.encode_batch(TEXTS) == tokenizer.encode_batch(TEXTS)


def test_pickled_tokenizer_keeps_reading_separators_as_text(tokenizer):
    copy = pickle.loads(pickle.dumps(tokenizer))
    assert copy.encode(END_OF_TEXT) == tokenizer.encode(END_OF_TEXT)


def test_truncation_in_the_file_cuts_no_text(tokenizer, tmp_path):
    cut = {"max_length": 3, "stride": 0, "strategy": "LongestFirst", "direction": "Right"}
    loaded = TextTokenizer.load(_saved(tokenizer, tmp_path, truncation=cut))
    assert loaded.encode(TEXTS[2]) == tokenizer.encode(TEXTS[2])


def test_missing_tokenizer_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"gone\.json does not exist"):
        TextTokenizer.load(tmp_path / "gone.json")


@pytest.mark.parametrize("content", ["", "{}", "not json"])
def test_file_that_is_no_tokenizer_is_refused(tmp_path, content):
    path = tmp_path / "t.json"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(ValueError, match=r"t\.json is not a tokenizer\.json"):
        TextTokenizer.load(path)


@pytest.mark.parametrize("name", EOS_NAMES)
def test_separator_is_found_under_its_usual_names(name):
    assert _word_level(name).eos_id == 1


def test_tokenizer_without_separator_is_refused():
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        assert _word_level("z").eos_id
    assert str(caught.value) == (
        "w.json has no eos token: documents could not be told apart; name one of its tokens by "
        "--eos or add one of <|endoftext|>, </s>, <eos>, <|end_of_text|>, <|eot_id|>, <|im_end|>, "
        "[EOS]"
    )


def test_bytes_of_other_vocabularies_count_their_space_mark_as_a_space():
    assert _word_level("<0x0A>").token_bytes().tolist() == [0, 1, 3]  # the first is unknown


# Names that are told


@pytest.fixture
def hub_folder(tokenizer, tmp_path):
    """Factory: a folder of the Hugging Face form, with files by name."""

    def make(**files):
        tokenizer.save(tmp_path / "tokenizer.json")
        for name, content in files.items():
            (tmp_path / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")
        return tmp_path

    return make


@pytest.mark.parametrize(
    ("files", "names"),
    [
        ({}, (END_OF_TEXT, None, None)),
        ({"tokenizer_config": {"eos_token": "a", "bos_token": {"content": "b"}}}, ("a", "b", None)),
        ({"special_tokens_map": {"pad_token": "c", "eos_token": None}}, (END_OF_TEXT, None, "c")),
        (
            {"special_tokens_map": {"eos_token": "a"}, "tokenizer_config": {"eos_token": "b"}},
            ("b", None, None),
        ),
        ({"tokenizer_config": {"eos_token": "<not there>"}}, (END_OF_TEXT, None, None)),
    ],
)
def test_folder_names_its_special_tokens(hub_folder, tokenizer, files, names):
    loaded = TextTokenizer.load(hub_folder(**files))
    expected = [name and tokenizer._tokenizer.token_to_id(name) for name in names]
    assert [loaded.special_id(kind) for kind in ("eos", "bos", "pad")] == expected


def test_told_names_outlive_saving_and_pickling(tokenizer, tmp_path):
    told = tokenizer.named(eos="a").named(pad="b").named(eos="c")
    told.save(tmp_path / "told.json")
    loaded = TextTokenizer.load(tmp_path / "told.json")
    ids = [tokenizer._tokenizer.token_to_id(name) for name in ("c", "b")]
    for copy in (told, loaded, pickle.loads(pickle.dumps(told))):
        assert [copy.special_id("eos"), copy.special_id("pad")] == ids
    assert loaded.fingerprint == told.fingerprint != tokenizer.fingerprint


def test_told_names_change_no_ids_here_or_in_the_library(tokenizer, tmp_path):
    told = tokenizer.named(eos="a")
    told.save(tmp_path / "told.json")
    library = Tokenizer.from_file(str(tmp_path / "told.json"))
    assert library.encode(TEXTS[3]).ids == told.encode(TEXTS[3]) == tokenizer.encode(TEXTS[3])


def test_names_that_would_be_found_leave_the_file_as_it_is(tokenizer):
    assert tokenizer.named(eos=END_OF_TEXT, bos=None) is tokenizer


def _sequences(names):
    return [{"Sequence": {"id": name, "type_id": i}} for i, name in enumerate(names)]


def test_template_of_the_file_stays_and_adds_nothing(tokenizer, tmp_path):
    template = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "a", "type_id": 0}}, *_sequences("A")],
        "pair": _sequences("AB"),
        "special_tokens": {"a": {"id": "a", "ids": [66], "tokens": ["a"]}},
    }
    told = TextTokenizer.load(_saved(tokenizer, tmp_path, post_processor=template)).named(eos="b")
    told.save(tmp_path / "told.json")
    assert told.encode("x") == tokenizer.encode("x")
    assert Tokenizer.from_file(str(tmp_path / "told.json")).encode("x").ids == [
        66,
        *told.encode("x"),
    ]


def test_name_that_is_no_token_is_refused(tokenizer):
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        tokenizer.named(pad="<nix>")
    assert str(caught.value) == (
        "--pad is '<nix>', which is no token of the trained tokenizer: name one that it has, or "
        "train a tokenizer that has it by --vocab_size"
    )


def test_damaged_file_of_a_folder_is_refused(hub_folder):
    folder = hub_folder()
    (folder / "tokenizer_config.json").write_text("{", encoding="utf-8")
    with pytest.raises(
        ValueError, match=r"tokenizer_config\.json is damaged \(.*\): fetch it again"
    ):
        TextTokenizer.load(folder)


def test_folder_without_a_tokenizer_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"tokenizer\.json does not exist: name a tokenizer\.json"):
        find_tokenizer(str(tmp_path))


def test_file_that_is_no_text_is_refused(tmp_path):
    (tmp_path / "t.json").write_bytes(b"\xff")
    with pytest.raises(
        ValueError, match=r"t\.json is not a tokenizer\.json \(.*\): name another file"
    ):
        find_tokenizer(str(tmp_path / "t.json"))


# Bytes and tiktoken


def test_byte_tokenizer_counts_bytes():
    tokenizer = find_tokenizer("byte")
    assert tokenizer.encode("aλ\n\0 ") == [97, 206, 187, 10, 0, 32]
    assert [tokenizer.special_id(kind) for kind in ("eos", "bos", "pad")] == [256, 257, 258]
    assert (tokenizer.size, tokenizer.decode([206, 187])) == (259, "λ")
    assert tokenizer.token_bytes().tolist() == [1] * 256 + [0] * 3


CL100K = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+"
    r"|\s++$|\s*[\r\n]|\s+(?!\S)|\s"
)
R50K = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"
MERGED = [
    "th",
    "he",
    "the",
    " t",
    " the",
    "in",
    "  ",
    "    ",
    "==",
    "\n\n",
    "12",
    "123",
    "23",
    "23456",
]


def _encoding(pattern=CL100K):
    ranks = {bytes([i]): i for i in range(256)} | {
        m.encode(): 256 + i for i, m in enumerate(MERGED)
    }
    special = {END_OF_TEXT: len(ranks) + 1, "<|fim|>": len(ranks) + 4}  # with gaps, as cl100k has
    return tiktoken.Encoding("tiny", pat_str=pattern, mergeable_ranks=ranks, special_tokens=special)


def _random_texts(number):
    draw = random.Random(number)
    parts = [
        "a",
        "the",
        "Zz",
        " ",
        "   ",
        "\n",
        "\r\n",
        "'s",
        "'LL",
        "1",
        "23456",
        "!",
        "==",
        "λ",
        "漢",
        "/",
    ]
    return ["".join(draw.choices(parts, k=draw.randrange(70))) for _ in range(200)]


@pytest.mark.parametrize("pattern", [CL100K, R50K])
def test_converted_tiktoken_gives_the_same_ids(pattern):
    encoding = _encoding(pattern)
    converted, texts = convert(encoding, "tiny"), _random_texts(0)
    assert converted.encode_batch(texts) == [encoding.encode_ordinary(text) for text in texts]
    assert (converted.eos_id, converted.size) == (encoding.eot_token, encoding.n_vocab)
    assert converted._tokenizer.token_to_id("<|fim|>") == encoding.n_vocab - 1


def test_tiktoken_that_cannot_be_converted_is_refused():
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        convert(_encoding(r"\S+"), "tiktoken:odd")  # drops spaces
    assert str(caught.value).startswith("--tokenizer tiktoken:odd: its ids cannot be reproduced (")
    assert str(caught.value).endswith("): give a tokenizer.json")


def test_tiktoken_is_loaded_by_name(monkeypatch):
    monkeypatch.setattr(tiktoken, "get_encoding", lambda name: {"tiny": _encoding()}[name])
    assert find_tokenizer("tiktoken:tiny").eos_id == 271
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        from_tiktoken("tiktoken:nix")
    assert str(caught.value) == (
        "--tokenizer tiktoken:nix could not be loaded (KeyError: 'nix'): check its name and the "
        "network, or give a tokenizer.json"
    )


def test_missing_tiktoken_names_its_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "tiktoken", None)
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        find_tokenizer("tiktoken:gpt2")
    assert str(caught.value) == (
        "--tokenizer tiktoken:gpt2 needs the package tiktoken: pip install -e '.[tiktoken]'"
    )


# Long texts


@pytest.mark.parametrize(
    "make",
    [lambda: train_bpe(_random_texts(1), 320), byte_tokenizer, lambda: convert(_encoding(), "t")],
)
def test_long_texts_have_the_ids_of_the_whole(monkeypatch, make):
    tokenizer, texts = make(), ["".join(_random_texts(seed)[:9]) for seed in range(2, 40)]
    whole = tokenizer.encode_batch(texts)
    monkeypatch.setattr(tokenizer_module, "PIECE_CHARACTERS", 90)
    monkeypatch.setattr(tokenizer_module, "UNSURE_TOKENS", 24)
    assert tokenizer._cuts
    assert [list(ids) for ids in tokenizer.encode_batch(texts)] == whole


def test_long_text_without_a_word_end_is_encoded_whole(monkeypatch):
    monkeypatch.setattr(tokenizer_module, "PIECE_CHARACTERS", 90)
    assert list(byte_tokenizer().encode_batch(["x" * 1000])[0]) == [120] * 1000


def _splitting(*parts):
    tokenizer = Tokenizer(models.BPE({"a": 0, END_OF_TEXT: 1}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(list(parts))
    tokenizer.decoder = decoders.ByteLevel()
    return TextTokenizer(tokenizer.to_str())


BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)


@pytest.mark.parametrize(
    ("parts", "cut"),
    [
        ([pre_tokenizers.Split(Regex(r"\S+|\s+(?!\S)|\s"), "isolated"), BYTES], True),
        ([pre_tokenizers.Split(Regex(r"(?<=a)b|."), "isolated"), BYTES], False),
        ([pre_tokenizers.Split(Regex(r"a(?=b)|."), "isolated"), BYTES], False),
        ([pre_tokenizers.Split(Regex(r"a\b|."), "isolated"), BYTES], False),
        ([pre_tokenizers.Split(Regex(r"^a|[^b]"), "isolated"), BYTES], False),
        ([pre_tokenizers.Split(Regex(r"[^b]+|b"), "isolated"), BYTES], True),
        ([pre_tokenizers.Split(Regex(r"a$|."), "isolated"), BYTES], False),
        ([pre_tokenizers.Split(Regex(r"\s"), "removed"), BYTES], False),
        ([pre_tokenizers.Digits(), BYTES], False),
        ([pre_tokenizers.ByteLevel(add_prefix_space=True)], True),
        ([pre_tokenizers.ByteLevel(add_prefix_space=False)], True),
        ([BYTES], False),
        ([pre_tokenizers.Metaspace()], True),
    ],
)
def test_texts_are_cut_where_words_depend_on_nothing_else(parts, cut):
    assert bool(_splitting(*parts)._cuts) == cut


def test_tokens_that_take_what_is_around_them_forbid_a_cut(tokenizer, tmp_path):
    added = json.loads(tokenizer._text)["added_tokens"]
    added.append(added[0] | {"id": 290, "content": "def", "special": False, "lstrip": True})
    assert not TextTokenizer.load(_saved(tokenizer, tmp_path, added_tokens=added))._cuts


# Ids without a token


def test_ids_that_are_no_token_are_known():
    model = {"type": "WordLevel", "vocab": {"a": 0, "</s>": 2, "b": 5}, "unk_token": "a"}
    tokenizer = TextTokenizer(json.dumps({"version": "1.0", "model": model, "decoder": None}))
    assert (tokenizer.holes, byte_tokenizer().holes) == ([1, 3, 4], [])


def test_tokens_that_fill_gaps_of_tiktoken_are_no_tokens():
    converted = convert(_encoding(), "tiny")
    names = converted.tokens()
    assert [names[number] for number in converted.holes] == [
        "<|unused270|>",
        "<|unused272|>",
        "<|unused273|>",
    ]
