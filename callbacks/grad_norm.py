"""Gradient norms: share of clipped steps, and norms by part of the network."""

import math
from collections import deque
from typing import Any

import torch
from lightning.pytorch import Callback
from torch import Tensor

from callbacks.run.steps import at_step_edge, is_logged
from callbacks.run.trainer import Trainer
from lm.gradients import total_norm
from lm.module import LMModule

BASE_STEPS = 20  # norms that a jump is measured from, or that must be near zero


def part_of(name: str) -> str:
    """Return the part of the network with a parameter: embed_tokens, layers.0, …, norm, lm_head."""
    words = name.removeprefix("net.").removeprefix("model.").split(".")
    return ".".join(words[:2]) if words[1].isdecimal() else words[0]


class GradNorm(Callback):
    """Share of recent steps that were clipped, and norms of the parts of the network.

    Waits for the device at logged steps only. A norm that is not finite does not count.
    """

    def __init__(self, *, per_layer_every_n_steps: int | None = None, window: int = 100) -> None:
        """Set up the measurements.

        Args:
            per_layer_every_n_steps: Optimizer steps between norms of each part, taken where a step
                is logged. Unset: none.
            window: Steps that optim/clip_share and warnings look back on.
        """
        every = per_layer_every_n_steps
        if every is not None and every < 1:
            raise ValueError(f"grad_norm.per_layer_every_n_steps is {every}: must be at least 1")
        if window <= BASE_STEPS:
            raise ValueError(f"grad_norm.window is {window}: must be above {BASE_STEPS}")
        self.per_layer_every_n_steps = every
        self.norms: deque[float] = deque(maxlen=window)
        self._pending: deque[Tensor] = deque(maxlen=window)
        self._parts: dict[str, Tensor] = {}

    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: LMModule, optimizer: torch.optim.Optimizer
    ) -> None:
        every, step = self.per_layer_every_n_steps, trainer.global_step + 1
        if every is None or step % every or not is_logged(trainer, step):
            return
        gradients: dict[str, list[Tensor]] = {}
        for name, parameter in pl_module.named_parameters():
            if parameter.grad is not None:
                gradients.setdefault(part_of(name), []).append(parameter.grad)
        self._parts = {part: total_norm(found) for part, found in gradients.items()}

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LMModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if at_step_edge(trainer, batch_idx):
            self._pending.append(pl_module.grad_norm)

    def step_metrics(self, trainer: Trainer) -> dict[str, float]:
        """Return metrics of the last finished step."""
        self._fetch()
        scale = trainer.lightning_module.grad_scale
        metrics = {f"grad_norm/{part}": float(n * scale) for part, n in self._parts.items()}
        self._parts = {}
        if (clip := trainer.gradient_clip_val) and self.norms:
            share = sum(norm > clip for norm in self.norms) / len(self.norms)
            metrics |= {"optim/clip_at": clip, "optim/clip_share": share}
        return metrics

    def _fetch(self) -> None:
        if self._pending:
            self.norms.extend(filter(math.isfinite, torch.stack([*self._pending]).tolist()))
            self._pending.clear()

    def state_dict(self) -> dict[str, Any]:
        self._fetch()
        return {"norms": list(self.norms)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.norms.extend(state_dict["norms"])
