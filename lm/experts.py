"""Mixture of experts: router, permutation of tokens, grouped matrix products, load balance.

Axes: B batch, T position, R rows (B·T), D d_model, F ffn_dim, E experts, P experts per token,
S slots: rows sorted by expert and padded, at least R·P.
"""

from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

# Each expert's rows are padded to a multiple of this. CPU kernels are generated anew for each new
# number of rows, which takes longer than the products; GPUs read 16 bytes at a time.
ALIGN_CPU, ALIGN_GPU = 64, 8


class Permute(torch.autograd.Function):
    """Copy rows to their slots, each to `copies` of them; padding slots hold the first row.

    The gradient of indexing is summed by atomic operations, in an order that differs between
    runs; here it is a gather and a sum.
    """

    @staticmethod
    def forward(
        ctx: Any,
        rows: Float[Tensor, "R D"],
        slots: Int[Tensor, " RP"],
        choice_at: Int[Tensor, " S"],
        copies: int,
    ) -> Float[Tensor, "S D"]:
        ctx.save_for_backward(slots)
        ctx.copies = copies
        return rows[choice_at.clamp(min=0) // copies]

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *grad_outputs: Tensor
    ) -> tuple[Tensor | None, ...]:
        (slots,) = ctx.saved_tensors
        return grad_outputs[0][slots].unflatten(0, (-1, ctx.copies)).sum(1), None, None, None


class Unpermute(torch.autograd.Function):
    """The inverse of `Permute`: gather the given slots; padding slots get a gradient of zero."""

    @staticmethod
    def forward(
        ctx: Any,
        made: Float[Tensor, "S D"],
        slots: Int[Tensor, " RP"],
        choice_at: Int[Tensor, " S"],
    ) -> Float[Tensor, "RP D"]:
        ctx.save_for_backward(choice_at)
        return made[slots]

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *grad_outputs: Tensor
    ) -> tuple[Tensor | None, ...]:
        (choice_at,) = ctx.saved_tensors
        gradient = grad_outputs[0][choice_at.clamp(min=0)]
        return gradient.masked_fill(choice_at.unsqueeze(1) < 0, 0.0), None, None


def grouped_mm(left: Tensor, right: Tensor, ends: Int[Tensor, " E"]) -> Tensor:
    """Return torch's grouped product, outside of the graph for types that inductor rejects."""
    multiply: Any = F.grouped_mm
    if left.dtype is not torch.bfloat16:
        multiply = torch.compiler.disable(multiply)
    return multiply(left, right, offs=ends)


class GroupedProduct(torch.autograd.Function):
    """Product of each expert's rows and weights; `ends` are the experts' ends along the rows.

    torch's own gradient of the weights uses a memory order in which the CPU kernel is ten times
    slower.
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
            # Some kernels do not write the gradient of experts without rows (pytorch#172439).
            empty = ends.diff(prepend=ends.new_zeros(1)) == 0
            to_weights = to_weights.masked_fill(empty.view(-1, 1, 1), 0.0)
        return grouped_mm(gradient, weights, ends), to_weights, None


class StackedMLPs(nn.Module):
    """SwiGLU weights of all experts, one stacked tensor per product."""

    def __init__(self, d_model: int, ffn_dim: int, n_experts: int) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.empty(n_experts, 2 * ffn_dim, d_model))
        self.down_proj = nn.Parameter(torch.empty(n_experts, d_model, ffn_dim))

    def forward(self, rows: Float[Tensor, "S D"], ends: Int[Tensor, " E"]) -> Float[Tensor, "S D"]:
        """Apply to each row, sorted by expert, its expert's layer."""
        device = rows.device.type
        # Autocast does not cover grouped products on every device.
        narrow = (
            torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else rows.dtype
        )
        gate_up, down = self.gate_up_proj.to(narrow), self.down_proj.to(narrow)
        gate, up = GroupedProduct.apply(rows.to(narrow), gate_up, ends).chunk(2, dim=-1)
        return GroupedProduct.apply(F.silu(gate) * up, down, ends)


def arrange(
    chosen: Int[Tensor, " RP"], n_experts: int
) -> tuple[Int[Tensor, " RP"], Int[Tensor, " S"], Int[Tensor, " E"], Int[Tensor, " E"]]:
    """Sort choices by expert, with each expert's slots padded to a multiple of the alignment.

    Returns the slot of each choice; the choice in each slot, or -1 for padding; the end of each
    expert's slots; and the number of choices per expert. Shapes do not depend on the routing.
    """
    n_choices, device = len(chosen), chosen.device
    align = ALIGN_CPU if device.type == "cpu" else ALIGN_GPU
    # Padding does not pay for a few rows, as in generation.
    align = align if n_choices >= align * n_experts else 1
    counts = (chosen.unsqueeze(1) == torch.arange(n_experts, device=device)).sum(0)
    filled = (counts + align - 1) // align * align
    size = (n_choices + (align - 1) * n_experts + align - 1) // align * align
    # Padding slots before each expert's first slot.
    ahead = (filled - counts).cumsum(0) - (filled - counts)
    order = chosen.argsort(stable=True)
    sorted_slots = torch.arange(n_choices, device=device) + ahead[chosen[order]]
    choice_at = chosen.new_full((size,), -1).scatter(0, sorted_slots, order)
    slots = torch.empty_like(chosen).scatter(0, order, sorted_slots)
    ends = filled.cumsum(0)
    # Trailing padding goes to the last expert.
    ends = torch.cat((ends[:-1], ends.new_full((1,), size)))
    return slots, choice_at, ends.int(), counts


class Experts(nn.Module):
    """Router in fp32 and its experts; no token is dropped, however uneven the load.

    A token's output is the mean of its experts' outputs, weighted by their renormalized
    probabilities.

    Source: arXiv:2101.03961 (balance), arXiv:2401.04088 (renormalized weights).
    """

    def __init__(self, d_model: int, ffn_dim: int, n_experts: int, per_token: int) -> None:
        super().__init__()
        self.per_token = per_token
        self.gate = nn.Linear(d_model, n_experts, bias=False)
        self.experts = StackedMLPs(d_model, ffn_dim, n_experts)

    def forward(
        self, x: Float[Tensor, "B T D"]
    ) -> tuple[Float[Tensor, "B T D"], Float[Tensor, "2 E"]]:
        """Return the output, and each expert's share of the choices and mean probability."""
        rows = x.flatten(0, 1)
        with torch.autocast(x.device.type, enabled=False):
            probabilities = F.linear(rows.float(), self.gate.weight.float()).softmax(-1)  # (R, E)
        weights, chosen = probabilities.topk(self.per_token)  # (R, P)
        weights = weights / weights.sum(-1, keepdim=True)
        slots, choice_at, ends, counts = arrange(chosen.flatten(), probabilities.shape[1])
        permuted = Permute.apply(rows, slots, choice_at, self.per_token)
        made = Unpermute.apply(self.experts(permuted, ends), slots, choice_at)
        made = made.unflatten(0, (-1, self.per_token))  # (R, P, D)
        result = (made * weights.type_as(made).unsqueeze(-1)).sum(1).view_as(x)
        shares = counts / chosen.numel()
        return result, torch.stack((shares, probabilities.mean(0)))


def balance_loss(routing: Float[Tensor, "L 2 E"]) -> Float[Tensor, ""]:
    """Return the load-balancing loss, mean over layers: 1 for an even load.

    Source: arXiv:2101.03961, equation 4.
    """
    shares, probabilities = routing.unbind(1)
    return (shares * probabilities).sum(-1).mean() * routing.shape[-1]


def expert_metrics(routing: Float[Tensor, "L 2 E"]) -> dict[str, float]:
    """Return the logged metrics of experts; loads are multiples of an even share."""
    loads = routing[:, 0] * routing.shape[-1]  # (L, E)
    metrics = {
        "moe/balance_loss": float(balance_loss(routing)),
        "moe/load_max": float(loads.max()),
        "moe/load_min": float(loads.min()),
    }
    return metrics | {f"moe/load/{i}": load for i, load in enumerate(loads.mean(0).tolist())}
