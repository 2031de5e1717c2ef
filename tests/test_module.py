"""The module inside a Trainer: token mean, clip, skipped updates, figures of a step."""

import csv
import json
import math
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import references
import torch
from conftest import Lightning, RunYaml
from lightning.pytorch import LightningDataModule
from lightning.pytorch import Trainer as LightningTrainer
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.plugins.precision import MixedPrecision
from torch._dynamo.exc import TorchDynamoException
from torch.utils.data import DataLoader, default_convert

from callbacks.checkpoint.files import read_checkpoint
from callbacks.run.trainer import Trainer
from data.tokens.memmap import content_fingerprint
from lm.compile import Compilation, can_compile
from lm.config import ModelConfig, OptimConfig
from lm.experts import balance_loss
from lm.generate import generate
from lm.loss import softmax_step
from lm.model import LM
from lm.module import LMModule, stream_seed
from lm.softmax import find_compiler, native_softmax_step

CONFIG = ModelConfig(
    vocab_size=11, d_model=12, n_layers=2, n_heads=3, ffn_dim=10, max_seq_len=6, init_std=0.2
)
OPTIM = OptimConfig(lr=0.01, warmup=0)


def rows(*targets: int, seed: int = 0) -> dict[str, torch.Tensor]:
    """A batch whose rows have so many real targets each, the rest ignored."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(CONFIG.vocab_size, (len(targets), 7), generator=generator)
    labels = ids.clone()
    for row, count in enumerate(targets):
        labels[row, count + 1 :] = -100
    return {"input_ids": ids, "labels": labels}


def cut(batch: dict[str, torch.Tensor], size: int) -> list[dict[str, torch.Tensor]]:
    """The batch as micro-batches of so many rows."""
    parts = zip(batch["input_ids"].split(size), batch["labels"].split(size), strict=True)
    return [{"input_ids": ids, "labels": labels} for ids, labels in parts]


class Batches(LightningDataModule):
    """Hands out given micro-batches."""

    def __init__(self, batches: list[dict[str, torch.Tensor]]) -> None:
        super().__init__()
        self.batches = batches

    def train_dataloader(self) -> DataLoader:
        return DataLoader(self.batches, batch_size=None, collate_fn=default_convert)  # pyright: ignore[reportArgumentType]


@pytest.fixture
def fit(tmp_path: Path):
    """Train on micro-batches; returns the module and the figures of each step."""

    def run(
        batches: list[dict[str, torch.Tensor]], accumulate: int = 1, **trainer: Any
    ) -> tuple[LMModule, list[dict[str, float]]]:
        optim = trainer.pop("optim", OPTIM)
        module = trainer.pop("module", None) or LMModule(
            config=CONFIG, optim=optim, compile=False, seed=5
        )
        seen: list[dict[str, float]] = []
        cast(Any, module).on_train_batch_end = lambda *_: seen.append(module.step_metrics())
        options = {"precision": "32-true", "gradient_clip_val": 1e9} | trainer
        Trainer(
            accelerator="cpu",
            devices=1,
            max_steps=len(batches) // accumulate,
            accumulate_grad_batches=accumulate,
            limit_val_batches=0,
            logger=False,
            callbacks=[Checkpoint()],  # one that saves nothing, or Lightning adds its own
            default_root_dir=str(tmp_path),
            **options,
        ).fit(module, datamodule=Batches(batches))
        return module, seen[accumulate - 1 :: accumulate]

    return run


def weights(module: LMModule) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in module.net.named_parameters()}


pytestmark = pytest.mark.filterwarnings("ignore")  # of Lightning, about workers and loggers


# The mean over tokens


def test_loss_and_norm_are_means_over_the_targets_of_the_whole_step(fit):
    batch = rows(3, 6, 1, 2)
    (_, [whole]), (_, [split]) = fit([batch]), fit(cut(batch, 1), accumulate=4)
    assert split["train/loss"] == pytest.approx(whole["train/loss"], rel=1e-6)
    assert split["optim/grad_norm"] == pytest.approx(whole["optim/grad_norm"], rel=1e-5)


def test_loss_and_norm_equal_the_plain_reference(fit):
    batch = rows(3, 6, 1, 2)
    module = LMModule(config=CONFIG, optim=OPTIM, compile=False, seed=5)
    module.configure_model()
    hidden = module.net.model(batch["input_ids"][:, :-1])
    total = references.cross_entropy_sum(hidden, module.net.head_weight, batch["labels"][:, 1:])
    loss = total / (3 + 6 + 1 + 2)
    loss.backward()
    norm = torch.stack([p.grad.norm() for p in module.net.parameters() if p.grad is not None])
    _, [figures] = fit(cut(batch, 2), accumulate=2)
    assert figures["train/loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert figures["optim/grad_norm"] == pytest.approx(norm.norm().item(), rel=1e-4)


class Given(LMModule):
    """Its losses are given: 6 over 3 targets, then 10 over 1."""

    def loss(self, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor, None]:
        _, targets, _ = super().loss(batch)
        total = {3: 6.0, 1: 10.0}[int((targets != -100).sum())]
        return total + 0.0 * self.net.head_weight.sum(), targets, None


def test_sums_of_six_over_three_and_ten_over_one_make_four(fit):
    module = Given(config=CONFIG, optim=OPTIM, compile=False)
    _, [figures] = fit([rows(3), rows(1)], accumulate=2, module=module)
    assert figures["train/loss"] == 4.0


def test_step_without_targets_changes_no_weight_by_its_gradient(fit):
    no_decay = OptimConfig(lr=0.01, warmup=0, weight_decay=0.0)
    module = LMModule(config=CONFIG, optim=no_decay, compile=False, seed=5)
    before: list[dict[str, torch.Tensor]] = []
    cast(Any, module).on_train_batch_start = lambda *_: before.append(weights(module))
    _, [empty, normal] = fit([rows(0, 0), rows(3)], module=module)
    assert all(torch.equal(before[0][name], before[1][name]) for name in before[0])
    assert empty.keys() == {"optim/lr", "optim/steps_without_targets"}
    assert {"train/loss", "optim/grad_norm"} <= normal.keys()


@pytest.mark.parametrize(("n_steps", "empty"), [(3, 3), (9, 4)], ids=["all of them", "four"])
def test_a_run_that_learns_nothing_is_an_error(fit, n_steps: int, empty: int):
    module = LMModule(config=CONFIG, optim=OPTIM, compile=False, max_skipped_steps=4)
    with pytest.raises(RuntimeError) as caught:
        fit([rows(0, 0)] * n_steps, module=module)
    assert str(caught.value) == (
        f"none of the {empty} steps since the start had a target, so nothing is learned: all "
        "labels are -100; look at the samples by lightning peek"
    )


def test_micro_batch_without_targets_leaves_the_mean_of_the_others(fit):
    normal, empty = rows(5, 4), rows(0, 0)
    (_, [alone]), (_, [both]) = fit([normal]), fit([normal, empty], accumulate=2)
    assert both["train/loss"] == pytest.approx(alone["train/loss"], rel=1e-6)
    assert both["optim/grad_norm"] == pytest.approx(alone["optim/grad_norm"], rel=1e-5)


# Clip


def test_logged_norm_is_the_one_before_clipping(fit):
    (_, [free]), (_, [clipped]) = fit([rows(6)]), fit([rows(6)], gradient_clip_val=1e-6)
    assert clipped["optim/grad_norm"] == pytest.approx(free["optim/grad_norm"], rel=1e-5)


def test_clip_scales_the_gradient_to_the_limit(fit):
    module, _ = fit([rows(6, 2)], gradient_clip_val=0.125)
    gradients = [p.grad for p in module.net.parameters() if p.grad is not None]
    assert torch.nn.utils.get_total_norm(gradients).item() == pytest.approx(0.125, rel=1e-4)


def test_norms_of_bf16_and_fp32_agree(fit):
    (_, [wide]), (_, [narrow]) = fit([rows(6, 6)]), fit([rows(6, 6)], precision="bf16-mixed")
    assert narrow["optim/grad_norm"] == pytest.approx(wide["optim/grad_norm"], rel=0.05)


def fit_in_fp16(batches: list[dict[str, torch.Tensor]], root: Path) -> list[dict[str, float]]:
    """Train with the gradient scaler, which Lightning's own options only allow on a GPU."""
    module = LMModule(config=CONFIG, optim=OPTIM, compile=False, seed=5)
    seen: list[dict[str, float]] = []
    cast(Any, module).on_train_batch_end = lambda *_: seen.append(module.step_metrics())
    LightningTrainer(
        accelerator="cpu",
        plugins=[MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu"))],  # pyright: ignore[reportPrivateImportUsage]
        max_steps=len(batches),
        gradient_clip_val=1.0,
        limit_val_batches=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        default_root_dir=root,
    ).fit(module, datamodule=Batches(batches))
    return seen


def test_norms_of_fp16_and_fp32_agree_so_it_is_measured_unscaled(fit, tmp_path: Path):
    (_, [wide]), [narrow] = fit([rows(6, 6)]), fit_in_fp16([rows(6, 6)], tmp_path)
    assert narrow["optim/grad_norm"] == pytest.approx(wide["optim/grad_norm"], rel=0.05)
    assert narrow["train/loss"] == pytest.approx(wide["train/loss"], rel=0.01)


# Learning rate


@pytest.mark.parametrize("accumulate", [1, 4])
def test_rates_are_a_function_of_updates_alone(fit, accumulate: int):
    optim = OptimConfig(lr=0.01, warmup=5)
    _, steps = fit([rows(6)] * (20 * accumulate), accumulate=accumulate, optim=optim)
    rates = [figures["optim/lr"] for figures in steps]
    assert rates[:6] == pytest.approx([0.002, 0.004, 0.006, 0.008, 0.01, 0.01])
    assert rates[5:] == sorted(rates[5:], reverse=True)
    assert rates[-1] >= 0.001


def test_the_balance_loss_is_weighted_by_the_targets_of_its_micro_batch(fit):
    config = replace(CONFIG, d_model=24, ffn_dim=16, n_experts=4, aux_loss_coef=0.5)
    batches = [rows(3, 5), rows(1, 0, seed=1)]
    own = LMModule(config=config, optim=OPTIM, compile=False, seed=5)
    own.configure_model()
    whole = torch.zeros(())
    for batch in batches:
        total, targets, routing = own.loss(batch)
        assert routing is not None
        whole = whole + total + 0.5 * balance_loss(routing) * (targets != -100).sum()
    (whole / 9).backward()
    norm = torch.nn.utils.get_total_norm([p.grad for p in own.parameters() if p.grad is not None])
    module = LMModule(config=config, optim=OPTIM, compile=False, seed=5)
    _, [figures] = fit(batches, accumulate=2, module=module)
    assert figures["optim/grad_norm"] == pytest.approx(norm.item(), rel=1e-4)
    # It is large enough to tell: without it the norm is another.
    plain = LMModule(config=replace(config, aux_loss_coef=0.0), optim=OPTIM, compile=False, seed=5)
    _, [without] = fit(batches, accumulate=2, module=plain)
    assert without["optim/grad_norm"] != pytest.approx(norm.item(), rel=1e-3)


def test_auto_answers_a_failing_compiler_with_one_line_and_plain_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    def refuse(*_: Any, **__: Any) -> None:
        raise TorchDynamoException("")

    monkeypatch.setattr(torch, "compile", lambda function, dynamic: refuse)
    compilation = Compilation("auto")
    compilation.active = True
    double = compilation.compile(lambda x: 2 * x)
    assert [double(2), double(3)] == [4, 6]
    assert not compilation.active
    told = "compile: failed, so the run is not compiled: TorchDynamoException"
    assert capsys.readouterr().err.splitlines() == [told]


# Gradients that are not finite


class Poisoned(LMModule):
    """Has an infinite loss from one step on, for so many steps."""

    bad_steps = range(0)

    def loss(self, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor, None]:
        total, targets, _ = super().loss(batch)
        bad = self.trainer.training and self.trainer.global_step in self.bad_steps
        return total * (math.inf if bad else 1.0), targets, None


@pytest.mark.parametrize("fused", [True, False])
def test_update_with_a_gradient_not_finite_is_skipped_and_counted(fit, fused: bool):
    optim = OptimConfig(lr=0.01, warmup=0, fused=fused)
    module = Poisoned(config=CONFIG, optim=optim, compile=False, seed=5)
    module.bad_steps = range(1, 3)
    before: list[dict[str, torch.Tensor]] = []
    cast(Any, module).on_train_batch_start = lambda *_: before.append(weights(module))
    _, steps = fit([rows(6, seed=i) for i in range(4)], module=module)
    assert all(torch.equal(before[1][name], before[3][name]) for name in before[1])
    assert not all(torch.equal(before[3][name], p) for name, p in weights(module).items())
    assert all(p.isfinite().all() for p in weights(module).values())
    assert steps[-1]["optim/skipped_steps"] == 2


def test_an_optimizer_without_a_fused_kernel_skips_them_too(fit, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(
        "lm.module.build_optimizer", lambda net, *_: torch.optim.SGD(net.parameters(), lr=0.1)
    )
    module = Poisoned(config=CONFIG, optim=OPTIM, compile=False, seed=5)
    module.bad_steps = range(1, 2)
    fit([rows(6, seed=i) for i in range(3)], module=module)
    assert all(p.isfinite().all() for p in weights(module).values())


@pytest.mark.parametrize("fused", [True, False])
def test_moments_stay_when_an_update_is_skipped(fit, fused: bool):
    optim = OptimConfig(lr=0.01, warmup=0, fused=fused)
    good, bad = rows(6, seed=0), rows(6, seed=1)
    module = Poisoned(config=CONFIG, optim=optim, compile=False, seed=5)
    module.bad_steps = range(1, 2)
    fit([good, bad], module=module)
    plain, _ = fit([good], optim=optim)
    skipped, once = (cast(Any, m.optimizers()).optimizer.state_dict() for m in (module, plain))
    for left, right in zip(skipped["state"].values(), once["state"].values(), strict=True):
        assert all(torch.equal(left[name], right[name]) for name in left)


def test_run_that_diverged_stops_with_names_and_the_way_on(fit):
    module = Poisoned(config=CONFIG, optim=OPTIM, compile=False, max_skipped_steps=3)
    module.bad_steps = range(2, 99)
    with pytest.raises(RuntimeError, match="not finite in 3 steps in a row") as caught:
        fit([rows(6)] * 8, module=module)
    assert "bad now: model.embed_tokens.weight" in str(caught.value)
    assert str(caught.value).endswith("the last finite step was 2")


def test_run_that_ends_while_updates_are_skipped_is_no_success(fit):
    module = Poisoned(config=CONFIG, optim=OPTIM, compile=False)
    module.bad_steps = range(2, 99)
    with pytest.raises(RuntimeError, match="ended at step 5;") as caught:
        fit([rows(6)] * 5, module=module)
    assert str(caught.value) == (
        "the run ended at step 5; the last 3 updates were skipped because the "
        "gradient was not finite"
    )


def test_no_room_for_skipped_steps_is_refused():
    with pytest.raises(ValueError, match=r"model\.max_skipped_steps is 0: must be at least 1"):
        LMModule(max_skipped_steps=0)


# Start


def test_initial_weights_depend_on_the_seed_alone():
    built = []
    for noise in (1, 2):
        torch.manual_seed(noise)
        module = LMModule(config=CONFIG, seed=5)
        module.configure_model()
        built.append(weights(module))
    assert all(torch.equal(built[0][name], built[1][name]) for name in built[0])


def test_stream_seeds_differ_by_every_part():
    seeds = {
        stream_seed(a, b, c, d) for a in (0, 1) for b in (0, 1) for c in (0, 1) for d in (0, 1)
    }
    assert len(seeds) == 16


def test_compile_without_compiler_is_refused(fit, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PATH", "")
    assert not can_compile("cpu")
    module = LMModule(config=CONFIG, optim=OPTIM, compile=True)
    with pytest.raises(ValueError, match=r"model\.compile is true, but torch\.compile finds no"):
        fit([rows(6)], module=module)


def test_compile_on_a_gpu_needs_triton_and_a_c_compiler(monkeypatch: pytest.MonkeyPatch):
    found = {"triton": True, "gcc": True}
    monkeypatch.setattr("importlib.util.find_spec", lambda name: found.get(name))
    monkeypatch.setattr("shutil.which", lambda name: found.get(name))
    assert can_compile("cuda")
    for name in found:
        monkeypatch.setitem(found, name, None)
        assert not can_compile("cuda")
        monkeypatch.setitem(found, name, True)


@pytest.mark.parametrize(
    ("steps", "compiled", "line"),
    [
        # 16 × 2 positions a step of a network of so many FLOPs a token.
        (6, False, "are too few to make up for compiling)"),
        (10**9, True, "compiled (the first step takes a while)"),
    ],
)
def test_auto_compiles_where_the_run_is_long_enough(steps: int, compiled: bool, line: str):
    module = LMModule(config=CONFIG, optim=OPTIM)
    source = SimpleNamespace(tokens_per_step=32)
    strategy = SimpleNamespace(root_device=torch.device("cpu"))
    module._trainer = cast(
        Any,
        SimpleNamespace(datamodule=source, strategy=strategy, max_steps=steps, precision="32-true"),
    )
    module.setup("fit")
    assert module.compiled is compiled
    assert module.how_compiled.endswith(line)
    module.configure_model()
    native = compiled and find_compiler() is not None
    assert module.loss_step is (native_softmax_step if native else softmax_step)
    assert module.contract()["softmax of the loss"] == ("C++" if native else "torch")


def test_a_kernel_that_cannot_be_built_is_told_and_done_without(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    def library() -> None:
        raise OSError("c++ cannot build softmax.cpp: why")

    monkeypatch.setattr("lm.compile.library", library)
    assert Compilation("auto").loss_kernel("cpu") is softmax_step
    assert capsys.readouterr().err == (
        "loss: c++ cannot build softmax.cpp: why; torch's own operations are used\n"
    )


# Learning and evaluation through the command line


def column(root: Path, name: str) -> list[float]:
    with (root / "metrics.csv").open(encoding="utf-8", newline="") as file:
        return [float(row[name]) for row in csv.DictReader(file) if row.get(name)]


def test_first_loss_is_that_of_a_uniform_guess_and_falls(
    lightning: Lightning, run_yaml: RunYaml, tmp_path: Path
):
    config = run_yaml({"trainer.max_steps": 60, "model.optim.lr": 0.01})
    code, _, err = lightning("fit", "--config", config)
    assert code == 0, err
    losses = column(tmp_path / "run", "train/loss")
    # 32 targets at logits of variance 0.05 leave the mean uncertain by 0.04.
    assert losses[0] == pytest.approx(math.log(320) + 0.025, abs=0.13)
    assert sum(losses[-5:]) / 5 < 0.6 * losses[0]


def test_validation_metrics_agree_with_each_other(
    lightning: Lightning, run_yaml: RunYaml, tmp_path: Path
):
    lightning("fit", "--config", run_yaml({"data.eval_train": True}))
    root = tmp_path / "run"
    for loss, perplexity in zip(
        column(root, "val/loss"), column(root, "val/perplexity"), strict=True
    ):
        assert perplexity == pytest.approx(math.exp(loss), rel=1e-6)
    assert len(column(root, "train/eval_loss")) == len(column(root, "val/bits_per_byte")) == 2


def test_double_shift_cannot_hide(lightning: Lightning, run_yaml: RunYaml, counting: Path):
    config = run_yaml(
        {
            "data.path": str(counting),
            "trainer.max_steps": 200,
            "trainer.log_every_n_steps": 50,
            "model.optim.lr": 0.01,
            "checkpoint.every_n_steps": 200,
        }
    )
    code, _, err = lightning("fit", "--config", config)
    assert code == 0, err
    checkpoint = read_checkpoint(counting.parent / "run" / "checkpoints" / "step-00000200.ckpt")
    model = LM(ModelConfig(**checkpoint["model_config"]))
    model.load_state_dict(
        {name.removeprefix("net."): p for name, p in checkpoint["state_dict"].items()}
    )
    new = generate(
        model, [8, 9, 10], max_new_tokens=5, temperature=0.0, top_k=None, top_p=None, seed=0,
        eos_id=None, n_tokens=64,
    )  # fmt: skip
    assert list(new) == [11, 12, 13, 14, 15]


@pytest.fixture
def counting(tmp_path: Path, corpus: Path) -> Path:
    """A prepared folder whose ids count 0 … 63 round and round."""
    folder = tmp_path / "counting"
    shutil.copytree(corpus, folder)
    meta = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
    for split, count in (("train", 4096), ("val", 512)):
        path = folder / f"{split}.bin"
        (np.arange(count) % 64).astype("<u2").tofile(path)
        meta[split] |= {"tokens": count, "fingerprint": content_fingerprint(path)}
    (folder / "meta.json").write_text(json.dumps(meta), encoding="utf-8")
    return folder
