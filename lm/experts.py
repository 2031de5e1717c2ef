"""Mixture of experts: feed-forward layers of which each position goes through a few.

Axes: B batch, T position, R rows (B·T), D d_model, F ffn_dim, E experts, P experts a
token, S places, some more than R·P.
"""

from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

# Rows of an expert are filled up to a multiple of this. CPU kernels are made anew for each number
# of rows that they meet, which takes longer than the products; GPUs read 16 bytes at a time.
ALIGN_CPU, ALIGN_GPU = 64, 8


class Place(torch.autograd.Function):
    """Rows at given places of a longer tensor, each at `copies` of them.

    Indexing would add up its gradient by atomic operations, in an order that differs from run to
    run; here it is a plain copy and a sum of it. Places that no row is sent to hold the first row.
    """

    @staticmethod
    def forward(
        ctx: Any,
        rows: Float[Tensor, "R D"],
        places: Int[Tensor, " RP"],
        rows_at: Int[Tensor, " S"],
        copies: int,
    ) -> Float[Tensor, "S D"]:
        ctx.save_for_backward(places)
        ctx.copies = copies
        return rows[rows_at.clamp(min=0) // copies]

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *grad_outputs: Tensor
    ) -> tuple[Tensor | None, ...]:
        (places,) = ctx.saved_tensors
        return grad_outputs[0][places].unflatten(0, (-1, ctx.copies)).sum(1), None, None, None


class Take(torch.autograd.Function):
    """The inverse of `Place`: what lies at the given places; nothing comes back to the others."""

    @staticmethod
    def forward(
        ctx: Any, made: Float[Tensor, "S D"], places: Int[Tensor, " RP"], rows_at: Int[Tensor, " S"]
    ) -> Float[Tensor, "RP D"]:
        ctx.save_for_backward(rows_at)
        return made[places]

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *grad_outputs: Tensor
    ) -> tuple[Tensor | None, ...]:
        (rows_at,) = ctx.saved_tensors
        gradient = grad_outputs[0][rows_at.clamp(min=0)]
        return gradient.masked_fill(rows_at.unsqueeze(1) < 0, 0.0), None, None


def grouped_mm(left: Tensor, right: Tensor, ends: Int[Tensor, " E"]) -> Tensor:
    """torch's grouped product; outside of the graph in types that the compiler does not take."""
    multiply: Any = F.grouped_mm
    if left.dtype is not torch.bfloat16:
        multiply = torch.compiler.disable(multiply)
    return multiply(left, right, offs=ends)


class GroupedProduct(torch.autograd.Function):
    """Each expert's rows, of which `ends` tells the last ones, times its weights.

    torch's own gradient to the weights takes the outer products in the order that its CPU kernel
    does ten times slower.
    """

    @staticmethod
    def forward(
        ctx: Any,
        rows: Float[Tensor, "S I"],
        weights: Float[Tensor, "E O I"],
        ends: Int[Tensor, " E"],
    ) -> Float[Tensor, "S O"]:
        ctx.save_for_backward(rows, weights, ends)
        return grouped_mm(rows, weights.transpose(1, 2), ends)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *grad_outputs: Tensor
    ) -> tuple[Tensor | None, ...]:
        rows, weights, ends = ctx.saved_tensors
        gradient = grad_outputs[0].contiguous()
        to_weights = grouped_mm(rows.T, gradient, ends).transpose(1, 2)
        if rows.is_cuda:
            # Some kernels leave what no row belongs to as it was (pytorch#172439).
            empty = ends.diff(prepend=ends.new_zeros(1)) == 0
            to_weights = to_weights.masked_fill(empty.view(-1, 1, 1), 0.0)
        return grouped_mm(gradient, weights, ends), to_weights, None


class StackedMLPs(nn.Module):
    """The weights of all experts, each a SwiGLU layer, in one tensor for each product."""

    def __init__(self, d_model: int, ffn_dim: int, n_experts: int) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.empty(n_experts, 2 * ffn_dim, d_model))
        self.down_proj = nn.Parameter(torch.empty(n_experts, d_model, ffn_dim))

    def forward(self, rows: Float[Tensor, "S D"], ends: Int[Tensor, " E"]) -> Float[Tensor, "S D"]:
        """Rows in the order of their experts, each through its own layer."""
        device = rows.device.type
        # Autocast does not know grouped products on every device.
        narrow = (
            torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else rows.dtype
        )
        gate_up, down = self.gate_up_proj.to(narrow), self.down_proj.to(narrow)
        gate, up = GroupedProduct.apply(rows.to(narrow), gate_up, ends).chunk(2, dim=-1)
        return GroupedProduct.apply(F.silu(gate) * up, down, ends)


def arrange(
    chosen: Int[Tensor, " RP"], n_experts: int
) -> tuple[Int[Tensor, " RP"], Int[Tensor, " S"], Int[Tensor, " E"], Int[Tensor, " E"]]:
    """Where each choice lies when all are sorted by expert, each expert's filled up to a multiple.

    Returns the place of each choice; the choice at each place, or -1; where each expert's places
    end; and how often each was chosen. Shapes do not depend on what is chosen.
    """
    n_choices, device = len(chosen), chosen.device
    align = ALIGN_CPU if device.type == "cpu" else ALIGN_GPU
    # A few rows, as when text is written, are not worth it.
    align = align if n_choices >= align * n_experts else 1
    counts = (chosen.unsqueeze(1) == torch.arange(n_experts, device=device)).sum(0)
    filled = (counts + align - 1) // align * align
    size = (n_choices + (align - 1) * n_experts + align - 1) // align * align
    # Of each expert, how much further its places begin than its choices do when sorted.
    ahead = (filled - counts).cumsum(0) - (filled - counts)
    order = chosen.argsort(stable=True)
    sorted_places = torch.arange(n_choices, device=device) + ahead[chosen[order]]
    rows_at = chosen.new_full((size,), -1).scatter(0, sorted_places, order)
    places = torch.empty_like(chosen).scatter(0, order, sorted_places)
    ends = filled.cumsum(0)
    # What is left belongs to the last: no place is without an expert.
    ends = torch.cat((ends[:-1], ends.new_full((1,), size)))
    return places, rows_at, ends.int(), counts


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
        places, rows_at, ends, counts = arrange(chosen.flatten(), probabilities.shape[1])
        taken = Place.apply(rows, places, rows_at, self.per_token)
        made = Take.apply(self.experts(taken, ends), places, rows_at)
        made = made.unflatten(0, (-1, self.per_token))  # (R, P, D)
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
