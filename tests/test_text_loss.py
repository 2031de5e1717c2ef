"""Text that a tokenizer loses or reads as something else: counted, and said by prepare."""

import json
from pathlib import Path

import pytest
from conftest import Lightning, RunYaml
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from data.prepare.vocabulary import byte_tokenizer, train_bpe
from data.text.tokenizer import TextTokenizer

LETTERS = {letter: number for number, letter in enumerate("abc </s>")}
CAFE = "Ab café 漢字 c"
WAY_OUT = (
    "do not come back from their ids: the tokenizer lacks or changes them; take one that holds "
    "every byte, such as --tokenizer byte or one trained by --vocab_size"
)


def letters(**settings) -> Tokenizer:
    """A vocabulary of a few letters, which has neither bytes nor, unless told, an unknown token."""
    vocab = LETTERS | ({"?": 99} if "unk_token" in settings else {})
    tokenizer = Tokenizer(models.BPE(vocab, [], **settings))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken("<eos>", special=True, normalized=False)])
    return tokenizer


def changed(**parts) -> Tokenizer:
    """The byte tokenizer with other parts."""
    content = json.loads(byte_tokenizer()._text)
    tokenizer = Tokenizer.from_str(json.dumps(content))
    for name, part in parts.items():
        setattr(tokenizer, name, part)
    return tokenizer


@pytest.fixture
def warnings(lightning: Lightning, tmp_path: Path):
    """Prepares a text with a tokenizer and returns the warnings of the summary."""

    def run(tokenizer: Tokenizer, text: str, *options: str) -> list[str]:
        tokenizer.save(str(tmp_path / "t.json"))
        (tmp_path / "a.txt").write_text(text, encoding="utf-8")
        (tmp_path / "v.txt").write_text("a", encoding="utf-8")
        files = ["--input", tmp_path / "a.txt", "--val_input", tmp_path / "v.txt"]
        output = ["--output", tmp_path / "o", "--tokenizer", tmp_path / "t.json"]
        code, _, err = lightning("prepare", *files, *output, *options)
        assert code == 0, err
        return [line for line in err.splitlines() if line.startswith("warning")]

    return run


@pytest.mark.parametrize(
    ("tokenizer", "lost"),
    [
        (letters(), "5 of 13 characters (38.46%; 'A' 1, 'f' 1, 'é' 1, '漢' 1, '字' 1)"),
        (changed(normalizer=normalizers.Lowercase()), "1 of 13 characters (7.69%; 'A' 1)"),
        (
            changed(
                normalizer=normalizers.Sequence([normalizers.NFD(), normalizers.StripAccents()])
            ),
            "1 of 13 characters (7.69%; 'é' 1)",
        ),
        (changed(normalizer=normalizers.Replace("c", "")), "2 of 13 characters (15.38%; 'c' 2)"),
        (
            changed(
                pre_tokenizer=pre_tokenizers.Sequence(
                    [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.ByteLevel(False)]
                )
            ),
            "3 of 13 characters (23.08%; ' ' 3)",
        ),
    ],
)
def test_characters_that_do_not_come_back_are_counted(warnings, tokenizer: Tokenizer, lost: str):
    assert warnings(tokenizer, CAFE) == [f"warning: {lost} {WAY_OUT}"]


def test_unknown_tokens_are_counted_too(warnings):
    assert warnings(letters(unk_token="?"), "aé漢") == [
        f"warning: 2 of 4 characters (50.00%; 'é' 1, '漢' 1) {WAY_OUT}",
        "warning: 2 ids are ?, the unknown token",
    ]


def test_byte_level_vocabulary_without_all_bytes_is_not_trusted(warnings):
    tokenizer = Tokenizer(models.BPE({"a": 0, "<eos>": 1}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    assert warnings(tokenizer, "ab") == [
        f"warning: 1 of 3 characters (33.33%; 'b' 1) {WAY_OUT}",
    ]


@pytest.mark.parametrize("tokenizer", [byte_tokenizer(), train_bpe(["ab"], 300)])
def test_vocabularies_of_all_bytes_lose_nothing(warnings, tokenizer: TextTokenizer):
    assert warnings(tokenizer._tokenizer, f"{CAFE} </s> <|endoftext|>") == []


def with_tokens(*names: str) -> Tokenizer:
    """Letters, and added tokens that are not marked special."""
    tokenizer = letters()
    tokenizer.add_tokens([AddedToken(name, special=False, normalized=False) for name in names])
    return tokenizer


@pytest.mark.parametrize("kind", ["eos", "pad"])
def test_named_token_without_the_mark_is_encoded_as_text(warnings, tmp_path: Path, kind: str):
    assert warnings(with_tokens("</s>"), "a</s>b", f"--{kind}=</s>") == []
    loaded = TextTokenizer.load(tmp_path / "o" / "tokenizer.json")
    assert loaded.encode("</s>") == [LETTERS[letter] for letter in "</s>"]
    assert loaded.token_bytes()[loaded.special_id(kind)] == 0


def test_other_added_tokens_that_texts_spell_are_counted(warnings):
    assert warnings(with_tokens("<c>", "  "), "a<c>b  <c>") == [
        "warning: texts spell <c> 2 times, read as that added token"
    ]


def test_word_of_the_vocabulary_that_ends_documents_is_counted(warnings):
    assert warnings(letters(), "abca", "--eos=a") == [
        "warning: texts spell a 3 times, read as the end of a document: replace it in the texts, "
        "or name another token by --eos"
    ]


def test_dropout_truncation_and_padding_are_not_used(warnings, tmp_path: Path):
    tokenizer = changed()
    tokenizer.model.dropout = 0.5
    tokenizer.enable_truncation(2)
    tokenizer.enable_padding(length=64)
    assert warnings(tokenizer, "abc") == [
        "warning: dropout 0.5, truncation 2, padding on of the tokenizer's file: not used"
    ]
    assert TextTokenizer.load(tmp_path / "o" / "tokenizer.json").encode("abc") == [97, 98, 99]


def test_dropout_never_changes_ids():
    content = json.loads(train_bpe(["abcabc abc"] * 9, 270)._text)
    whole = TextTokenizer(json.dumps(content)).encode("abcabc abc")
    content["model"]["dropout"] = 0.9
    tokenizer = TextTokenizer(json.dumps(content))
    assert [tokenizer.encode("abcabc abc") for _ in range(5)] == [whole] * 5


def test_bytes_of_word_pieces_leave_their_marks_out():
    model = {"type": "WordPiece", "vocab": {"[UNK]": 0, "un": 1, "##é": 2}, "unk_token": "[UNK]"}
    model |= {"continuing_subword_prefix": "##", "max_input_chars_per_word": 9}
    tokenizer = TextTokenizer(json.dumps({"version": "1.0", "model": model, "decoder": None}))
    assert tokenizer.token_bytes().tolist() == [0, 2, 2]


def test_file_for_others_has_no_dropout_and_cuts_nothing(tmp_path: Path):
    content = json.loads(train_bpe(["abcabc abc"] * 9, 270)._text)
    content["model"]["dropout"] = 0.9
    content["truncation"] = {"max_length": 2, "stride": 0, "strategy": "LongestFirst"}
    content["truncation"]["direction"] = "Right"
    ours = TextTokenizer(json.dumps(content))
    ours.save_for_others(tmp_path / "t.json", bos=False)
    theirs = Tokenizer.from_file(str(tmp_path / "t.json"))
    assert [theirs.encode("abcabc abc").ids for _ in range(5)] == [ours.encode("abcabc abc")] * 5


def test_file_for_others_is_the_same_where_nothing_was_turned_off(tmp_path: Path):
    tokenizer = train_bpe(["ab"], 300)
    tokenizer.save_for_others(tmp_path / "t.json", bos=False)
    assert (tmp_path / "t.json").read_text(encoding="utf-8") == tokenizer._text


def test_text_that_was_decoded_wrongly_before_is_warned_of(warnings):
    assert warnings(byte_tokenizer()._tokenizer, "caf\ufffd \ufffd\n\n") == [
        "warning: 2 characters of the inputs are U+FFFD, which stands for bytes that another "
        "program could not decode: fetch or convert the text again"
    ]


def test_fit_repeats_at_its_start_what_the_ids_of_its_data_lack(
    warnings, lightning: Lightning, run_yaml: RunYaml, tmp_path: Path
):
    said = warnings(letters(unk_token="?"), "é".join("ab" * 100))
    overrides = {"data.path": str(tmp_path / "o"), "trainer.limit_val_batches": 0}
    config = run_yaml(overrides | {"trainer.max_steps": 1, "trainer.val_check_interval": ...})
    code, _, err = lightning("fit", "--config", config)
    name = f"warning: {tmp_path / 'o'}, as lightning prepare said"
    lines = [line for line in err.splitlines() if line.startswith(name)]
    assert (code, lines) == (0, [line.replace("warning", name) for line in said])
    assert len(said) == 2
