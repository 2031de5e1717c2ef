"""Weights alone: what they can be used for, and damage that a checksum tells."""

import json
from pathlib import Path

import pytest
from conftest import Lightning, RunYaml
from safetensors.torch import load_file, save_file

from lm.trained import from_weights_file


@pytest.fixture
def weights(lightning: Lightning, run_yaml: RunYaml, tmp_path: Path) -> Path:
    """The weights of a finished run whose checkpoints are gone."""
    assert lightning("fit", "--config", run_yaml())[0] == 0
    for path in (tmp_path / "run" / "checkpoints").iterdir():
        path.unlink()
    return tmp_path / "run" / "weights.safetensors"


def use(path: Path) -> str:
    return (
        f"error: {path} holds weights alone, which cannot be resumed or validated: give it to "
        "lightning sample, evaluate or export, or begin another run with it by "
        "--model.from_weights and another trainer.default_root_dir"
    )


@pytest.mark.parametrize(
    ("command", "ckpt_path"),
    [("fit", "last"), ("fit", "best"), ("fit", None), ("fit", "file"), ("validate", "folder")],
)
def test_weights_alone_are_no_checkpoint(
    weights, lightning, run_yaml, tmp_path, command, ckpt_path
):
    content = weights.read_bytes()
    places = {"file": str(weights), "folder": str(weights.parent)}
    root = {} if ckpt_path not in places else {"trainer.default_root_dir": str(tmp_path / "new")}
    config = run_yaml(root | {"ckpt_path": places.get(ckpt_path, ckpt_path)})
    code, _, err = lightning(command, "--config", config)
    assert (code, err.splitlines()[-1], weights.read_bytes()) == (2, use(weights), content)


@pytest.mark.parametrize(
    ("command", "name"), [("fit", ""), ("validate", "model.safetensors"), ("fit", "config.json")]
)
def test_a_folder_of_hugging_face_is_no_checkpoint(
    weights, lightning, run_yaml, tmp_path, command, name
):
    folder = tmp_path / "out"
    assert lightning("export", "--ckpt_path", weights, "--output", folder)[0] == 0
    new = {"trainer.default_root_dir": str(tmp_path / "new"), "ckpt_path": str(folder / name)}
    code, _, err = lightning(command, "--config", run_yaml(new))
    assert (code, err.splitlines()[-1]) == (
        2,
        f"error: {folder} holds weights alone in Hugging Face's form, which cannot be resumed or "
        "validated: give the folder to lightning sample, evaluate or export, or begin a run with "
        "it by --model.from_weights",
    )


def test_what_a_refusal_names_works(weights, lightning, run_yaml, tmp_path):
    for place in (weights, weights.parent):
        assert lightning("sample", "--ckpt_path", place, "--prompt", "a")[0] == 0
        output = tmp_path / f"out-{place.stem}"
        assert lightning("export", "--ckpt_path", place, "--output", output)[0] == 0
    other = {
        "trainer.default_root_dir": str(tmp_path / "other"),
        "model.from_weights": str(weights),
    }
    assert lightning("fit", "--config", run_yaml(other))[0] == 0


def test_every_flipped_byte_of_a_tensor_is_noticed(weights, lightning):
    content = bytearray(weights.read_bytes())
    content[-77] ^= 4
    weights.write_bytes(content)
    fault = "is damaged: its content does not match its checksum; bring back a sound copy, or use a"
    assert lightning("verify", "--ckpt_path", weights)[:2] == (
        1,
        f"{weights}: {fault} checkpoint of the run\n",
    )
    code, _, err = lightning("sample", "--ckpt_path", weights, "--prompt", "a")
    assert (code, err) == (2, f"error: {weights} {fault} checkpoint of the run\n")


def test_file_from_before_checksums_is_read(weights, lightning):
    facts = from_weights_file(weights).facts
    save_file(load_file(weights), weights, {"relight": json.dumps(facts)})
    assert from_weights_file(weights).facts == facts
    assert lightning("verify", "--ckpt_path", weights.parent)[:2] == (
        0,
        f"{weights}: readable (from before these files had a checksum)\n",
    )
