"""Loss and gradient of a step are means over its targets, whatever it was cut into.

Judged by gradients against a slow reference in fp64; run as a script it trains on several ranks.
"""

import json
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import references
import torch
from conftest import Lightning, RunYaml
from lightning.pytorch import LightningDataModule, Trainer
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import Tensor
from torch.utils.data import DataLoader, default_convert

from callbacks.checkpoint.files import read_checkpoint
from callbacks.drill.drill import rows
from data.tokens.memmap import DTYPES, TokenFile, TokenStream, content_fingerprint
from data.windows import Windows
from lm.config import ModelConfig, OptimConfig
from lm.module import LMModule

CONFIG = ModelConfig(
    vocab_size=11, d_model=12, n_layers=2, n_heads=3, ffn_dim=10, max_seq_len=6, init_std=0.2
)
STEPS = ([3, 6, 1, 2, 0, 0, 5, 6], [6, 0, 0, 1, 4, 4, 2, 3])
"""Targets of each of a step's 8 rows; one micro-batch of two rows has none."""

pytestmark = pytest.mark.filterwarnings("ignore")  # of Lightning, about workers and loggers


def global_batch(step: int) -> dict[str, Tensor]:
    """All rows of a step, padded on their right."""
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(CONFIG.vocab_size, (8, 7), generator=generator)
    labels = ids.clone()
    for row, count in enumerate(STEPS[step]):
        labels[row, count + 1 :] = -100
    return {"input_ids": ids, "labels": labels}


class Cut(LightningDataModule):
    """Each step's rows as micro-batches of this rank, in the order of the product."""

    def __init__(self, size: int, accumulate: int) -> None:
        super().__init__()
        self.size, self.accumulate = size, accumulate

    def train_dataloader(self) -> DataLoader:
        trainer = cast(Trainer, self.trainer)
        batches = []
        for step in range(len(STEPS)):
            for micro_step in range(self.accumulate):
                first = (micro_step * trainer.world_size + trainer.global_rank) * self.size
                mine = slice(first, first + self.size)
                batches.append({name: t[mine] for name, t in global_batch(step).items()})
        return DataLoader(batches, batch_size=None, collate_fn=default_convert)  # pyright: ignore[reportArgumentType]


class Watched(LMModule):
    """Keeps weights before, and gradients and figures after each step."""

    def on_fit_start(self) -> None:
        self.seen: list[dict[str, Any]] = []

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx % self.trainer.accumulate_grad_batches == 0:
            weights = {name: p.detach().clone() for name, p in self.net.state_dict().items()}
            self.seen.append({"weights": weights})

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        gradients = {
            n: p.grad.clone() for n, p in self.net.named_parameters() if p.grad is not None
        }
        self.seen[-1] |= self.step_metrics() | {"gradients": gradients}


def train(root: Path, world: int, accumulate: int, precision: str) -> list[dict[str, Any]]:
    """What each step of a run over so many ranks came to."""
    size = 8 // (world * accumulate)
    optim = OptimConfig(lr=0.01, warmup=0, fused=False)
    module = Watched(config=CONFIG, optim=optim, compile=False, seed=5)
    half = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu"))  # pyright: ignore[reportPrivateImportUsage]
    Trainer(
        accelerator="cpu",
        devices=world,
        strategy="ddp" if world > 1 else "auto",
        plugins=[half] if precision == "fp16" else None,
        max_steps=len(STEPS),
        max_epochs=-1,
        accumulate_grad_batches=accumulate,
        gradient_clip_val=1e9,
        limit_val_batches=0,
        use_distributed_sampler=False,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=root,
    ).fit(module, datamodule=Cut(size, accumulate))
    if module.global_rank == 0:
        torch.save(module.seen, root / "seen.pt")
    return module.seen


def reference(
    weights: dict[str, Tensor], batch: dict[str, Tensor], config: ModelConfig
) -> tuple[float, dict[str, Tensor]]:
    """Mean loss over all targets of a batch and its gradients, in fp64, from whole logits."""
    wide = {name: p.detach().double().requires_grad_() for name, p in weights.items()}
    logits = references.logits(wide, batch["input_ids"][:, :-1], config)
    shares = logits.log_softmax(dim=-1)
    losses = [
        -shares[row, position, target]
        for row, targets in enumerate(batch["labels"][:, 1:].tolist())
        for position, target in enumerate(targets)
        if target != -100
    ]
    loss = torch.stack(losses).mean()
    loss.backward()
    return loss.item(), {name: p.grad for name, p in wide.items() if p.grad is not None}


def total_norm(gradients: dict[str, Tensor]) -> float:
    return math.sqrt(sum(float(g.double().square().sum()) for g in gradients.values()))


def check(seen: list[dict[str, Any]], tolerance: float) -> None:
    """Compare each step with the reference at the weights that it began with."""
    assert len(seen) == len(STEPS)
    for step, found in enumerate(seen):
        loss, gradients = reference(found["weights"], global_batch(step), CONFIG)
        assert found["train/loss"] == pytest.approx(loss, rel=tolerance)
        assert found["optim/grad_norm"] == pytest.approx(total_norm(gradients), rel=tolerance)
        assert found["gradients"].keys() == gradients.keys()
        wrong = {name: g.double() - gradients[name] for name, g in found["gradients"].items()}
        assert total_norm(wrong) < tolerance * total_norm(gradients)


@pytest.mark.parametrize("accumulate", [1, 2, 4, 8])
def test_gradient_of_one_process_is_that_of_the_whole_step(tmp_path, accumulate):
    check(train(tmp_path, 1, accumulate, "fp32"), 2e-6)


@pytest.mark.parametrize("accumulate", [1, 4])
def test_gradient_under_a_scaler_is_that_of_the_whole_step(tmp_path, accumulate):
    # fp16 holds 11 bits.
    check(train(tmp_path, 1, accumulate, "fp16"), 2e-3)


def test_step_without_targets_is_counted_and_harms_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "STEPS", ([0] * 8, STEPS[0]))
    empty, normal = train(tmp_path, 1, 4, "fp32")
    assert not {"train/loss", "optim/grad_norm"} & empty.keys()
    assert empty["optim/steps_without_targets"] == normal["optim/steps_without_targets"] == 1
    loss, gradients = reference(normal["weights"], global_batch(1), CONFIG)
    assert normal["train/loss"] == pytest.approx(loss, rel=2e-6)
    assert normal["optim/grad_norm"] == pytest.approx(total_norm(gradients), rel=2e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("accumulate", "precision"), [(1, "fp32"), (2, "fp32"), (4, "fp32"), (2, "fp16")]
)
def test_gradient_of_two_ranks_is_that_of_the_whole_step(tmp_path, accumulate, precision):
    command = [sys.executable, __file__, str(tmp_path), "2", str(accumulate), precision]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    subprocess.run(command, env=environment, check=True, capture_output=True, timeout=120)
    seen = torch.load(tmp_path / "seen.pt", weights_only=True)
    check(seen, 2e-6 if precision == "fp32" else 2e-3)


# Through the command line


def folder_of(corpus: Path, folder: Path, documents: list[list[int]]) -> Path:
    """A prepared folder whose splits both hold these documents, the last id of each its eos."""
    shutil.copytree(corpus, folder)
    meta = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
    ids = [token for document in documents for token in document]
    for split in ("train", "val"):
        path = folder / f"{split}.bin"
        np.array(ids, "<u2").tofile(path)
        np.save(folder / f"{split}.docs.npy", np.cumsum([0, *map(len, documents)]))
        meta[split] |= {"tokens": len(ids), "fingerprint": content_fingerprint(path)}
    (folder / "meta.json").write_text(json.dumps(meta), encoding="utf-8")
    return folder


def weights_at(root: Path, step: int) -> tuple[dict[str, Tensor], ModelConfig]:
    checkpoint = read_checkpoint(root / "checkpoints" / f"step-{step:08d}.ckpt")
    weights = checkpoint["state_dict"].items()
    config = ModelConfig(**checkpoint["model_config"])
    return {name.removeprefix("net."): p for name, p in weights}, config


def test_short_documents_weigh_no_more_than_long_ones(
    lightning: Lightning, run_yaml: RunYaml, tmp_path: Path, corpus: Path
):
    # 4 targets in one row and 15 in the other.
    path = folder_of(corpus, tmp_path / "docs", [[*range(10, 14), 0], [*range(20, 35), 0]])
    found = []
    for size, accumulate in ((2, 1), (1, 2)):
        overrides = {
            "data.path": str(path),
            "data.rows": "split",
            "data.micro_batch_size": size,
            "trainer.accumulate_grad_batches": accumulate,
            "trainer.max_steps": 1,
            "trainer.default_root_dir": str(tmp_path / f"size-{size}"),
        }
        code, _, err = lightning("fit", "--config", run_yaml(overrides))
        assert code == 0, err
        [row] = rows(tmp_path / f"size-{size}")
        found.append((float(row["train/loss"]), float(row["optim/grad_norm"])))
    assert found[0] == pytest.approx(found[1], rel=1e-5)


def test_short_last_step_is_averaged_over_what_is_in_it(
    lightning: Lightning, run_yaml: RunYaml, tmp_path: Path, corpus: Path
):
    # 12 windows at 2 a micro-batch are 6 micro-batches: 4, then 2.
    path = folder_of(corpus, tmp_path / "bin", [(np.arange(193) % 64).tolist()])
    overrides = {
        "data.path": str(path),
        "data.epochs": 1.0,
        "trainer.max_steps": ...,
        "trainer.accumulate_grad_batches": 4,
        "checkpoint.every_n_steps": 1,
        "model.config.init_std": 0.2,
    }
    code, _, err = lightning("fit", "--config", run_yaml(overrides))
    assert code == 0, err
    _, last = rows(tmp_path / "run")
    stream = TokenStream([TokenFile(path / "train.bin", DTYPES["uint16"])])
    batch = Windows(stream, 16, seed=1337).__getitems__(range(8, 12))
    weights, config = weights_at(tmp_path / "run", 1)
    loss, gradients = reference(weights, batch, config)
    assert float(last["train/loss"]) == pytest.approx(loss, rel=1e-5)
    assert float(last["optim/grad_norm"]) == pytest.approx(total_norm(gradients), rel=1e-4)


# Without a target


class Validation(LightningDataModule):
    """Validation batches of two sources, with so many targets in each row."""

    source_names = ("full", "empty")

    def __init__(self, *targets: list[int]) -> None:
        super().__init__()
        self.targets = targets

    def val_dataloader(self) -> list[DataLoader]:
        loaders = []
        for counts in self.targets:
            ids = torch.arange(7 * len(counts)).view(-1, 7) % CONFIG.vocab_size
            labels = ids.clone()
            for row, count in enumerate(counts):
                labels[row, count + 1 :] = -100
            batches = [{"input_ids": ids, "labels": labels}]
            loaders.append(DataLoader(batches, batch_size=None, collate_fn=default_convert))  # pyright: ignore[reportArgumentType]
        return loaders


def validate(tmp_path: Path, *targets: list[int]) -> dict[str, float]:
    module = LMModule(config=CONFIG, compile=False, seed=5)
    Trainer(
        accelerator="cpu", devices=1, logger=False, enable_progress_bar=False,
        enable_model_summary=False, enable_checkpointing=False, default_root_dir=tmp_path,
    ).validate(module, datamodule=Validation(*targets), verbose=False)  # fmt: skip
    return module.validation_metrics


def test_source_without_targets_leaves_the_loss_of_the_others(tmp_path):
    figures = validate(tmp_path, [6, 2], [0, 0])
    assert figures["val/loss"] == figures["val/loss/full"] == validate(tmp_path, [6, 2])["val/loss"]
    assert "val/loss/empty" not in figures


def test_validation_loss_of_several_sources_is_a_mean_over_targets(tmp_path):
    figures = validate(tmp_path, [6, 2], [1])
    mean = (8 * figures["val/loss/full"] + figures["val/loss/empty"]) / 9
    assert figures["val/loss"] == pytest.approx(mean, rel=1e-6)


def test_validation_without_targets_is_no_number_to_be_best(tmp_path):
    figures = validate(tmp_path, [0], [0])
    assert figures == {}


if __name__ == "__main__":
    root, world, accumulate, precision = sys.argv[1:]
    train(Path(root), int(world), int(accumulate), precision)
