"""The optimizer: its settings and its parameter groups."""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """AdamW and its learning-rate schedule."""

    lr: float = 3e-4
    """Peak learning rate, reached at the end of the warm-up."""
    min_lr_ratio: float = 0.1
    """Last learning rate as a share of lr, 0 to 1."""
    warmup: int | float = 0.02
    """Linear rise: an int is optimizer steps, 0 <= float < 1 a share of the run, rounded down."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Decay of the first and the second moment, each 0 <= beta < 1."""
    eps: float = 1e-8
    """Added to the root of the second moment."""
    weight_decay: float = 0.1
    """Decoupled decay of tensors with two or more dimensions; the others have none."""
    fused: bool | Literal["auto"] = "auto"
    """One kernel for the whole update. auto: where supported, and not with precision 16-mixed."""

    def __post_init__(self) -> None:
        if not 0 < self.lr < math.inf:
            raise ValueError(f"model.optim.lr is {self.lr}: must be above 0 and finite")
        if not 0 <= self.min_lr_ratio <= 1:
            raise ValueError(f"model.optim.min_lr_ratio is {self.min_lr_ratio}: must be 0 to 1")
        if isinstance(self.warmup, float) and not 0 <= self.warmup < 1:
            raise ValueError(
                f"model.optim.warmup is {self.warmup}: a share of the run must be at least 0 and "
                "below 1; write an int (no dot) for a number of steps"
            )
        if self.warmup < 0:
            raise ValueError(f"model.optim.warmup is {self.warmup}: must not be negative")
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"model.optim.betas is {self.betas}: each must be at least 0, below 1")
        if not 0 < self.eps < math.inf:
            raise ValueError(f"model.optim.eps is {self.eps}: must be above 0")
        if not 0 <= self.weight_decay < math.inf:
            raise ValueError(
                f"model.optim.weight_decay is {self.weight_decay}: must not be negative"
            )


def lower_rate(lr: float) -> float:
    """A peak learning rate to try where a run has diverged at another one."""
    # AdamW moves each weight by about lr per step: no transformer learns at much above 1e-2.
    return lr / 3 if lr <= 1e-2 else OptimConfig().lr


def parameter_groups(module: nn.Module, weight_decay: float) -> list[dict]:
    """Every trainable parameter once: matrices with decay, vectors (norms, biases) without."""
    trainable = [p for p in module.parameters() if p.requires_grad]
    return [
        {"params": [p for p in trainable if p.dim() >= 2], "weight_decay": weight_decay},
        {"params": [p for p in trainable if p.dim() < 2], "weight_decay": 0.0},
    ]


def use_fused(fused: bool | Literal["auto"], device: str, precision: str) -> bool:
    """Whether the fused kernel runs for a device type and a Trainer precision.

    Raises:
        ValueError: fused is asked for where it cannot run or would be wrong.
    """
    scaled = precision.startswith("16")
    if fused == "auto":
        return device in ("cpu", "cuda") and not scaled
    if fused and scaled:
        # Lightning leaves unscaling to a fused optimizer, so clipping would see scaled gradients.
        raise ValueError(
            f"model.optim.fused is true and trainer.precision is {precision}: the fused optimizer "
            "unscales gradients only after clipping; set model.optim.fused to auto or false"
        )
    if fused and device not in ("cpu", "cuda"):
        raise ValueError(
            f"model.optim.fused is true on device {device}: it is supported on cpu and cuda; set "
            "model.optim.fused to auto or false"
        )
    return fused


def build_optimizer(module: nn.Module, config: OptimConfig, fused: bool) -> torch.optim.AdamW:
    """AdamW with decoupled weight decay; not fused, it is torch's default for the device.

    Source: arXiv:1711.05101.
    """
    # A fused of False would also rule out torch's default for the device.
    return torch.optim.AdamW(
        parameter_groups(module, config.weight_decay),
        lr=config.lr,
        betas=config.betas,
        eps=config.eps,
        fused=fused or None,
    )
