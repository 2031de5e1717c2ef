"""Mixture of experts: feed-forward layers of which each position goes through a few.

Axes: B batch, T position, R rows (B·T), D d_model, F ffn_dim, E experts, P experts a token.
"""

from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn


class Gather(torch.autograd.Function):
    """Rows in another order, each `copies` times.

    Indexing would add up its gradient by atomic operations, in an order that differs from run to
    run; the inverse order makes a plain copy and a sum of it.
    """

    @staticmethod
    def forward(
        ctx: Any,
        rows: Float[Tensor, "R D"],
        order: Int[Tensor, " RP"],
        inverse: Int[Tensor, " RP"],
        copies: int,
    ) -> Float[Tensor, "RP D"]:
        ctx.save_for_backward(inverse)
        ctx.copies = copies
        return rows[order // copies]

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *grad_outputs: Tensor
    ) -> tuple[Tensor | None, ...]:
        (inverse,) = ctx.saved_tensors
        gradient = grad_outputs[0][inverse]
        return gradient.unflatten(0, (-1, ctx.copies)).sum(1), None, None, None


def grouped_product(
    rows: Float[Tensor, "RP I"], weights: Float[Tensor, "E O I"], ends: Int[Tensor, " E"]
) -> Float[Tensor, "RP O"]:
    """Each expert's rows, of which `ends` tells the last ones, times its weights."""
    multiply: Any = F.grouped_mm
    if rows.dtype is not torch.bfloat16:
        # The compiler takes it in bf16 only.
        multiply = torch.compiler.disable(multiply)
    return multiply(rows, weights.transpose(1, 2), offs=ends)


class StackedMLPs(nn.Module):
    """The weights of all experts, each a SwiGLU layer, in one tensor for each product."""

    def __init__(self, d_model: int, ffn_dim: int, n_experts: int) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.empty(n_experts, 2 * ffn_dim, d_model))
        self.down_proj = nn.Parameter(torch.empty(n_experts, d_model, ffn_dim))

    def forward(
        self, rows: Float[Tensor, "RP D"], ends: Int[Tensor, " E"]
    ) -> Float[Tensor, "RP D"]:
        """Rows in the order of their experts, each through its own layer."""
        device = rows.device.type
        # Autocast does not know grouped products on every device.
        narrow = (
            torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else rows.dtype
        )
        gate_up, down = self.gate_up_proj.to(narrow), self.down_proj.to(narrow)
        gate, up = grouped_product(rows.to(narrow), gate_up, ends).chunk(2, dim=-1)
        return grouped_product(F.silu(gate) * up, down, ends)


class Experts(nn.Module):
    """A router in fp32 and its experts; no position is dropped, however uneven their load.

    A position's result is the mean of its experts', weighted by their probabilities, which are
    made to add up to 1.

    Source: arXiv:2101.03961 (balance), arXiv:2401.04088 (weights of the chosen).
    """

    def __init__(self, d_model: int, ffn_dim: int, n_experts: int, per_token: int) -> None:
        super().__init__()
        self.per_token = per_token
        self.gate = nn.Linear(d_model, n_experts, bias=False)
        self.experts = StackedMLPs(d_model, ffn_dim, n_experts)

    def forward(
        self, x: Float[Tensor, "B T D"]
    ) -> tuple[Float[Tensor, "B T D"], Float[Tensor, "2 E"]]:
        """The result; and of each expert its share of the choices and its mean probability."""
        rows = x.flatten(0, 1)
        with torch.autocast(x.device.type, enabled=False):
            probabilities = F.linear(rows.float(), self.gate.weight.float()).softmax(-1)  # (R, E)
        weights, chosen = probabilities.topk(self.per_token)  # (R, P)
        weights = weights / weights.sum(-1, keepdim=True)
        order = chosen.flatten().argsort(stable=True)
        inverse = order.argsort()
        experts = torch.arange(probabilities.shape[1], device=x.device)
        counts = (chosen.flatten().unsqueeze(1) == experts).sum(0)
        taken = Gather.apply(rows, order, inverse, self.per_token)
        made = self.experts(taken, counts.cumsum(0).int())
        made = Gather.apply(made, inverse, order, 1).unflatten(0, (-1, self.per_token))
        result = (made * weights.type_as(made).unsqueeze(-1)).sum(1).view_as(x)
        shares = counts / chosen.numel()
        return result, torch.stack((shares, probabilities.mean(0)))


def balance_loss(routing: Float[Tensor, "L 2 E"]) -> Float[Tensor, ""]:
    """How unevenly experts are used, mean over layers: 1 where all are used alike.

    Source: arXiv:2101.03961, equation 4.
    """
    shares, probabilities = routing.unbind(1)
    return (shares * probabilities).sum(-1).mean() * routing.shape[-1]


def expert_figures(routing: Float[Tensor, "L 2 E"]) -> dict[str, float]:
    """What is logged of them; loads are multiples of an even share."""
    loads = routing[:, 0] * routing.shape[-1]  # (L, E)
    figures = {
        "moe/balance_loss": float(balance_loss(routing)),
        "moe/load_max": float(loads.max()),
        "moe/load_min": float(loads.min()),
    }
    return figures | {f"moe/load/{i}": load for i, load in enumerate(loads.mean(0).tolist())}
