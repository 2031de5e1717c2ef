"""Warnings about a run in trouble: observation, likely causes, and settings to change."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch import Callback

from callbacks import symptoms
from callbacks.run.announce import announce
from callbacks.run.folder import contract
from callbacks.run.trainer import Trainer
from callbacks.symptoms import RunHistory
from lm.module import LMModule
from lm.optim import lower_rate

CPU_OUT_OF_MEMORY = "DefaultCPUAllocator: can't allocate memory"
COMPILERS = ("torch._dynamo", "torch._inductor")
# A changed learning rate after a resume has been announced where one of these changed.
RATE_KEYS = ("model.optim.", "trainer.max_steps")


@dataclass(frozen=True)
class Symptom:
    """A symptom, its causes and its remedies, without those that are None in `values_for`."""

    metric: str  # checked whenever this metric is logged
    detect: Callable[[RunHistory], str | None]
    causes: str  # most likely first
    remedies: str


SYMPTOMS = (
    Symptom(
        "train/loss",
        symptoms.non_finite,
        "a learning rate too high, {unclipped}, numbers that overflow the precision, odd samples",
        "model.optim.lr {lower_lr}, trainer.gradient_clip_val {clip}, trainer.precision {bf16}",
    ),
    Symptom(
        "optim/lr",
        symptoms.no_targets,
        "labels that are all -100, rows that are all padding",
        "lightning peek with the same --config, to see what is a target",
    ),
    Symptom(
        "train/loss",
        symptoms.first_loss,
        "weights that are not new, inputs and targets out of step, an error of the compiler",
        "model.compile {no_compile}, trainer.precision {fp32}, lightning peek with the same "
        "--config, to see what is a target",
    ),
    Symptom(
        "train/loss",
        symptoms.flat,
        "a learning rate too low, data that is noise, a gradient that does not arrive",
        "model.optim.lr {higher_lr}, grad_norm.per_layer_every_n_steps {every}",
    ),
    Symptom(
        "train/loss",
        symptoms.too_fast,
        "a model that sees its targets (mask or shift), data that is tiny or repeats itself",
        "model.compile {no_compile}, data.path with more text",
    ),
    Symptom(
        "train/loss",
        symptoms.loss_jump,
        "a learning rate too high, odd samples, {unclipped}",
        "model.optim.lr {lower_lr}, trainer.gradient_clip_val {clip}, ckpt_path best",
    ),
    Symptom(
        "train/loss",
        symptoms.loss_jump_after_resume,
        "an optimizer state that was not restored, changed settings, changed data",
        "model.optim.lr {lower_lr}, ckpt_path to an earlier checkpoint",
    ),
    Symptom(
        "train/loss",
        symptoms.rate_jump,
        "a schedule that starts over, a changed length or warm-up",
        "model.optim and trainer.max_steps as before, ckpt_path to an earlier checkpoint",
    ),
    Symptom(
        "val/loss",
        symptoms.overfit,
        "too many passes over too little data",
        "data.path with more text, trainer.max_steps {step}, model.config.dropout 0.1",
    ),
    Symptom(
        "throughput/mfu",
        symptoms.low_mfu,
        "slow data, small micro-batches, {uncompiled}, {links}",
        "data.num_workers {workers}, {wider}, model.compile {compile}",
    ),
    Symptom(
        "throughput/data_wait",
        symptoms.long_wait,
        "too few workers, a slow disk",
        "data.num_workers {workers}",
    ),
    Symptom(
        "optim/grad_norm",
        symptoms.norm_stuck,
        "a learning rate too high, odd samples",
        "model.optim.lr {lower_lr}, grad_norm.per_layer_every_n_steps {every}",
    ),
    Symptom(
        "optim/grad_norm",
        symptoms.norm_jump,
        "odd samples, numbers that overflow the precision",
        "model.optim.lr {lower_lr}, trainer.gradient_clip_val {clip}, trainer.precision {bf16}",
    ),
    Symptom(
        "optim/grad_norm",
        symptoms.norm_zero,
        "a learning rate too low, a gradient that does not arrive",
        "model.optim.lr {higher_lr}, grad_norm.per_layer_every_n_steps {every}",
    ),
)


def values_for(trainer: Trainer) -> dict[str, Any]:
    """Return the values for causes and remedies; None where one does not apply to the run."""
    data, lr = trainer.datamodule, trainer.optimizers[0].param_groups[0]["initial_lr"]
    compiled = getattr(trainer.lightning_module, "compiled", False)
    precision, accumulate = str(trainer.precision), trainer.accumulate_grad_batches
    twice, half = 2 * data.micro_batch_size, accumulate // 2
    wider = f"data.micro_batch_size {twice} with trainer.accumulate_grad_batches {half}"
    return {
        "unclipped": None if trainer.gradient_clip_val else "no clipping",
        "clip": None if trainer.gradient_clip_val else 1.0,
        "uncompiled": None if compiled else "no compilation",
        "compile": None if compiled else "true",
        "no_compile": "false" if compiled else None,
        "links": None if trainer.world_size == 1 else "slow links between devices",
        "lower_lr": f"{lower_rate(lr):.2g}",
        "higher_lr": f"{lr * 3:.2g}",
        "bf16": "bf16-mixed" if precision.startswith("16") else None,
        "fp32": None if precision.startswith("32") else "32-true",
        "workers": max(2, 2 * data.num_workers),
        "wider": None if accumulate % 2 else wider,
        "every": trainer.log_every_n_steps,
        "step": trainer.global_step,
    }


def warning(symptom: Symptom, observed: str, trainer: Trainer) -> str:
    """Return a warning line: observation, likely causes, settings to change."""
    values = values_for(trainer)
    likely, tries = (
        ", ".join(part for part in text.format_map(values).split(", ") if not part.endswith("None"))
        for text in (symptom.causes, symptom.remedies)
    )
    return f"warning: step {trainer.global_step}: {observed}; likely {likely}; try {tries}"


def memory_advice(micro_batch_size: int, accumulate: int, seq_len: int) -> str:
    """Return settings that need less memory at the same sequences per step, or at shorter ones."""
    held, size = f"out of memory with data.micro_batch_size {micro_batch_size}", micro_batch_size
    shorter = f"--data.seq_len {max(1, seq_len // 2)} in a new run"
    if size == 1:
        return f"{held}; try {shorter}"
    part = next(d for d in range(size // 2, 0, -1) if size % d == 0)
    return (
        f"{held}; try --data.micro_batch_size {part} --trainer.accumulate_grad_batches "
        f"{accumulate * size // part}, as many sequences a step; else {shorter}"
    )


def advice(error: BaseException, trainer: Trainer) -> str | None:
    """Return advice about an error that ended a run, or None."""
    if isinstance(error, torch.OutOfMemoryError) or CPU_OUT_OF_MEMORY in str(error):
        data = trainer.datamodule
        return memory_advice(data.micro_batch_size, trainer.accumulate_grad_batches, data.seq_len)
    if any(kind.__module__.startswith(COMPILERS) for kind in type(error).__mro__):
        return "torch.compile failed: --model.compile false runs without, or shows the error itself"
    return None


class Health(Callback):
    """Warns of each symptom of trouble once, and adds advice to errors."""

    def __init__(self, *, enabled: bool = True) -> None:
        """Set up the warnings.

        Args:
            enabled: Warn about symptoms of trouble, with likely causes and settings to change.
        """
        self.enabled = enabled
        self.history = RunHistory()

    def on_train_start(self, trainer: Trainer, pl_module: LMModule) -> None:
        if trainer.global_step == 0:
            self.history = RunHistory()
        self.history.resumed_at = trainer.global_step

    def watch(self, trainer: Trainer, metrics: dict[str, float]) -> None:
        """Look for symptoms in the metrics of a logged step or of a validation."""
        if not self.enabled:
            return
        self.history.add(trainer, metrics)
        for symptom in SYMPTOMS:
            if symptom.metric not in metrics:
                continue
            if (text := symptom.detect(self.history)) is None:
                self.history.active.discard(symptom.detect)
            elif symptom.detect not in self.history.active:
                self.history.active.add(symptom.detect)
                announce(warning(symptom, text, trainer))

    def state_dict(self) -> dict[str, Any]:
        return self.history.state()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.history.restore(state_dict)
        if self.history.validation_changed:
            self.history.forget_validations()

    def on_load_checkpoint(
        self, trainer: Trainer, pl_module: LMModule, checkpoint: dict[str, Any]
    ) -> None:
        if trainer.state.fn == "fit":
            old, new = checkpoint["contract"], contract(trainer)
            keys = [key for key in old if key.startswith(RATE_KEYS)]
            self.history.rate_changed = any(old[key] != new.get(key) for key in keys)
            keys = [key for key in old if key.startswith("validation ")]
            self.history.validation_changed = any(old[key] != new.get(key) for key in keys)

    def on_exception(self, trainer: Trainer, pl_module: LMModule, exception: BaseException) -> None:
        if self.enabled and (text := advice(exception, trainer)):
            exception.add_note(text)
