"""The shipped configurations."""

from pathlib import Path

import pytest
import yaml
from conftest import Lightning

from callbacks.config.values import load_yaml
from lm.config import ModelConfig
from lm.model import LM

ROOT = Path(__file__).resolve().parent.parent
CONFIGS = sorted((ROOT / "configs").glob("*.yaml"))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_same_command_starts_and_resumes(path: Path):
    assert load_yaml(path.read_text(encoding="utf-8"))["ckpt_path"] == "last"


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_run_has_a_folder_and_a_name_of_its_own(path: Path):
    content = load_yaml(path.read_text(encoding="utf-8"))
    assert content["trainer"]["default_root_dir"] == f"runs/{path.stem}"


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_key_is_known(path: Path, lightning: Lightning):
    # Parsed to the end: it is only refused after that, for its missing data or hardware.
    nowhere = ["--data.path", "nowhere", "--data.corpus", "null"]
    code, _, err = lightning("prepare", "--config", path, *nowhere)
    assert code == 2
    assert "data.corpus is not set" in err


def test_base_has_the_published_size():
    content = load_yaml((ROOT / "configs" / "base.yaml").read_text(encoding="utf-8"))
    import torch

    with torch.device("meta"):
        model = LM(ModelConfig(**content["model"]["config"], max_seq_len=2048))
    assert sum(p.numel() for p in model.parameters()) == 502_193_664


def test_jsonl_has_the_published_values():
    content = load_yaml((ROOT / "configs" / "jsonl.yaml").read_text(encoding="utf-8"))
    import torch

    with torch.device("meta"):
        model = LM(ModelConfig(**content["model"]["config"], max_seq_len=339))
    assert sum(p.numel() for p in model.parameters()) == 63_910_656
    optim, data, trainer = content["model"]["optim"], content["data"], content["trainer"]
    assert (optim["lr"], optim["warmup"]) == (5e-4, 0)
    assert (data["epochs"], data["micro_batch_size"], data["seq_len"] + 1) == (2, 32, 340)
    assert (trainer["accumulate_grad_batches"], trainer["gradient_clip_val"]) == (8, 1.0)
    assert (content["checkpoint"]["every_n_steps"], trainer["log_every_n_steps"]) == (1000, 100)


def test_base_never_makes_up_its_corpus():
    content = yaml.safe_load((ROOT / "configs" / "base.yaml").read_text(encoding="utf-8"))
    assert "corpus" not in content["data"]
