"""The Trainer: Lightning's, counted in optimizer steps, with precision chosen for the hardware."""

from datetime import timedelta
from typing import Any, Literal, cast

import torch
from lightning.pytorch import Callback
from lightning.pytorch import Trainer as LightningTrainer
from lightning.pytorch.callbacks import Timer

Precision = Literal["auto", "bf16-mixed", "16-mixed", "32-true", "bf16-true", "16-true", "64-true"]

# Strategies that split the model itself save in ways of their own.
SHARDED = ("fsdp", "deepspeed", "modelparallel", "xla")


def has_bf16(device: str) -> bool:
    """Whether a device type computes in bf16 rather than emulating it."""
    if device == "cuda":
        return torch.cuda.get_device_capability() >= (8, 0)
    if device == "cpu":
        able = torch.cpu.get_capabilities()
        return any(able.get(name) for name in ("amx_bf16", "avx512_bf16", "bf16"))
    return False


def choose_precision(asked: str, device: str) -> str:
    """Lightning's name of the precision to train in.

    Raises:
        ValueError: the asked one cannot run on the device as named.
    """
    if asked == "auto":
        if has_bf16(device):
            return "bf16-mixed"
        return "16-mixed" if device == "cuda" else "32-true"
    if asked.startswith("bf16") and device == "cuda" and not has_bf16(device):
        raise ValueError(
            f"trainer.precision is {asked}: {torch.cuda.get_device_name()} has no bf16; use "
            "16-mixed (fp16), 32-true (fp32) or auto"
        )
    if asked.startswith("16") and device == "cpu":
        raise ValueError(
            f"trainer.precision is {asked}: fp16 needs a GPU; use bf16-mixed, 32-true or auto"
        )
    return asked


def at_step_edge(trainer: LightningTrainer, batch_idx: int) -> bool:
    """Whether this micro-batch was the last of its optimizer step."""
    return (batch_idx + 1) % trainer.accumulate_grad_batches == 0


def validation_follows(trainer: LightningTrainer, batch_idx: int) -> bool:
    """Whether validation runs right after this micro-batch."""
    every = trainer.val_check_batch
    return trainer.enable_validation and every is not None and (batch_idx + 1) % every == 0


def is_dry_run(trainer: LightningTrainer) -> bool:
    """Whether the run is to leave nothing behind."""
    return bool(cast(Any, trainer).fast_dev_run)


class Trainer(LightningTrainer):
    """Lightning's Trainer over one endless epoch, with every interval in optimizer steps.

    Lightning counts `val_check_interval` in micro-batches; here it is optimizer steps like
    `log_every_n_steps`, and translated.
    """

    def __init__(
        self,
        *,
        precision: Precision = "auto",
        accelerator: str = "auto",
        max_steps: int = -1,
        max_epochs: int = -1,
        max_time: str | timedelta | dict[str, int] | None = None,
        accumulate_grad_batches: int = 1,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
        val_check_interval: int = 100,
        check_val_every_n_epoch: int | None = None,
        limit_train_batches: int | float | None = None,
        limit_val_batches: int | float | None = None,
        overfit_batches: int | float = 0.0,
        log_every_n_steps: int = 10,
        reload_dataloaders_every_n_epochs: int = 0,
        use_distributed_sampler: bool = False,
        fast_dev_run: int | bool = False,
        num_sanity_val_steps: int = 0,
        enable_progress_bar: bool = False,
        enable_model_summary: bool = False,
        enable_autolog_hparams: bool = False,
        callbacks: list[Callback] | Callback | None = None,
        **kwargs: Any,
    ) -> None:
        refuse(
            max_epochs == -1,
            f"trainer.max_epochs is {max_epochs}: to Lightning a run is one endless epoch",
            "give the length by trainer.max_steps, data.total_tokens or data.epochs",
        )
        refuse(
            limit_train_batches in (None, 1.0) and not overfit_batches,
            "trainer.limit_train_batches and trainer.overfit_batches would change which data a "
            "step sees",
            "shorten the run by trainer.max_steps",
        )
        refuse(
            gradient_clip_algorithm in (None, "norm"),
            f"trainer.gradient_clip_algorithm is {gradient_clip_algorithm}: gradients are clipped "
            "by their total norm only",
            "leave it out",
        )
        refuse(
            reload_dataloaders_every_n_epochs == 0,
            "trainer.reload_dataloaders_every_n_epochs would restart the data order",
            "leave it out",
        )
        refuse(
            not use_distributed_sampler,
            "trainer.use_distributed_sampler is true: the data order gives each rank its own",
            "leave it out",
        )
        refuse(
            check_val_every_n_epoch is None,
            f"trainer.check_val_every_n_epoch is {check_val_every_n_epoch}: intervals count "
            "optimizer steps",
            "use trainer.val_check_interval",
        )
        strategy = str(kwargs.get("strategy", "")).lower()
        refuse(
            not any(name in strategy for name in SHARDED),
            f"trainer.strategy is {strategy}: sharded strategies cannot be resumed exactly yet",
            "use auto or ddp",
        )
        for name, value in (
            ("accumulate_grad_batches", accumulate_grad_batches),
            ("val_check_interval", val_check_interval),
            ("log_every_n_steps", log_every_n_steps),
        ):
            refuse(value >= 1, f"trainer.{name} is {value}", "it must be at least 1 optimizer step")
        refuse(
            gradient_clip_val is None or gradient_clip_val > 0,
            f"trainer.gradient_clip_val is {gradient_clip_val}",
            "it must be above 0; null turns clipping off",
        )
        # As one list: this signature is what the configuration is read from.
        callbacks = [callbacks] if isinstance(callbacks, Callback) else list(callbacks or [])
        # A start's own budget; Lightning's would count the time of all starts together and stop
        # inside an accumulation window.
        self.max_seconds = Timer(cast(Any, max_time)).time_remaining()
        refuse(
            self.max_seconds is None or self.max_seconds > 0,
            f"trainer.max_time is {max_time}",
            "it must be above 0",
        )
        if fast_dev_run:
            # A trial run of n optimizer steps that leaves nothing behind; Lightning counts batches.
            max_steps = val_check_interval = int(fast_dev_run)
            limit_val_batches = int(fast_dev_run)
            kwargs["logger"] = False
        self.asked_precision = precision
        super().__init__(
            precision=cast(Any, choose_precision(precision, device_type(accelerator))),
            accelerator=accelerator,
            max_steps=max_steps,
            max_epochs=max_epochs,
            accumulate_grad_batches=accumulate_grad_batches,
            gradient_clip_val=gradient_clip_val,
            val_check_interval=val_check_interval * accumulate_grad_batches,
            check_val_every_n_epoch=None,
            limit_val_batches=limit_val_batches,
            log_every_n_steps=log_every_n_steps,
            use_distributed_sampler=False,
            num_sanity_val_steps=num_sanity_val_steps,
            enable_progress_bar=enable_progress_bar,
            enable_model_summary=enable_model_summary,
            enable_autolog_hparams=enable_autolog_hparams,
            callbacks=callbacks,
            **kwargs,
        )
        self.fast_dev_run = int(fast_dev_run)


def refuse(allowed: bool, fault: str, way_out: str) -> None:
    """Raise `ValueError` with fault and way out unless allowed."""
    if not allowed:
        raise ValueError(f"{fault}; {way_out}")


def device_type(accelerator: str) -> str:
    """Device type that Lightning will take for an accelerator's name."""
    if accelerator in ("gpu", "auto"):
        if torch.cuda.is_available():
            return "cuda"
        if torch.backends.mps.is_available():
            return "mps"
    return "cpu" if accelerator in ("auto", "gpu") else accelerator
