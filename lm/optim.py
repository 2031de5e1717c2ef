"""The optimizer and its parameter groups."""

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import nn

from lm.config import OptimConfig


def lower_rate(lr: float) -> float:
    """Return a peak learning rate to try after a run has diverged at `lr`."""
    # AdamW moves each weight by about lr per step: no transformer learns at much above 1e-2.
    return lr / 3 if lr <= 1e-2 else OptimConfig().lr


def parameter_groups(module: nn.Module, weight_decay: float) -> list[dict]:
    """Return all trainable parameters: matrices with weight decay, vectors (norms) without."""
    trainable = [p for p in module.parameters() if p.requires_grad]
    return [
        {"params": [p for p in trainable if p.dim() >= 2], "weight_decay": weight_decay},
        {"params": [p for p in trainable if p.dim() < 2], "weight_decay": 0.0},
    ]


def use_fused(fused: bool | Literal["auto"], device: str, precision: str) -> bool:
    """Whether the fused kernel is used for a device type and a Trainer precision.

    Raises:
        ValueError: fused is required but not supported or not correct.
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
    """Return AdamW with decoupled weight decay; not fused: torch's default for the device.

    Source: arXiv:1711.05101.
    """
    # fused=False would also disable torch's default for the device.
    return torch.optim.AdamW(
        parameter_groups(module, config.weight_decay),
        lr=config.lr,
        betas=config.betas,
        eps=config.eps,
        fused=fused or None,
    )


def override_stored_settings(
    checkpoint: dict[str, Any],
    own_groups: list[dict[str, Any]],
    lr_multiplier: Callable[[int], float],
) -> None:
    """Replace a checkpoint's optimizer settings by the current ones.

    Restoring an optimizer would bring the stored settings back without notice.

    Raises:
        ValueError: the current optimizer has other parameter groups.
    """
    multiplier = lr_multiplier(checkpoint["global_step"])
    rates = [group["lr"] for group in own_groups]
    for state in checkpoint["optimizer_states"]:
        was, sizes = ([len(g["params"]) for g in gs] for gs in (state["param_groups"], own_groups))
        if was != sizes:
            raise ValueError(
                f"the optimizer has groups of {sizes} tensors, in the checkpoint of {was}: "
                "build_optimizer in lm/optim.py was changed; change it back, or begin a new "
                "run with these weights by model.from_weights"
            )
        for stored, group, rate in zip(state["param_groups"], own_groups, rates, strict=True):
            stored |= {name: value for name, value in group.items() if name != "params"}
            stored |= {"lr": rate * multiplier, "initial_lr": rate}
    for schedule in checkpoint["lr_schedulers"]:
        schedule |= {"base_lrs": rates, "_last_lr": [rate * multiplier for rate in rates]}
