import json
import pickle

import pytest

from data.tokenizer import END_OF_TEXT, EOS_NAMES, TextTokenizer, train_bpe

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
    with pytest.raises(ValueError, match=r"w\.json has no eos token"):
        assert _word_level("z").eos_id


def test_bytes_of_other_vocabularies_count_their_space_mark_as_a_space():
    assert _word_level("<0x0A>").token_bytes().tolist() == [1, 1, 3]
