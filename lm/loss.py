"""Cross-entropy over hidden states and head weight, in chunks: logits are never whole in memory."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

IGNORE_INDEX = -100

# Rows of hidden states whose logits exist at one time. On 2 CPU cores a step took 1.17 times as
# long with 256 rows and the same with 4096; memory grows with it.
CHUNK_ROWS = 1024


def shift(
    input_ids: Int[Tensor, "B L"], labels: Int[Tensor, "B L"]
) -> tuple[Int[Tensor, "B T"], Int[Tensor, "B T"]]:
    """Inputs and next-token targets (T = L - 1) of a batch: the one place that shifts."""
    return input_ids[:, :-1], labels[:, 1:]


def softmax_step(
    logits: Float[Tensor, "R V"], targets: Int[Tensor, " R"]
) -> tuple[Float[Tensor, " R"], Float[Tensor, "R V"]]:
    """Loss of each row and the gradient of their sum to the logits, both zero where ignored.

    All in fp32 whatever the logits are, the p - 1 of the target too: on confident tokens a bf16
    softmax has the right sum and a gradient that is wrong by 100 %. fp32 logits are overwritten.
    """
    real = targets != IGNORE_INDEX
    index = torch.where(real, targets, 0).unsqueeze(1)
    wide = logits.float()
    log_sum = torch.logsumexp(wide, dim=1, keepdim=True)
    loss = torch.where(real, (log_sum - wide.gather(1, index)).squeeze(1), 0.0)
    # exp(x - inf) is 0: an ignored row needs no pass of its own.
    log_sum = log_sum.masked_fill(~real.unsqueeze(1), torch.inf)
    gradient = wide.sub_(log_sum).exp_().to(logits.dtype)
    # Of an ignored row this is expm1(-0), which is 0 as well.
    return loss, gradient.scatter_(1, index, torch.expm1(-loss).unsqueeze(1).to(logits.dtype))


class ChunkedCrossEntropy(torch.autograd.Function):
    """Sum of cross-entropies whose gradients are made in the forward pass, chunk by chunk.

    Recomputing the logits in a backward pass instead took twice as long.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Float[Tensor, "R D"],
        weight: Float[Tensor, "V D"],
        targets: Int[Tensor, " R"],
        chunk_rows: int,
        step: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]],
    ) -> Float[Tensor, ""]:
        device = hidden.device.type
        narrow = (
            torch.get_autocast_dtype(device)
            if torch.is_autocast_enabled(device)
            else torch.promote_types(hidden.dtype, weight.dtype)
        )
        with torch.autocast(device, enabled=False):
            head, rows = weight.to(narrow), hidden.to(narrow)
            loss = torch.zeros((), dtype=torch.float32, device=hidden.device)
            gradients = None
            if any(ctx.needs_input_grad):
                gradients = torch.empty_like(rows), torch.zeros_like(weight, dtype=torch.float32)
            for start in range(0, rows.shape[0], chunk_rows):
                chunk = slice(start, start + chunk_rows)
                logits = rows[chunk] @ head.T
                if gradients is None:
                    loss += F.cross_entropy(logits.float(), targets[chunk], reduction="sum")
                    continue
                losses, gradient = step(logits, targets[chunk])
                loss += losses.sum()
                torch.mm(gradient, head, out=gradients[0][chunk])
                gradients[1].add_(gradient.T @ rows[chunk])
        if gradients is not None:
            ctx.save_for_backward(gradients[0].to(hidden.dtype), gradients[1].to(weight.dtype))
        return loss

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *grad_outputs: Tensor
    ) -> tuple[Tensor | None, ...]:
        hidden_grad, weight_grad = ctx.saved_tensors
        return hidden_grad * grad_outputs[0], weight_grad * grad_outputs[0], None, None, None


def cross_entropy_sum(
    hidden: Float[Tensor, "B T D"],
    weight: Float[Tensor, "V D"],
    targets: Int[Tensor, "B T"],
    chunk_rows: int = CHUNK_ROWS,
    step: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] = softmax_step,
) -> Float[Tensor, ""]:
    """Sum in nats over all targets that are not `IGNORE_INDEX`; 0 when there are none.

    Matrix products run in the autocast type where autocast is on; softmax, loss and the sum of
    the head's gradient over chunks are fp32. `step` is `softmax_step`, compiled or not.
    """
    return ChunkedCrossEntropy.apply(
        hidden.flatten(0, 1), weight, targets.flatten(), chunk_rows, step
    )  # pyright: ignore[reportReturnType]
