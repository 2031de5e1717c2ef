"""The text form of a plan, printed by `lightning plan`."""

from typing import Any

from lm.plan import Ledger


def table(plan: Ledger) -> str:
    """Return the ledger as text."""
    active, parts = plan.parameters_active, plan.parameters_by_part
    lines = [
        f"parameters        {plan.parameters:,}, "
        f"{'all' if active == plan.parameters else f'{active:,}'} active "
        f"({', '.join(f'{name} {count:,}' for name, count in parts.items() if count)})",
        f"FLOPs a token     {plan.flops_per_token / 1e9:.2f} G in full, "
        f"{plan.flops_per_token_6n / 1e9:.2f} G by 6·N",
        f"tokens            {plan.tokens_per_micro_batch:,} a micro-batch, "
        f"{plan.tokens_per_device_step:,} a device and step, "
        f"{plan.tokens_per_step:,} a step",
    ]
    passes = "" if plan.epochs is None else f"{plan.epochs:.2f} passes over the data"
    if plan.max_steps is None:
        lines.append(f"run               {passes}")
    else:
        length = [f"{plan.max_steps:,} steps", f"{plan.tokens:,} tokens", passes]
        lines += [
            f"run               {', '.join(filter(None, length))}",
            f"learning rate     warm-up of {plan.warmup_steps:,} steps",
            *(f"{'':18}step {step:>7,}  {value:.3e}" for step, value in plan.lr.items()),
        ]
    lines.append(
        f"static memory     {plan.static_bytes / 1e9:.1f} GB a device "
        f"({gigabytes(plan.static_bytes_by_part)})"
    )
    if plan.activation_bytes is not None and plan.activation_bytes_by_part is not None:
        lines.append(
            f"activations       about {plan.activation_bytes / 1e9:.1f} GB a micro-batch, less "
            f"where compiled ({gigabytes(plan.activation_bytes_by_part)})"
        )
    lines.append(checkpoint_line(plan))
    if plan.hours_to_mfu:
        lines += hours_table(plan.hours_to_mfu, plan.devices, plan.peak_flops)
    lines += [f"unknown: {line}" for line in plan.unknown]
    lines += [f"warning: {line}" for line in plan.warnings]
    return "\n".join(lines)


def checkpoint_line(plan: Ledger) -> str:
    """Return the line on checkpoints: size, number, disk space and interval."""
    parts = [f"checkpoint        {plan.checkpoint_bytes / 1e9:.2f} GB a file"]
    if plan.checkpoint_files is not None and plan.checkpoint_bytes_kept is not None:
        good = plan.checkpoint_files_for_good
        kept = f" ({good} of them for good, by checkpoint.keep_every)" if good else ""
        parts.append(
            f"at most {plan.checkpoint_files} files{kept}, "
            f"{plan.checkpoint_bytes_kept / 1e9:.1f} GB, on disk"
        )
    if plan.free_bytes is not None:
        parts.append(f"{plan.free_bytes / 1e9:.0f} GB free")
    share = plan.save_every_share
    of_run = "" if share is None else f", {share:.1%} of the run"
    return ", ".join(parts) + f"; saved every {plan.save_every:,} steps{of_run}"


def hours_table(rows: list[dict[str, Any]], devices: int, peak: float | None) -> list[str]:
    """Return the lines of the table of hours, tokens/s and MFU."""
    lines = [f"{'hours':<18}{'tokens/s':>12}{'MFU by 6·N':>13}{'MFU':>9}"]
    for row in rows:
        shares = [f"{row[key]:.1%}" if row[key] is not None else "-" for key in ("mfu_6n", "mfu")]
        rate = f"{row['tokens_per_s']:>12,.0f}"
        lines.append(f"{row['hours']:<18g}{rate}{shares[0]:>13}{shares[1]:>9}")
    of = "" if peak is None else f"; of {devices} × {peak / 1e12:g} TFLOP/s"
    note = "by 6·N is the articles' form; MFU is the full form, with attention's own products"
    return [*lines, f"{'':18}{note}{of}"]


def gigabytes(parts: dict[str, int]) -> str:
    """Return the non-zero parts in GB."""
    return "GB: " + ", ".join(f"{name} {size / 1e9:.2f}" for name, size in parts.items() if size)
