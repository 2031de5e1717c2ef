"""Plan of a run: the settings and sizes that lm/plan.py computes with."""

import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from callbacks.checkpoint.files import checkpoints
from callbacks.peak_flops import peak_flops
from callbacks.run.devices import count_devices, device_type
from callbacks.run.precision import choose_precision
from lm.plan import RunPlan

if TYPE_CHECKING:
    from callbacks.run.lightning_cli import RunCLI  # which shows the plan of its run


def run_plan(cli: "RunCLI", hours: tuple[float, ...]) -> RunPlan:
    """Return the settings and measured sizes of a parsed run that its plan needs."""
    trainer, checkpoint, throughput = (
        cli.section(section) for section in ("trainer", "checkpoint", "throughput")
    )
    data = cli.datamodule
    root = Path(trainer.default_root_dir)
    there = next(folder for folder in (root, *root.resolve().parents) if folder.exists())
    # The GPUs of the run need not be here either.
    device = device_type(trainer.accelerator)
    device = "cuda" if (trainer.accelerator, device) == ("gpu", "cpu") else device
    precision = choose_precision(str(trainer.precision), device)
    here = device == "cuda" and torch.cuda.is_available()
    devices = count_devices(trainer) * trainer.num_nodes
    known = peak_flops(torch.cuda.get_device_name(), precision) if here else None
    return RunPlan(
        config=cli.model.config,
        optim=cli.model.optim_config,
        precision=precision,
        micro_batch_size=data.micro_batch_size,
        accumulate=trainer.accumulate_grad_batches,
        devices=devices,
        buckets=devices > 1 or "ddp" in str(trainer.strategy).lower(),
        max_steps=None if trainer.max_steps == -1 else trainer.max_steps,
        total_tokens=data.total_tokens,
        epochs=data.epochs,
        **data.known_sizes(),
        save_every=checkpoint.every_n_steps,
        save_minutes=checkpoint.every_minutes,
        kept_files=checkpoint.keep_last + 1,  # and the best
        keep_every=checkpoint.keep_every,
        free_bytes=shutil.disk_usage(there).free,
        held_bytes=sum(path.stat().st_size for _, path in checkpoints(root)),
        peak_flops=throughput.peak_tflops * 1e12 if throughput.peak_tflops else known,
        hours=hours,
    )
