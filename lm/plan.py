"""The ledger of a run: what can be known of it without training, from plain numbers."""

import math
from dataclasses import dataclass
from typing import Any

from lm.config import ModelConfig, OptimConfig
from lm.flops import activation_bytes, active_parameters, flops_per_token, parameters
from lm.schedule import warmup_cosine, warmup_steps

HOURS = (8.0, 12.0, 17.0, 24.0, 36.0, 67.0)
# fp32 weights, gradients and AdamW's two moments; a checkpoint leaves the gradients out.
STATIC_PARTS = {"weights": 4, "gradients": 4, "first moments": 4, "second moments": 4}
# DDP sends gradients in buckets, copies that it holds all along.
BUCKET_BYTES = 4
CHECKPOINT_BYTES = 12
# Precisions whose activations are counted: whether they cast.
MIXED = {"bf16-mixed": True, "16-mixed": True, "32-true": False}
# Flash attention's kernels take heads up to this width, in steps of 8.
WIDEST_HEAD = 256
MANY_EPOCHS = 4
# Steps from which on 1 % of a run is worth saving for: below, it is seconds.
LONG_RUN = 5000


@dataclass(frozen=True, kw_only=True)
class RunPlan:
    """A run as numbers."""

    config: ModelConfig
    """Shape of the network; its max_seq_len is the positions of a sample."""
    optim: OptimConfig
    """Optimizer and schedule."""
    precision: str
    """Trainer's name of the precision."""
    micro_batch_size: int
    """Sequences of a forward pass on one device."""
    accumulate: int
    """Micro-batches of a device in a step."""
    devices: int
    """All devices of the run."""
    buckets: bool = False
    """Whether DDP holds a copy of the gradients."""
    max_steps: int | None = None
    """Length in optimizer steps; else one of the next two."""
    total_tokens: int | None = None
    """Length in tokens, rounded up to whole steps."""
    epochs: float | None = None
    """Length in passes over the data."""
    data_tokens: int | None = None
    """Tokens of the training data, where it is prepared."""
    epoch_samples: int | None = None
    """Samples of a pass over it, where those are rows; else windows."""
    val_tokens: int | None = None
    """Tokens of the validation data, where it is prepared."""
    tokenizer_size: int | None = None
    """Ids of the tokenizer, where it is prepared."""
    save_every: int
    """Optimizer steps between checkpoints."""
    save_minutes: float | None = None
    """Minutes between checkpoints, where the clock counts too."""
    kept_files: int
    """Checkpoints that stay when a new one is whole: the newest and the best."""
    keep_every: int | None = None
    """Optimizer steps between checkpoints that stay for good."""
    free_bytes: int | None = None
    """Free space where they go."""
    held_bytes: int = 0
    """What this run's checkpoints hold there already."""
    peak_flops: float | None = None
    """Dense FLOP/s of one device."""
    hours: tuple[float, ...] = HOURS
    """Durations to look at."""

    @property
    def tokens_per_micro_batch(self) -> int:
        """Positions of a forward pass."""
        return self.micro_batch_size * self.config.max_seq_len

    @property
    def tokens_per_step(self) -> int:
        """Positions of an optimizer step."""
        return self.tokens_per_micro_batch * self.accumulate * self.devices

    @property
    def steps(self) -> int | None:
        """Optimizer steps of the run; None where they rest on data that is not prepared.

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
        """Samples of a pass over the data, where it is prepared."""
        if self.epoch_samples is not None or self.data_tokens is None:
            return self.epoch_samples
        return (self.data_tokens - 1) // self.config.max_seq_len

    @property
    def tokens(self) -> int | None:
        """Positions of the whole run, where its steps are known."""
        return (
            None if self.steps is None else self.total_tokens or self.steps * self.tokens_per_step
        )

    @property
    def passes(self) -> float | None:
        """Passes over the data, where it is prepared or they are given."""
        # Rows are padded: their positions say nothing of the tokens they hold.
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
        """Bytes that a device holds all along, by what they are for."""
        each = STATIC_PARTS | ({"buckets of DDP": BUCKET_BYTES} if self.buckets else {})
        return {name: size * self.parameters for name, size in each.items()}

    @property
    def files_for_good(self) -> int | None:
        """Checkpoints that `keep_every` leaves at the end, at most."""
        if self.keep_every is None:
            return 0
        return None if self.steps is None else self.steps // self.keep_every

    @property
    def files(self) -> int | None:
        """Checkpoints on disk at a time, at most: a new one is whole before an old one goes."""
        good = self.files_for_good
        return None if good is None else self.kept_files + 1 + good

    @property
    def files_bytes(self) -> int | None:
        """Bytes that they take."""
        return None if self.files is None else CHECKPOINT_BYTES * self.parameters * self.files


def ledger(run: RunPlan) -> dict[str, Any]:
    """All figures of the plan in plain numbers: bytes, FLOPs, hours; None is not known.

    Raises:
        ValueError: the length is not given exactly once, or the warm-up does not fit it.
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
    return {
        "parameters": total,
        "parameters_active": active,
        "parameters_by_part": counts,
        "parameters_embedding": counts["embedding"],
        "flops_per_token": full,
        "flops_per_token_6n": six_n,
        "tokens_per_micro_batch": run.tokens_per_micro_batch,
        "tokens_per_device_step": run.tokens_per_micro_batch * run.accumulate,
        "tokens_per_step": run.tokens_per_step,
        "tokens": run.tokens,
        "epochs": run.passes,
        "max_steps": steps,
        "warmup_steps": warmup,
        "lr": {} if steps is None or warmup is None else rates(run.optim, warmup, steps),
        "static_bytes": sum(run.static_parts.values()),
        "static_bytes_by_part": run.static_parts,
        "activation_bytes": None if activations is None else sum(activations.values()),
        "activation_bytes_by_part": activations,
        "checkpoint_bytes": CHECKPOINT_BYTES * total,
        "checkpoint_files": run.files,
        "checkpoint_files_for_good": run.files_for_good,
        "checkpoint_bytes_kept": run.files_bytes,
        "free_bytes": run.free_bytes,
        "save_every": run.save_every,
        "save_every_share": None if steps is None else run.save_every / steps,
        "devices": run.devices,
        "peak_flops": run.peak_flops,
        "hours_to_mfu": [hours_to_mfu(run, hours, six_n, full) for hours in run.hours if steps],
        "warnings": warnings(run),
        "unknown": unknown(run),
    }


def rates(optim: OptimConfig, warmup: int, steps: int) -> dict[int, float]:
    """Learning rate of the updates at which a schedule is looked at, by 0-based number.

    They are the first, the middle and the end of the rise, the quarters, and the last.
    """
    marks = {0, warmup // 2, max(warmup - 1, 0), warmup, steps // 4, steps // 2, 3 * steps // 4}
    marks = {mark for mark in marks if mark < steps} | {steps - 1}
    return {
        step: optim.lr * warmup_cosine(step, warmup, steps, optim.min_lr_ratio)
        for step in sorted(marks)
    }


def hours_to_mfu(run: RunPlan, hours: float, six_n: int, full: int) -> dict[str, Any]:
    """What a run of so many hours comes to: tokens/s of all devices, and shares of their peak."""
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
    """What the plan leaves open, each with its reason."""
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


def warnings(run: RunPlan) -> list[str]:
    """What an experienced colleague would say of the plan."""
    config, steps, found = run.config, run.steps, list[str]()
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
    if run.passes is not None and run.passes > MANY_EPOCHS:
        found.append(
            f"{run.passes:.1f} passes over the data: more than {MANY_EPOCHS} teach little new; get "
            "more text or shorten the run"
        )
    windows = None if run.val_tokens is None else (run.val_tokens - 1) // config.max_seq_len
    if windows is not None and windows < run.devices:
        found.append(f"{windows} validation windows for {run.devices} devices: some have none")
    # By the clock, what a kill costs is bounded already.
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


def table(plan: dict[str, Any]) -> str:
    """The ledger for people."""
    active, parts = plan["parameters_active"], plan["parameters_by_part"]
    lines = [
        f"parameters        {plan['parameters']:,}, "
        f"{'all' if active == plan['parameters'] else f'{active:,}'} active "
        f"({', '.join(f'{name} {count:,}' for name, count in parts.items() if count)})",
        f"FLOPs a token     {plan['flops_per_token'] / 1e9:.2f} G in full, "
        f"{plan['flops_per_token_6n'] / 1e9:.2f} G by 6·N",
        f"tokens            {plan['tokens_per_micro_batch']:,} a micro-batch, "
        f"{plan['tokens_per_device_step']:,} a device and step, "
        f"{plan['tokens_per_step']:,} a step",
    ]
    passes = "" if plan["epochs"] is None else f"{plan['epochs']:.2f} passes over the data"
    if plan["max_steps"] is None:
        lines.append(f"run               {passes}")
    else:
        length = [f"{plan['max_steps']:,} steps", f"{plan['tokens']:,} tokens", passes]
        lines += [
            f"run               {', '.join(filter(None, length))}",
            f"learning rate     warm-up of {plan['warmup_steps']:,} steps",
            *(f"{'':18}step {step:>7,}  {value:.3e}" for step, value in plan["lr"].items()),
        ]
    lines.append(
        f"static memory     {plan['static_bytes'] / 1e9:.1f} GB a device "
        f"({gigabytes(plan['static_bytes_by_part'])})"
    )
    if plan["activation_bytes"] is not None:
        lines.append(
            f"activations       about {plan['activation_bytes'] / 1e9:.1f} GB a micro-batch, less "
            f"where compiled ({gigabytes(plan['activation_bytes_by_part'])})"
        )
    lines.append(checkpoint_line(plan))
    if plan["hours_to_mfu"]:
        lines += hours_table(plan["hours_to_mfu"], plan["devices"], plan["peak_flops"])
    lines += [f"unknown: {line}" for line in plan["unknown"]]
    lines += [f"warning: {line}" for line in plan["warnings"]]
    return "\n".join(lines)


def checkpoint_line(plan: dict[str, Any]) -> str:
    """Size of a checkpoint, space for all that are there at a time, and how often one is saved."""
    parts = [f"checkpoint        {plan['checkpoint_bytes'] / 1e9:.2f} GB a file"]
    if plan["checkpoint_files"] is not None:
        good = plan["checkpoint_files_for_good"]
        kept = f" ({good} of them for good, by checkpoint.keep_every)" if good else ""
        parts.append(
            f"at most {plan['checkpoint_files']} files{kept}, "
            f"{plan['checkpoint_bytes_kept'] / 1e9:.1f} GB, on disk"
        )
    if plan["free_bytes"] is not None:
        parts.append(f"{plan['free_bytes'] / 1e9:.0f} GB free")
    share = plan["save_every_share"]
    of_run = "" if share is None else f", {share:.1%} of the run"
    return ", ".join(parts) + f"; saved every {plan['save_every']:,} steps{of_run}"


def hours_table(rows: list[dict[str, Any]], devices: int, peak: float | None) -> list[str]:
    """Rows of hours, tokens/s and shares, and what the shares are of."""
    lines = [f"{'hours':<18}{'tokens/s':>12}{'MFU by 6·N':>13}{'MFU':>9}"]
    for row in rows:
        shares = [f"{row[key]:.1%}" if row[key] is not None else "-" for key in ("mfu_6n", "mfu")]
        rate = f"{row['tokens_per_s']:>12,.0f}"
        lines.append(f"{row['hours']:<18g}{rate}{shares[0]:>13}{shares[1]:>9}")
    of = "" if peak is None else f"; of {devices} × {peak / 1e12:g} TFLOP/s"
    note = "by 6·N is the articles' form; MFU is the full form, with attention's own products"
    return [*lines, f"{'':18}{note}{of}"]


def gigabytes(parts: dict[str, int]) -> str:
    """Parts of a sum of bytes in GB, those that are nothing left out."""
    return "GB: " + ", ".join(f"{name} {size / 1e9:.2f}" for name, size in parts.items() if size)
