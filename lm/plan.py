"""The plan of a run: cost, length, memory, files and warnings, computed without training."""

import math
from dataclasses import dataclass
from typing import Any

from lm.config import ModelConfig, OptimConfig
from lm.flops import activation_bytes, active_parameters, flops_per_token, parameters
from lm.schedule import warmup_cosine, warmup_steps

HOURS = (8.0, 12.0, 17.0, 24.0, 36.0, 67.0)
# Bytes per parameter: fp32 weights, gradients, AdamW's two moments. Checkpoints hold no gradients.
STATIC_PARTS = {"weights": 4, "gradients": 4, "first moments": 4, "second moments": 4}
# DDP keeps copies of all gradients in communication buckets.
BUCKET_BYTES = 4
CHECKPOINT_BYTES = 12
# Precisions whose activations are counted, and whether they use autocast.
MIXED = {"bf16-mixed": True, "16-mixed": True, "32-true": False}
# Flash attention supports head dimensions up to this, in multiples of 8.
WIDEST_HEAD = 256
MANY_EPOCHS = 4
# Shorter runs lose seconds by 1 % of their steps.
LONG_RUN = 5000


@dataclass(frozen=True, kw_only=True)
class RunPlan:
    """Inputs of a plan."""

    config: ModelConfig
    """Shape of the network; its max_seq_len is the positions of a sample."""
    optim: OptimConfig
    """Optimizer and schedule."""
    precision: str
    """Trainer's name of the precision."""
    micro_batch_size: int
    """Sequences per forward pass on one device."""
    accumulate: int
    """Micro-batches per device and step."""
    devices: int
    """Number of devices."""
    buckets: bool = False
    """Whether DDP holds a copy of the gradients."""
    max_steps: int | None = None
    """Length in optimizer steps; exactly one of this and the next two is given."""
    total_tokens: int | None = None
    """Length in tokens, rounded up to whole steps."""
    epochs: float | None = None
    """Length in passes over the data."""
    data_tokens: int | None = None
    """Tokens of the training data; None: not prepared."""
    epoch_samples: int | None = None
    """Rows per epoch; None: samples are windows over the tokens."""
    val_tokens: int | None = None
    """Tokens of the validation data; None: not prepared."""
    tokenizer_size: int | None = None
    """Number of token ids of the tokenizer; None: not prepared."""
    save_every: int
    """Optimizer steps between checkpoints."""
    save_minutes: float | None = None
    """Minutes between checkpoints; None: by steps alone."""
    kept_files: int
    """Checkpoints kept after each save: the newest ones and the best."""
    keep_every: int | None = None
    """Optimizer steps between checkpoints that are never pruned."""
    free_bytes: int | None = None
    """Free space on the disk of the run folder."""
    held_bytes: int = 0
    """Bytes of this run's existing checkpoints."""
    peak_flops: float | None = None
    """Dense FLOP/s of one device."""
    hours: tuple[float, ...] = HOURS
    """Durations to report, in hours."""

    @property
    def tokens_per_micro_batch(self) -> int:
        """Tokens per forward pass of one device."""
        return self.micro_batch_size * self.config.max_seq_len

    @property
    def tokens_per_step(self) -> int:
        """Tokens per optimizer step."""
        return self.tokens_per_micro_batch * self.accumulate * self.devices

    @property
    def steps(self) -> int | None:
        """Optimizer steps of the run; None if they depend on data that is not prepared.

        Raises:
            ValueError: the length is not given exactly once.
        """
        given = [self.max_steps, self.total_tokens, self.epochs]
        if sum(value is not None for value in given) != 1:
            raise ValueError(
                "the length of the run must be given by exactly one of trainer.max_steps, "
                "data.total_tokens and data.epochs"
            )
        if self.max_steps is not None:
            return self.max_steps
        tokens = self.total_tokens
        if self.epochs is not None and self.samples is not None:
            tokens = max(1, round(self.epochs * self.samples)) * self.config.max_seq_len
        return None if tokens is None else math.ceil(tokens / self.tokens_per_step)

    @property
    def samples(self) -> int | None:
        """Samples per epoch; None: not prepared."""
        if self.epoch_samples is not None or self.data_tokens is None:
            return self.epoch_samples
        return (self.data_tokens - 1) // self.config.max_seq_len

    @property
    def tokens(self) -> int | None:
        """Tokens of the whole run; None if its steps are unknown."""
        return (
            None if self.steps is None else self.total_tokens or self.steps * self.tokens_per_step
        )

    @property
    def passes(self) -> float | None:
        """Epochs of the run; None if unknown."""
        # Rows are padded, so epochs are counted in positions, not in tokens.
        size = self.data_tokens
        if self.epoch_samples is not None:
            size = self.epoch_samples * self.config.max_seq_len
        return self.tokens / size if self.tokens and size else self.epochs

    @property
    def parameters(self) -> int:
        """All parameters of the network."""
        return sum(parameters(self.config).values())

    @property
    def static_parts(self) -> dict[str, int]:
        """Bytes that a device holds for the whole run, by purpose."""
        each = STATIC_PARTS | ({"buckets of DDP": BUCKET_BYTES} if self.buckets else {})
        return {name: size * self.parameters for name, size in each.items()}

    @property
    def files_for_good(self) -> int | None:
        """Maximum number of checkpoints that `keep_every` keeps."""
        if self.keep_every is None:
            return 0
        return None if self.steps is None else self.steps // self.keep_every

    @property
    def files(self) -> int | None:
        """Maximum number of checkpoints on disk, before an old one is pruned."""
        good = self.files_for_good
        return None if good is None else self.kept_files + 1 + good

    @property
    def files_bytes(self) -> int | None:
        """Maximum bytes of checkpoints on disk."""
        return None if self.files is None else CHECKPOINT_BYTES * self.parameters * self.files


@dataclass(frozen=True, kw_only=True)
class Ledger:
    """The plan's results, by the keys of `lightning plan --json`; None: unknown.

    Sizes are bytes, arithmetic is FLOPs, `mfu` and shares are 0 to 1.
    """

    parameters: int
    parameters_active: int
    parameters_by_part: dict[str, int]
    parameters_embedding: int
    flops_per_token: int
    flops_per_token_6n: int
    tokens_per_micro_batch: int
    tokens_per_device_step: int
    tokens_per_step: int
    tokens: int | None
    epochs: float | None
    max_steps: int | None
    warmup_steps: int | None
    lr: dict[int, float]
    static_bytes: int
    static_bytes_by_part: dict[str, int]
    activation_bytes: int | None
    activation_bytes_by_part: dict[str, int] | None
    checkpoint_bytes: int
    checkpoint_files: int | None
    checkpoint_files_for_good: int | None
    checkpoint_bytes_kept: int | None
    free_bytes: int | None
    save_every: int
    save_every_share: float | None
    devices: int
    peak_flops: float | None
    hours_to_mfu: list[dict[str, Any]]
    warnings: list[str]
    unknown: list[str]


def ledger(run: RunPlan) -> Ledger:
    """Return everything that is known about a run without training.

    Raises:
        ValueError: the length is not given exactly once, or the warm-up is longer than the run.
    """
    counts, total = parameters(run.config), run.parameters
    active = sum(active_parameters(run.config).values())
    full, six_n = flops_per_token(run.config, run.config.max_seq_len), 6 * active
    steps = run.steps
    warmup = None if steps is None else warmup_steps(run.optim.warmup, steps)
    activations = None
    if run.precision in MIXED:
        activations = activation_bytes(
            run.config,
            run.micro_batch_size,
            run.config.max_seq_len,
            mixed=MIXED[run.precision],
        )
    return Ledger(
        parameters=total,
        parameters_active=active,
        parameters_by_part=counts,
        parameters_embedding=counts["embedding"],
        flops_per_token=full,
        flops_per_token_6n=six_n,
        tokens_per_micro_batch=run.tokens_per_micro_batch,
        tokens_per_device_step=run.tokens_per_micro_batch * run.accumulate,
        tokens_per_step=run.tokens_per_step,
        tokens=run.tokens,
        epochs=run.passes,
        max_steps=steps,
        warmup_steps=warmup,
        lr={} if steps is None or warmup is None else rates(run.optim, warmup, steps),
        static_bytes=sum(run.static_parts.values()),
        static_bytes_by_part=run.static_parts,
        activation_bytes=None if activations is None else sum(activations.values()),
        activation_bytes_by_part=activations,
        checkpoint_bytes=CHECKPOINT_BYTES * total,
        checkpoint_files=run.files,
        checkpoint_files_for_good=run.files_for_good,
        checkpoint_bytes_kept=run.files_bytes,
        free_bytes=run.free_bytes,
        save_every=run.save_every,
        save_every_share=None if steps is None else run.save_every / steps,
        devices=run.devices,
        peak_flops=run.peak_flops,
        hours_to_mfu=[hours_to_mfu(run, hours, six_n, full) for hours in run.hours if steps],
        warnings=[*model_warnings(run), *data_warnings(run), *checkpoint_warnings(run)],
        unknown=unknown(run),
    )


def rates(optim: OptimConfig, warmup: int, steps: int) -> dict[int, float]:
    """Return the learning rate at key steps, by 0-based step.

    Key steps: the start, middle and end of the warm-up, the quarters, and the last step.
    """
    marks = {0, warmup // 2, max(warmup - 1, 0), warmup, steps // 4, steps // 2, 3 * steps // 4}
    marks = {mark for mark in marks if mark < steps} | {steps - 1}
    return {
        step: optim.lr * warmup_cosine(step, warmup, steps, optim.min_lr_ratio)
        for step in sorted(marks)
    }


def hours_to_mfu(run: RunPlan, hours: float, six_n: int, full: int) -> dict[str, Any]:
    """Return the throughput of a run of this duration, and its MFU."""
    assert run.tokens is not None
    per_second = run.tokens / (hours * 3600)
    peak = None if run.peak_flops is None else run.peak_flops * run.devices
    return {
        "hours": hours,
        "tokens_per_s": per_second,
        "mfu_6n": None if peak is None else per_second * six_n / peak,
        "mfu": None if peak is None else per_second * full / peak,
    }


def unknown(run: RunPlan) -> list[str]:
    """Return the results that are unknown, each with the reason."""
    found = list[str]()
    if run.data_tokens is None:
        figures = "epochs over the data" if run.epochs is None else "steps, tokens, rates, hours"
        unknowns = {
            figures: None,
            "vocabulary against the tokenizer": run.tokenizer_size,
            "validation windows": run.val_tokens,
        }
        found += [
            f"{figure}: the data is not prepared, or not here"
            for figure, size in unknowns.items()
            if size is None
        ]
    if run.precision not in MIXED:
        found.append(f"activations: they are counted for {', '.join(MIXED)}, not {run.precision}")
    if run.peak_flops is None:
        found.append(
            "MFU: no peak is known for the devices; give the dense TFLOP/s of one by "
            "--throughput.peak_tflops"
        )
    return found


def model_warnings(run: RunPlan) -> list[str]:
    """Warnings about the shape of the network."""
    config, found = run.config, list[str]()
    if config.vocab_size % 64:
        better = math.ceil(config.vocab_size / 64) * 64
        found.append(
            f"model.config.vocab_size {config.vocab_size} is no multiple of 64: {better} is faster "
            "on GPUs"
        )
    if run.tokenizer_size is not None and config.vocab_size < run.tokenizer_size:
        found.append(
            f"model.config.vocab_size {config.vocab_size} is below the tokenizer's "
            f"{run.tokenizer_size} ids: fit refuses it"
        )
    if run.tokenizer_size is not None and config.vocab_size > 1.2 * run.tokenizer_size:
        found.append(
            f"model.config.vocab_size {config.vocab_size} is far above the tokenizer's "
            f"{run.tokenizer_size} ids: those rows are never trained"
        )
    if config.head_size > WIDEST_HEAD or config.head_size % 8:
        found.append(
            f"heads of {config.head_size} do not fit flash attention, which takes multiples of 8 "
            f"up to {WIDEST_HEAD}: attention will be slow"
        )
    return found


def data_warnings(run: RunPlan) -> list[str]:
    """Warnings about the data."""
    found = list[str]()
    if run.passes is not None and run.passes > MANY_EPOCHS:
        found.append(
            f"{run.passes:.1f} passes over the data: more than {MANY_EPOCHS} teach little new; get "
            "more text or shorten the run"
        )
    windows = None if run.val_tokens is None else (run.val_tokens - 1) // run.config.max_seq_len
    if windows is not None and windows < run.devices:
        found.append(f"{windows} validation windows for {run.devices} devices: some have none")
    return found


def checkpoint_warnings(run: RunPlan) -> list[str]:
    """Warnings about checkpoint intervals and disk space."""
    steps, found = run.steps, list[str]()
    # Checkpoints by the clock already bound the loss of a kill.
    if steps and steps >= LONG_RUN and run.save_minutes is None and run.save_every > steps // 100:
        found.append(
            f"checkpoint.every_n_steps {run.save_every} is {run.save_every / steps:.1%} of the "
            f"run: a kill can cost that much; {steps // 100} is 1 %"
        )
    if run.keep_every is not None and run.keep_every % run.save_every:
        found.append(
            f"checkpoint.keep_every {run.keep_every} is no multiple of checkpoint.every_n_steps "
            f"{run.save_every}: steps that are not saved cannot be kept"
        )
    space = None if run.free_bytes is None else run.free_bytes + run.held_bytes
    if space is not None and run.files_bytes is not None and run.files_bytes > space:
        held = f", {run.held_bytes / 1e9:.1f} GB of it held by this run" if run.held_bytes else ""
        found.append(
            f"checkpoints need {run.files_bytes / 1e9:.1f} GB and {space / 1e9:.1f} GB are "
            f"free{held}: free some, or keep fewer (checkpoint.keep_last, keep_every)"
        )
    return found
