"""Starts that train nothing change no file; starts that go on know what their best loss is of."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import Lightning, RunYaml

from callbacks.checkpoint.ckpt_path import resolve
from lm.trained import from_weights_file

PAST = "past its last step 4: nothing is left to train and no file is changed"


def files(root: Path) -> dict[str, tuple[int, bytes]]:
    """Time and content of every file; the lock holds the number of the latest process."""
    found = [path for path in root.rglob("*") if path.is_file() and path.name != ".lock"]
    return {str(path): (path.stat().st_mtime_ns, path.read_bytes()) for path in found}


def fit(lightning: Lightning, config: Path, *more: object) -> str:
    code, _, err = lightning("fit", "--config", config, *more)
    assert code == 0, err
    return err


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({}, "finished at step 6 of 6"),
        ({"trainer.max_steps": 4}, f"the run is at step 6, {PAST}"),
        ({"trainer.max_steps": 4, "ckpt_path": "step-00000005.ckpt"}, f"at step 5, {PAST}"),
        ({"trainer.max_steps": 5, "ckpt_path": "step-00000005.ckpt"}, "finished at step 5 of 5"),
    ],
)
def test_start_that_trains_nothing_leaves_every_file_as_it_was(
    run_yaml: RunYaml, lightning: Lightning, tmp_path: Path, more: dict[str, Any], said: str
):
    every = {"checkpoint.every_n_steps": 1, "checkpoint.keep_last": 3}
    fit(lightning, run_yaml(every))
    before = files(tmp_path / "run")
    if "ckpt_path" in more:
        more = more | {"ckpt_path": str(tmp_path / "run" / "checkpoints" / more["ckpt_path"])}
    # What is kept changes only where the run goes on.
    assert said in fit(lightning, run_yaml(every | {"checkpoint.keep_last": 1} | more))
    kept = files(tmp_path / "run")
    assert {name: kept.get(name) for name in before} == before or not more


@pytest.mark.parametrize("key", ["model.config.n_layers", "seed_everything", "data.seq_len"])
def test_start_that_is_refused_leaves_every_file_as_it_was(run_yaml, lightning, tmp_path, key):
    fit(lightning, run_yaml({"checkpoint.every_n_steps": 1}))
    (tmp_path / "run" / "checkpoints" / ".step-00000009.tmp-7.ckpt").touch()
    before = files(tmp_path / "run")
    older = str(tmp_path / "run" / "checkpoints" / "step-00000005.ckpt")
    config = run_yaml({key: 5, "ckpt_path": older, "trainer.max_steps": 9})
    assert lightning("fit", "--config", config)[0] == 2
    assert files(tmp_path / "run") == before


def test_weights_written_by_a_later_start_have_the_losses_of_the_run(run_yaml, lightning, tmp_path):
    fit(lightning, run_yaml())
    file = tmp_path / "run" / "weights.safetensors"
    facts = from_weights_file(file).facts
    assert facts["train_loss"] > 0 < facts["val_loss"]
    file.unlink()
    fit(lightning, run_yaml())
    assert from_weights_file(file).facts == facts


def test_foreign_names_of_weights_are_refused_in_one_line(run_yaml, lightning, tmp_path):
    fit(lightning, run_yaml())
    path = tmp_path / "run" / "checkpoints" / "step-00000006.ckpt"
    checkpoint = torch.load(path, weights_only=True)
    norm = checkpoint["state_dict"].pop("net.model.norm.weight")
    torch.save(checkpoint | {"state_dict": checkpoint["state_dict"] | {"ln_f": norm}}, path)
    code, _, err = lightning("fit", "--config", run_yaml({"trainer.max_steps": 9}))
    assert (code, err.splitlines()[-1]) == (
        2,
        "error: the checkpoint does not hold the weights of this model: ln_f is (16,) and should "
        "be absent, net.model.norm.weight is missing and should be (16,); give a checkpoint of "
        "this run",
    )


# The best validation loss


@pytest.fixture
def tokens(tmp_path: Path) -> Path:
    """Token files as nanoGPT writes them."""
    folder = tmp_path / "tokens"
    folder.mkdir()
    for seed, name in enumerate(("train", "val")):
        ids = np.random.default_rng(seed).integers(1, 300, 700, dtype=np.uint16)
        ids.tofile(folder / f"{name}.bin")
    return folder


def best(root: Path, step: int) -> dict[str, float]:
    path = root / "checkpoints" / f"step-{step:08d}.ckpt"
    return torch.load(path, weights_only=True)["callbacks"]["AtomicCheckpoint"]["best"]


@pytest.mark.parametrize("change", ["data", "sequences"])
def test_best_loss_on_other_validation_data_no_longer_counts(
    run_yaml, lightning, tmp_path, tokens, change
):
    data = {"data.path": str(tokens), "data.dtype": "uint16", "trainer.val_check_interval": 3}
    fit(lightning, run_yaml(data))
    before = best(tmp_path / "run", 6)
    if change == "data":
        np.full(700, 7, dtype=np.uint16).tofile(tokens / "val.bin")
    more = {"trainer.max_steps": 8} | ({"trainer.limit_val_batches": 3} if change != "data" else {})
    err = fit(lightning, run_yaml(data | more))
    assert f"changed since the checkpoint: validation {change} " in err
    assert (
        "warning: the run validates on other data than before; the best validation loss was "
        f"{before['loss']:.4f} at step {before['step']}, so it no longer counts: the best is "
        "looked for anew\n"
    ) in err
    assert best(tmp_path / "run", 8) == {}


def test_checkpoint_from_before_validation_data_was_recorded_resumes(run_yaml, lightning, tmp_path):
    fit(lightning, run_yaml())
    path = tmp_path / "run" / "checkpoints" / "step-00000006.ckpt"
    checkpoint = torch.load(path, weights_only=True)
    del checkpoint["contract"]["validation data"], checkpoint["contract"]["validation sequences"]
    torch.save(checkpoint, path)
    err = fit(lightning, run_yaml({"trainer.max_steps": 8}))
    assert "no longer counts" not in err
    assert best(tmp_path / "run", 8) == checkpoint["callbacks"]["AtomicCheckpoint"]["best"]


def test_best_of_another_folder_is_not_that_of_the_run(run_yaml, lightning, tmp_path):
    fit(lightning, run_yaml())
    other = {
        "trainer.default_root_dir": str(tmp_path / "other"),
        "ckpt_path": str(tmp_path / "run"),
    }
    err = fit(lightning, run_yaml(other | {"trainer.max_steps": 8}))
    assert f"{tmp_path}/other/checkpoints/step-00000006.ckpt is not there, so it no longer" in err
    with pytest.raises(ValueError, match="nothing was validated yet"):
        resolve("best", tmp_path / "other")
