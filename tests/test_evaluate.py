"""`lightning evaluate`: bits per byte of a text, and tasks of lm-eval."""

import json
import math
from pathlib import Path

import pytest
import torch
from conftest import Lightning, RunYaml
from tokenizers import Tokenizer, decoders, models

from data.prepare.prepare import Settings, prepare_files
from lm.config import ModelConfig
from lm.evaluate import bits_per_byte, loss_of_text, windows
from lm.loss import IGNORE_INDEX
from lm.model import LM

SMALL = ModelConfig(vocab_size=50, d_model=16, n_layers=1, n_heads=2, ffn_dim=24, max_seq_len=8)


@pytest.mark.parametrize("n_ids", [2, 3, 8, 9, 10, 13, 17, 18, 40])
@pytest.mark.parametrize("stride", [1, 3, 4, 8])
def test_every_id_but_the_first_is_a_target_once(n_ids: int, stride: int):
    ids = list(range(100, 100 + n_ids))
    seen = []
    for inputs, targets in windows(ids, 8, stride):
        assert len(inputs) == len(targets) <= 8
        real = targets != IGNORE_INDEX
        assert real.any()
        # A target is the id after its input.
        assert torch.equal(targets[real], inputs[real] + 1)
        seen += targets[real].tolist()
        if len(seen) > len(targets):
            assert int(real.nonzero()[0]) == 8 - stride
    assert seen == ids[1:]


@torch.inference_mode()
def test_loss_of_a_short_text_is_that_of_its_logits():
    torch.manual_seed(0)
    model = LM(SMALL).eval()
    ids = [0, 3, 1, 4, 1, 5]
    expected = torch.nn.functional.cross_entropy(
        model(torch.tensor([ids[:-1]]))[0], torch.tensor(ids[1:]), reduction="sum"
    )
    assert loss_of_text(model, ids, 4) == pytest.approx(float(expected), rel=1e-6)


@torch.inference_mode()
def test_loss_of_a_long_text_with_stride_one_has_the_whole_context():
    torch.manual_seed(0)
    model = LM(SMALL).eval()
    ids = torch.randint(50, (30,)).tolist()
    expected = 0.0
    for i in range(1, 30):
        context = ids[max(0, i - 8) : i]
        found = model(torch.tensor([context]))[0, -1].log_softmax(-1)
        expected -= float(found[ids[i]])
    assert loss_of_text(model, ids, 1) == pytest.approx(expected, rel=1e-5)


def test_bits_per_byte_of_an_even_guess_over_bytes_is_eight():
    assert bits_per_byte(100 * math.log(256), 100) == pytest.approx(8)


@pytest.fixture
def run_folder(lightning: Lightning, run_yaml: RunYaml, tmp_path: Path) -> Path:
    code, _, err = lightning("fit", "--config", run_yaml({"trainer.limit_val_batches": 0}))
    assert code == 0, err
    return tmp_path / "run"


def refusal(lightning: Lightning, run_folder: Path, *argv: object) -> str:
    code, _, err = lightning("evaluate", "--ckpt_path", run_folder, *argv)
    assert code == 2, err
    return err.splitlines()[-1]


def test_texts_are_measured_each_and_together(
    lightning: Lightning, run_folder: Path, tmp_path: Path
):
    one, two = tmp_path / "one.txt", tmp_path / "two.txt"
    one.write_text("def alpha_0(beta, gamma):\n    return beta\n", encoding="utf-8")
    two.write_text("été 漢字\n", encoding="utf-8")
    code, out, err = lightning("evaluate", "--ckpt_path", run_folder, "--text", one, two)
    assert code == 0, err
    first, second, both = out.splitlines()
    assert first.startswith(f"{one}: ")
    assert "42 bytes" in first
    assert "13 bytes" in second
    assert both.startswith("all: ")
    assert "55 bytes" in both


def test_a_text_it_was_trained_on_costs_less_than_noise(
    lightning: Lightning, run_yaml: RunYaml, corpus: Path, tmp_path: Path
):
    longer = {"trainer.max_steps": 80, "model.optim.lr": 1e-2, "trainer.limit_val_batches": 0}
    assert lightning("fit", "--config", run_yaml(longer))[0] == 0
    known = next((corpus.parent / "sources").rglob("*.py"))
    noise = tmp_path / "noise.txt"
    noise.write_text("".join(chr(33 + i * 37 % 90) for i in range(500)), encoding="utf-8")
    _, out, _ = lightning("evaluate", "--ckpt_path", tmp_path / "run", "--text", known, noise)
    bits = [float(line.partition(": ")[2].split()[0]) for line in out.splitlines()]
    assert bits[0] < 3 < bits[1]


def test_bad_texts_are_named(lightning: Lightning, run_folder: Path, tmp_path: Path):
    assert "nothing to evaluate on: give --text" in refusal(lightning, run_folder)
    assert "--text nowhere is no file" in refusal(lightning, run_folder, "--text", "nowhere")
    empty, latin = tmp_path / "empty.txt", tmp_path / "latin.txt"
    empty.touch()
    latin.write_bytes(b"caf\xe9")
    assert "empty.txt is empty" in refusal(lightning, run_folder, "--text", empty)
    assert "latin.txt is not UTF-8" in refusal(lightning, run_folder, "--text", latin)
    good = tmp_path / "good.txt"
    good.write_text("x = 1\n")
    told = refusal(lightning, run_folder, "--text", good, "--stride", "17")
    assert "--stride is 17: must be 1 to 16" in told


@pytest.fixture
def run_of_letters(lightning: Lightning, run_yaml: RunYaml, tmp_path: Path) -> Path:
    """Folder of a run whose tokenizer knows the letters a, b and c alone."""
    tokenizer = Tokenizer(
        models.BPE({"a": 0, "b": 1, "c": 2, "<eos>": 3, "?": 4}, [], unk_token="?")
    )
    tokenizer.decoder = decoders.Fuse()
    tokenizer.save(str(tmp_path / "t.json"))
    (tmp_path / "a.txt").write_text("abc" * 90, encoding="utf-8")
    (tmp_path / "v.txt").write_text("abc" * 30, encoding="utf-8")
    settings = Settings(tokenizer=str(tmp_path / "t.json"), val_input=[str(tmp_path / "v.txt")])
    prepare_files([str(tmp_path / "a.txt")], tmp_path / "o", settings, progress=False)
    code, _, err = lightning("fit", "--config", run_yaml({"data.path": str(tmp_path / "o")}))
    assert code == 0, err
    return tmp_path / "run"


def test_characters_the_tokenizer_lacks_are_no_bytes_and_are_said(
    lightning: Lightning, run_of_letters: Path, tmp_path: Path
):
    text = tmp_path / "text.txt"
    text.write_text("abxé漢a", encoding="utf-8")
    code, out, err = lightning("evaluate", "--ckpt_path", run_of_letters, "--text", text)
    assert code == 0
    assert out.splitlines()[0].endswith(" 6 tokens, 3 bytes")
    assert err.splitlines()[0] == (
        f"warning: {text}: 3 of 6 characters (50.00%; 'x' 1, 'é' 1, '漢' 1) do not come back from "
        "their ids: their 6 bytes are left out, and the bits per byte of other models are not "
        "comparable"
    )


def test_text_of_which_the_tokenizer_knows_nothing_is_refused(
    lightning: Lightning, run_of_letters: Path, tmp_path: Path
):
    text = tmp_path / "text.txt"
    text.write_text("漢字", encoding="utf-8")
    assert refusal(lightning, run_of_letters, "--text", text) == (
        f"error: --text {text}: the model's tokenizer knows no character of it: give another text"
    )


def test_sample_says_what_of_a_prompt_is_lost(lightning: Lightning, run_of_letters: Path):
    words = ("--prompt", "aé", "--max_new_tokens", "3")
    code, out, err = lightning("sample", "--ckpt_path", run_of_letters, *words)
    assert (code, out[:2]) == (0, "aé")
    assert err.splitlines()[0] == (
        "warning: --prompt: 1 of 2 characters (50.00%; 'é' 1) do not come back from their ids"
    )


def test_tasks_without_lm_eval_are_refused(
    lightning: Lightning, run_folder: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    told = refusal(lightning, run_folder, "--tasks", "lambada")
    assert "--tasks needs lm_eval, which is not installed: pip install -e '.[eval]'" in told


TASK = """task: own_task
dataset_path: json
dataset_kwargs:
  data_files: {{test: {data}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: ["a", "b"]
doc_to_target: answer
metric_list:
  - metric: acc
"""


@pytest.mark.slow
def test_lm_eval_measures_a_task_of_ones_own(
    lightning: Lightning, run_folder: Path, tmp_path: Path
):
    pytest.importorskip("lm_eval", reason="its tasks cannot run without it")
    data = tmp_path / "data.jsonl"
    rows = [{"question": f"def f{i}(", "answer": i % 2} for i in range(4)]
    data.write_text("\n".join(map(json.dumps, rows)))
    folder = tmp_path / "tasks"
    folder.mkdir()
    (folder / "own.yaml").write_text(TASK.format(data=data))
    words = ("evaluate", "--ckpt_path", run_folder, "--include_path", folder, "--tasks")
    code, out, err = lightning(*words, "own_task", "--device", "cpu")
    assert code == 0, err
    assert "own_task" in out
    assert "acc" in out
    told = refusal(lightning, run_folder, "--include_path", folder, "--tasks", "no_such_task")
    assert "--tasks no_such_task: lm-eval has no such task" in told
