"""`lightning sample` on a trained run folder."""

import io
import json
from pathlib import Path

import pytest
import torch
from conftest import Lightning, RunYaml
from tokenizers import Tokenizer

import cli

NEW = ("--max_new_tokens", "12")


@pytest.fixture
def run_folder(lightning: Lightning, run_yaml: RunYaml, tmp_path: Path) -> Path:
    """Folder of a run of a few steps."""
    code, _, err = lightning("fit", "--config", run_yaml({"trainer.limit_val_batches": 0}))
    assert code == 0, err
    return tmp_path / "run"


def sample(lightning: Lightning, run_folder: Path, *argv: str) -> tuple[str, str]:
    code, out, err = lightning("sample", "--ckpt_path", run_folder, *NEW, *argv)
    assert code == 0, err
    return out, err


def refusal(lightning: Lightning, *argv: object) -> str:
    code, _, err = lightning("sample", *argv)
    assert code == 2
    assert "Traceback" not in err
    return err.splitlines()[-1]


def test_text_goes_to_stdout_and_speed_to_stderr(lightning: Lightning, run_folder: Path):
    out, err = sample(lightning, run_folder, "--prompt", "def alpha_0(")
    assert out.startswith("def alpha_0(")
    assert len(out) > len("def alpha_0(\n")
    assert err.splitlines()[-1].endswith("tokens/s")


def test_temperature_zero_is_greedy_whatever_the_seed(lightning: Lightning, run_folder: Path):
    greedy = ("--prompt", "def", "--temperature", "0")
    first, _ = sample(lightning, run_folder, *greedy, "--seed", "1")
    second, _ = sample(lightning, run_folder, *greedy, "--seed", "2")
    assert first == second


def test_seed_decides_the_draws(lightning: Lightning, run_folder: Path):
    texts = [sample(lightning, run_folder, "--prompt", "def", "--seed", seed)[0] for seed in "112"]
    assert texts[0] == texts[1] != texts[2]


def test_several_prompts_are_each_gone_on_from(lightning: Lightning, run_folder: Path):
    out, _ = sample(lightning, run_folder, "--prompt", "def beta", "--prompt", "return 7")
    assert out.startswith("def beta")
    assert "\nreturn 7" in out


def test_prompt_is_read_from_stdin(
    lightning: Lightning, run_folder: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("sys.stdin", io.StringIO("def gamma"))
    assert sample(lightning, run_folder)[0].startswith("def gamma")


def test_empty_prompt_starts_a_document(lightning: Lightning, run_folder: Path):
    out, _ = sample(lightning, run_folder, "--prompt", "")
    assert "<|endoftext|>" not in out


def test_prompt_longer_than_the_context_is_printed_whole(lightning: Lightning, run_folder: Path):
    prompt = "".join(f"{i} + " for i in range(40))
    assert sample(lightning, run_folder, "--prompt", prompt)[0].startswith(prompt)


def test_text_survives_a_terminal_of_a_narrow_alphabet(
    run_folder: Path, monkeypatch: pytest.MonkeyPatch
):
    terminal = io.TextIOWrapper(io.BytesIO(), encoding="cp1252")
    monkeypatch.setattr("sys.stdout", terminal)
    assert cli.main(["sample", "--ckpt_path", str(run_folder), "--prompt", "λόγος 語"]) == 0
    terminal.flush()
    assert terminal.buffer.getvalue().startswith(b"\\u03bb\\u03cc\\u03b3")  # pyright: ignore[reportAttributeAccessIssue]


def test_file_with_compiler_prefix_is_sampled_alike(lightning: Lightning, run_folder: Path):
    prompt = ("--prompt", "def", "--temperature", "0")
    before, _ = sample(lightning, run_folder, *prompt)
    path = run_folder / "checkpoints" / "step-00000006.ckpt"
    checkpoint = torch.load(path, weights_only=True)
    weights = checkpoint["state_dict"].items()
    checkpoint["state_dict"] = {f"_orig_mod.{name}": tensor for name, tensor in weights}
    torch.save(checkpoint, path)
    assert sample(lightning, run_folder, *prompt)[0] == before


def test_other_tokenizer_of_equal_size_is_refused(
    lightning: Lightning, run_folder: Path, tmp_path: Path
):
    content = json.loads((run_folder / "tokenizer.json").read_text(encoding="utf-8"))
    vocabulary = content["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    other = tmp_path / "other.json"
    Tokenizer.from_str(json.dumps(content)).save(str(other))
    # A file that is named is read, whatever else lies beside it.
    (tmp_path / "tokenizer_config.json").write_text("{}", encoding="utf-8")
    line = refusal(lightning, "--ckpt_path", run_folder, "--prompt", "x", "--tokenizer", other)
    assert f"{other} has fingerprint" in line
    assert "was trained with" in line


@pytest.mark.parametrize(
    ("argv", "part"),
    [
        (["--temperature", "-1"], "temperature is -1.0: must be 0"),
        (["--top_k", "0"], "top_k is 0"),
        (["--top_p", "1.5"], "top_p is 1.5"),
        (["--max_new_tokens", "-3"], "max_new_tokens is -3"),
        (["--temperature", "hot"], "--temperature is hot: it must be a finite number"),
        (["--temprature", "1"], "--temprature 1; did you mean --temperature?"),
        (["--device", "foo"], "invalid choice: 'foo'"),
    ],
)
def test_option_against_its_rule_is_refused(
    lightning: Lightning, run_folder: Path, argv: list[str], part: str
):
    assert part in refusal(lightning, "--ckpt_path", run_folder, "--prompt", "x", *argv)


def test_place_without_checkpoint_is_refused(lightning: Lightning, tmp_path: Path):
    nowhere = tmp_path / "nowhere"
    assert f"{nowhere} does not exist" in refusal(lightning, "--ckpt_path", nowhere)
    assert "holds no checkpoint" in refusal(lightning, "--ckpt_path", tmp_path, "--prompt", "x")


def test_missing_prompt_is_refused(
    lightning: Lightning, run_folder: Path, monkeypatch: pytest.MonkeyPatch
):
    terminal = io.StringIO()
    terminal.isatty = lambda: True
    monkeypatch.setattr("sys.stdin", terminal)
    assert "there is no prompt" in refusal(lightning, "--ckpt_path", run_folder)


def test_help_names_every_option(lightning: Lightning):
    code, out, _ = lightning("sample", "--help")
    assert code == 0
    assert str(cli.sample.__doc__) in out
    assert "--top_p" in out
