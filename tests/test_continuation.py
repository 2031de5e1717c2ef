"""Text behind a prompt: whole, with its spaces, and never a failure on bytes that are no UTF-8."""

import dataclasses
import random
import re
from pathlib import Path

import pytest
from conftest import Lightning, RunYaml
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, processors

from callbacks.run.trained import load_trained, read_trained
from data.prepare.prepare import Settings, prepare_files
from data.prepare.vocabulary import byte_tokenizer
from data.text import continuation as module
from data.text.continuation import continuation
from data.text.tokenizer import TextTokenizer
from lm.hub.tasks import model_args


def llama() -> TextTokenizer:
    """A vocabulary in Llama's form: a mark for spaces, bytes for other letters, a bos."""
    names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *"▁redblu"]
    vocab = {name: number for number, name in enumerate(names)}
    merges = [("▁", "r"), ("▁r", "e"), ("▁re", "d"), ("▁", "b"), ("▁b", "l"), ("▁bl", "u")]
    for one, two in (*merges, ("▁blu", "e")):
        vocab[one + two] = len(vocab)
    merges.append(("▁blu", "e"))
    tokenizer = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True))
    marks = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    tokenizer.normalizer = normalizers.Sequence(marks)
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*parts, decoders.Strip(" ", 1, 0)])
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in names[:3]])
    tokenizer.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 1)])
    return TextTokenizer(tokenizer.to_str())


def word_pieces() -> TextTokenizer:
    """A vocabulary whose decoder takes spaces before marks away again."""
    words = ["[UNK]", "do", "n", "'", "t", ".", "##s", "[EOS]"]
    model = models.WordPiece({w: i for i, w in enumerate(words)}, unk_token="[UNK]")
    tokenizer = Tokenizer(model)
    tokenizer.decoder = decoders.WordPiece(cleanup=True)
    return TextTokenizer(tokenizer.to_str())


def test_space_between_prompt_and_text_is_kept():
    tokenizer = llama()
    red, blue = tokenizer.encode("red"), tokenizer.encode("blue")
    assert list(continuation(tokenizer, red, blue)) == [" blue", ""]
    assert list(continuation(tokenizer, [], blue)) == ["blue", ""]


@pytest.mark.parametrize("make", [llama, word_pieces, byte_tokenizer])
@pytest.mark.parametrize("n_prompt", [0, 1, 4])
def test_pieces_add_up_to_the_decoding_of_all_ids(make, n_prompt: int, monkeypatch):
    monkeypatch.setattr(module, "MOST_IDS", 20)
    monkeypatch.setattr(module, "KEPT_IDS", 6)
    tokenizer, draw = make(), random.Random(n_prompt)
    for _ in range(60):
        prompt = tokenizer.encode("red blue"[:n_prompt])
        ids = [draw.randrange(tokenizer.size) for _ in range(draw.randrange(50))]
        before, whole = tokenizer.decode(prompt), tokenizer.decode(prompt + ids)
        assert before + "".join(continuation(tokenizer, prompt, ids)) == whole


@pytest.mark.parametrize("make", [llama, byte_tokenizer])
def test_character_that_is_cut_off_is_replaced(make):
    tokenizer = make()
    ids = [tokenizer.encode("漢")[-3:][place] for place in (0, 1, 2, 0)]
    assert "".join(continuation(tokenizer, [], ids[:3])) == "漢"
    assert "漢" not in "".join(continuation(tokenizer, [], ids[1:3]))
    assert "\ufffd" in "".join(continuation(tokenizer, [], ids[:2]))


def test_text_comes_while_ids_are_drawn():
    drawn = continuation(byte_tokenizer(), [], iter("aé".encode()))
    assert [next(drawn), next(drawn), next(drawn)] == ["a", "", "é"]


def test_prompt_that_normalization_changes_is_left_out_whole():
    content = llama()._tokenizer
    content.normalizer = normalizers.Sequence([normalizers.Lowercase(), content.normalizer])
    tokenizer = TextTokenizer(content.to_str())
    ids = tokenizer.encode("RED")
    assert "".join(continuation(tokenizer, ids, tokenizer.encode("blue"))) == " blue"


# A bos at the beginning of documents


@pytest.fixture
def with_bos(lightning: Lightning, run_yaml: RunYaml, tmp_path: Path) -> Path:
    """Folder of a short run on documents of which each begins with a bos."""
    llama().save(tmp_path / "t.json")
    for name in ("a.txt", "v.txt"):
        (tmp_path / name).write_text("red blue " * 40, encoding="utf-8")
    settings = Settings(
        tokenizer=str(tmp_path / "t.json"), val_input=[str(tmp_path / "v.txt")], bos=True
    )
    prepare_files([str(tmp_path / "a.txt")], tmp_path / "o", settings, progress=False)
    config = run_yaml({"data.path": str(tmp_path / "o"), "samples.prompts": ["red", ""]})
    code, _, err = lightning("fit", "--config", config)
    assert code == 0, err
    return tmp_path / "run"


def test_texts_begin_with_the_bos_of_training(with_bos: Path):
    assert load_trained(str(with_bos), "cpu", None)[2] == [1]


def test_export_begins_texts_with_the_bos_too(lightning: Lightning, with_bos: Path, tmp_path: Path):
    code, out, err = lightning("export", "--ckpt_path", with_bos, "--output", tmp_path / "x")
    assert code == 0, err
    assert "gives the ids that the model was trained on, with the bos before each text" in out
    assert load_trained(str(tmp_path / "x"), "cpu", None)[2] == [1]
    assert Tokenizer.from_file(str(tmp_path / "x/tokenizer.json")).encode("red").ids[0] == 1


@pytest.mark.parametrize("single", ["<s> $A </s>", "$A </s>", "<s> $A", "$A"])
@pytest.mark.parametrize("settings", [{}, {"direction": "left", "length": 9, "pad_token": "<unk>"}])
def test_file_for_others_adds_the_bos_of_training_and_nothing_else(
    tmp_path: Path, single: str, settings: dict
):
    tokenizer = Tokenizer.from_str(llama()._text)
    specials = [("<s>", 1), ("</s>", 2)]
    tokenizer.post_processor = processors.TemplateProcessing(single=single, special_tokens=specials)
    if settings:
        tokenizer.enable_padding(**settings)
    ours = TextTokenizer(tokenizer.to_str())
    assert ours.adds_bos == single.startswith("<s>")
    ours.save_for_others(tmp_path / "t.json", bos=True)
    theirs = Tokenizer.from_file(str(tmp_path / "t.json"))
    assert theirs.encode("red").ids == [1, *ours.encode("red")]


@pytest.mark.parametrize(("bos", "first"), [(True, 1), (False, 2)])
def test_lm_eval_begins_texts_as_training_did(with_bos: Path, bos: bool, first: int):
    trained = dataclasses.replace(read_trained(with_bos), begins_with_bos=bos)
    assert model_args(trained, llama(), Path("x")) == {
        "pretrained": "x",
        "dtype": "float32",
        "add_bos_token": bos,
        "prefix_token_id": first,
    }


def test_documents_without_a_bos_are_begun_without(
    lightning: Lightning, run_yaml: RunYaml, tmp_path: Path
):
    lightning("fit", "--config", run_yaml({"trainer.max_steps": 1}))
    assert load_trained(str(tmp_path / "run"), "cpu", None)[2] == []


def test_tokenizer_without_the_bos_of_training_is_refused():
    tokenizer = word_pieces()
    assert (tokenizer.start_ids(False), tokenizer.adds_bos) == ([], False)
    with pytest.raises(ValueError, match=re.escape("has no bos token, which the model was")):
        tokenizer.start_ids(True)
