"""The ledger of a run: what can be known of it without training, from plain numbers."""

import math
from dataclasses import dataclass
from typing import Any

from lm.flops import flops_per_token, parameters
from lm.model import ModelConfig
from lm.optim import OptimConfig
from lm.schedule import warmup_cosine, warmup_steps

HOURS = (8, 12, 17, 24, 36, 67)
# fp32 weights, gradients and AdamW's two moments; a checkpoint leaves the gradients out.
STATIC_PARTS = {"weights": 4, "gradients": 4, "first moments": 4, "second moments": 4}
CHECKPOINT_BYTES = 12
# Flash attention's kernels take heads up to this width, in steps of 8.
WIDEST_HEAD = 256
MANY_EPOCHS = 4


@dataclass(frozen=True, kw_only=True)
class RunPlan:
    """A run as numbers."""

    config: ModelConfig
    """Shape of the network; its max_seq_len is the positions of a sample."""
    optim: OptimConfig
    """Optimizer and schedule."""
    micro_batch_size: int
    """Sequences of a forward pass on one device."""
    accumulate: int
    """Micro-batches of a device in a step."""
    devices: int
    """All devices of the run."""
    max_steps: int | None = None
    """Length in optimizer steps; else one of the next two."""
    total_tokens: int | None = None
    """Length in tokens, rounded up to whole steps."""
    epochs: float | None = None
    """Length in passes over the data."""
    data_tokens: int | None = None
    """Tokens of the training data, where it is prepared."""
    val_tokens: int | None = None
    """Tokens of the validation data, where it is prepared."""
    tokenizer_size: int | None = None
    """Ids of the tokenizer, where it is prepared."""
    save_every: int
    """Optimizer steps between checkpoints."""
    kept_files: int
    """Checkpoints on disk at a time, at most."""
    free_bytes: int | None = None
    """Free space where they go."""
    peak_flops: float | None = None
    """Dense FLOP/s of one device."""

    @property
    def tokens_per_micro_batch(self) -> int:
        """Positions of a forward pass."""
        return self.micro_batch_size * self.config.max_seq_len

    @property
    def tokens_per_step(self) -> int:
        """Positions of an optimizer step."""
        return self.tokens_per_micro_batch * self.accumulate * self.devices

    @property
    def steps(self) -> int:
        """Optimizer steps of the run.

        Raises:
            ValueError: the length is not given exactly once, or rests on data that is not there.
        """
        given = [self.max_steps, self.total_tokens, self.epochs]
        if sum(value is not None for value in given) != 1:
            raise ValueError(
                "the length of the run must be given by exactly one of trainer.max_steps, "
                "data.total_tokens and data.epochs"
            )
        if self.max_steps is not None:
            return self.max_steps
        if self.total_tokens is not None:
            return math.ceil(self.total_tokens / self.tokens_per_step)
        if self.data_tokens is None:
            raise ValueError("data.epochs is given, but the data is not prepared: its size is open")
        assert self.epochs is not None
        windows = round(self.epochs * ((self.data_tokens - 1) // self.config.max_seq_len))
        return math.ceil(windows * self.config.max_seq_len / self.tokens_per_step)


def ledger(run: RunPlan) -> dict[str, Any]:
    """All figures of the plan; bytes, seconds and FLOPs are plain numbers."""
    counts = parameters(run.config)
    total = sum(counts.values())
    full, six_n = flops_per_token(run.config, run.config.max_seq_len), 6 * total
    steps, warmup = run.steps, warmup_steps(run.optim.warmup, run.steps)
    tokens = run.total_tokens or steps * run.tokens_per_step
    return {
        "parameters": total,
        "parameters_by_part": counts,
        "parameters_embedding": counts["embedding"],
        "flops_per_token": full,
        "flops_per_token_6n": six_n,
        "tokens_per_micro_batch": run.tokens_per_micro_batch,
        "tokens_per_device_step": run.tokens_per_micro_batch * run.accumulate,
        "tokens_per_step": run.tokens_per_step,
        "tokens": tokens,
        "epochs": tokens / run.data_tokens if run.data_tokens else None,
        "max_steps": steps,
        "warmup_steps": warmup,
        "lr": {step: rate(run.optim, step, warmup, steps) for step in key_steps(warmup, steps)},
        "static_bytes": sum(STATIC_PARTS.values()) * total,
        "static_bytes_by_part": {name: size * total for name, size in STATIC_PARTS.items()},
        "checkpoint_bytes": CHECKPOINT_BYTES * total,
        "checkpoint_bytes_kept": CHECKPOINT_BYTES * total * (run.kept_files + 1),
        "free_bytes": run.free_bytes,
        "save_every": run.save_every,
        "save_every_share": run.save_every / steps,
        "hours_to_mfu": [hours_to_mfu(run, hours, tokens, six_n, full) for hours in HOURS],
        "warnings": warnings(run, steps),
    }


def rate(optim: OptimConfig, step: int, warmup: int, steps: int) -> float:
    """Learning rate of the update with this 0-based number."""
    return optim.lr * warmup_cosine(step, warmup, steps, optim.min_lr_ratio)


def key_steps(warmup: int, steps: int) -> list[int]:
    """Steps at which a schedule is looked at: rise, its end, quarters, last."""
    marks = {0, warmup // 2, max(warmup - 1, 0), warmup, steps // 4, steps // 2, 3 * steps // 4}
    return sorted({mark for mark in marks if mark < steps} | {steps - 1})


def hours_to_mfu(run: RunPlan, hours: int, tokens: int, six_n: int, full: int) -> dict[str, Any]:
    """What a run of so many hours comes to: tokens/s of all devices, and shares of their peak."""
    per_second = tokens / (hours * 3600)
    peak = None if run.peak_flops is None else run.peak_flops * run.devices
    return {
        "hours": hours,
        "tokens_per_s": per_second,
        "mfu_6n": None if peak is None else per_second * six_n / peak,
        "mfu": None if peak is None else per_second * full / peak,
    }


def warnings(run: RunPlan, steps: int) -> list[str]:
    """What an experienced colleague would say of the plan."""
    config, found = run.config, list[str]()
    if config.vocab_size % 64:
        better = math.ceil(config.vocab_size / 64) * 64
        found.append(
            f"model.config.vocab_size {config.vocab_size} is no multiple of 64: {better} is faster "
            "on GPUs"
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
    tokens = run.total_tokens or steps * run.tokens_per_step
    if run.data_tokens and tokens / run.data_tokens > MANY_EPOCHS:
        found.append(
            f"{tokens / run.data_tokens:.1f} passes over the data: more than {MANY_EPOCHS} teach "
            "little new; get more text or shorten the run"
        )
    windows = None if run.val_tokens is None else (run.val_tokens - 1) // config.max_seq_len
    if windows is not None and windows < run.devices:
        found.append(f"{windows} validation windows for {run.devices} devices: some have none")
    if run.save_every > max(1, steps // 100):
        found.append(
            f"checkpoint.every_n_steps {run.save_every} is {run.save_every / steps:.1%} of the "
            f"run: a kill can cost that much; {max(1, steps // 100)} is 1 %"
        )
    needed = CHECKPOINT_BYTES * sum(parameters(config).values()) * (run.kept_files + 1)
    if run.free_bytes is not None and needed > run.free_bytes:
        found.append(
            f"checkpoints need {needed / 1e9:.1f} GB and {run.free_bytes / 1e9:.1f} GB are free: "
            "free some, or lower checkpoint.keep_last"
        )
    return found


def table(plan: dict[str, Any]) -> str:
    """The ledger for people."""
    parts = ", ".join(f"{name} {n:,}" for name, n in plan["parameters_by_part"].items() if n)
    static = ", ".join(f"{name} {n / 1e9:.2f}" for name, n in plan["static_bytes_by_part"].items())
    epochs = f", {plan['epochs']:.2f} passes over the data" if plan["epochs"] else ""
    free = f", {plan['free_bytes'] / 1e9:.0f} GB free" if plan["free_bytes"] is not None else ""
    lines = [
        f"parameters        {plan['parameters']:,} ({parts})",
        f"FLOPs a token     {plan['flops_per_token'] / 1e9:.2f} G in full, "
        f"{plan['flops_per_token_6n'] / 1e9:.2f} G by 6·N",
        f"tokens            {plan['tokens_per_micro_batch']:,} a micro-batch, "
        f"{plan['tokens_per_device_step']:,} a device and step, "
        f"{plan['tokens_per_step']:,} a step",
        f"run               {plan['max_steps']:,} steps, {plan['tokens']:,} tokens{epochs}",
        f"learning rate     warm-up of {plan['warmup_steps']:,} steps",
        *(f"{'':18}step {step:>7,}  {value:.3e}" for step, value in plan["lr"].items()),
        f"static memory     {plan['static_bytes'] / 1e9:.1f} GB a device (GB: {static})",
        f"checkpoint        {plan['checkpoint_bytes'] / 1e9:.2f} GB a file, at most "
        f"{plan['checkpoint_bytes_kept'] / 1e9:.1f} GB on disk{free}; saved every "
        f"{plan['save_every']:,} steps, {plan['save_every_share']:.1%} of the run",
        f"{'hours':<18}{'tokens/s':>12}{'MFU by 6·N':>13}{'MFU':>9}",
    ]
    for row in plan["hours_to_mfu"]:
        shares = [f"{row[key]:.1%}" if row[key] is not None else "-" for key in ("mfu_6n", "mfu")]
        rate = f"{row['tokens_per_s']:>12,.0f}"
        lines.append(f"{row['hours']:<18}{rate}{shares[0]:>13}{shares[1]:>9}")
    lines += [f"warning: {line}" for line in plan["warnings"]]
    return "\n".join(lines)
