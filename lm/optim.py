"""The optimizer and its parameter groups."""

from collections import Counter
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import nn

from lm.config import OptimConfig
from lm.finite import few
from lm.model import plain_keys

CHANGED = (
    "build_optimizer in lm/optim.py was changed; change it back, or begin a new run with these "
    "weights by model.from_weights"
)


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


def layout(module: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The optimizer's class, and the names of its parameters by group, for checkpoints.

    Raises:
        ValueError: a trainable parameter is in no group, or one is twice in them.
    """
    names = plain_keys({name: p for name, p in module.named_parameters()})
    by_id = {id(p): name for name, p in names.items()}
    groups = [
        [by_id.get(id(p), "one that is not the network's") for p in group["params"]]
        for group in optimizer.param_groups
    ]
    count = Counter(name for group in groups for name in group)
    trainable = Counter(name for name, p in names.items() if p.requires_grad)
    frozen = names.keys() - trainable.keys()
    faults = [f"{name} is missing" for name in trainable - count]
    faults += [f"{name} is too many" for name in count - trainable - Counter(frozen)]
    if faults:
        raise ValueError(
            f"the optimizer must hold every trainable parameter once: {few(faults)}; change "
            "build_optimizer in lm/optim.py, and freeze by requires_grad_(False) what is not to "
            "be trained"
        )
    return {"class": type(optimizer).__qualname__, "groups": groups}


def override_stored_settings(
    checkpoint: dict[str, Any],
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    lr_multiplier: Callable[[int], float],
) -> None:
    """Replace a checkpoint's optimizer settings by the current ones.

    Restoring an optimizer would bring the stored settings back without notice.

    Raises:
        ValueError: the current optimizer is another one, or has other parameter groups.
    """
    own, own_groups = layout(module, optimizer), optimizer.param_groups
    # Checkpoints of earlier versions have none.
    stored_layout = checkpoint.get("optimizer") or own
    multiplier = lr_multiplier(checkpoint["global_step"])
    rates = [group["lr"] for group in own_groups]
    for state in checkpoint["optimizer_states"]:
        was, sizes = ([len(g["params"]) for g in gs] for gs in (state["param_groups"], own_groups))
        if was != sizes:
            raise ValueError(
                f"the optimizer has groups of {sizes} tensors, in the checkpoint of {was}: "
                f"{CHANGED}"
            )
        if own["class"] != stored_layout["class"]:
            raise ValueError(
                f"the optimizer is {own['class']}, in the checkpoint {stored_layout['class']}: "
                f"{CHANGED}"
            )
        if own["groups"] != stored_layout["groups"]:
            raise ValueError(
                f"the optimizer holds the tensors in another order than the checkpoint: {CHANGED}"
            )
        for stored, group, rate in zip(state["param_groups"], own_groups, rates, strict=True):
            stored |= {name: value for name, value in group.items() if name != "params"}
            stored |= {"lr": rate * multiplier, "initial_lr": rate}
    for schedule in checkpoint["lr_schedulers"]:
        schedule |= {"base_lrs": rates, "_last_lr": [rate * multiplier for rate in rates]}
