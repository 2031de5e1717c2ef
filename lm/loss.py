"""Cross-entropy over hidden states and head weight, in chunks: logits are never whole in memory."""

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

IGNORE_INDEX = -100

# Rows of hidden states whose logits exist at one time: memory grows with it. On 2 CPU cores a loss
# took 1.06 times as long with 512, for the head's gradient is added up once a chunk.
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
            (n_rows, _), (vocab, _) = rows.shape, head.shape
            loss = torch.zeros((), dtype=torch.float32, device=hidden.device)
            gradients = None
            if any(ctx.needs_input_grad):
                gradients = torch.empty_like(rows), torch.empty_like(weight, dtype=torch.float32)
                if not n_rows:
                    gradients[1].zero_()
            # One buffer: its pages stay mapped, and in a cache where they fit.
            room = rows.new_empty(min(chunk_rows, n_rows) * vocab)
            for start in range(0, n_rows, chunk_rows):
                chunk = slice(start, start + chunk_rows)
                part = rows[chunk]
                logits = product(part, head, room[: len(part) * vocab])
                losses, gradient = step(logits, targets[chunk])
                loss += losses.sum()
                if gradients is None:
                    continue
                torch.mm(gradient, head, out=gradients[0][chunk])
                of_chunk = gradient.T @ part
                gradients[1].add_(of_chunk) if start else gradients[1].copy_(of_chunk)
                del gradient, of_chunk  # not beside those of the next chunk
        if gradients is not None:
            # Not by save_for_backward, which would hold on to the head's gradient: autograd could
            # not take it over as it is and would copy it.
            ctx.gradients = gradients[0].to(hidden.dtype), gradients[1].to(weight.dtype)
        return loss

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *grad_outputs: Tensor
    ) -> tuple[Tensor | None, ...]:
        if ctx.gradients is None:
            raise RuntimeError("backward through the chunked loss a second time")
        (hidden_grad, weight_grad), ctx.gradients = ctx.gradients, None
        scale = grad_outputs[0]
        return hidden_grad.mul_(scale), weight_grad.mul_(scale), None, None, None


def product(
    rows: Float[Tensor, "R D"], head: Float[Tensor, "V D"], room: Float[Tensor, " RV"]
) -> Float[Tensor, "R V"]:
    """Logits, written to `room` in the order that is faster to make and to go on with.

    On a CPU they lie vocabulary first: all but one of the products of a chunk then take its small
    side as the one that has to be repacked, and run up to twice as fast.
    """
    shape = len(rows), len(head)
    if rows.device.type != "cpu":
        return torch.mm(rows, head.T, out=room.view(shape))
    return torch.mm(head, rows.T.contiguous(), out=room.view(shape[::-1])).T


def cross_entropy_sum(
    hidden: Float[Tensor, "B T D"],
    weight: Float[Tensor, "V D"],
    targets: Int[Tensor, "B T"],
    chunk_rows: int = CHUNK_ROWS,
    step: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] = softmax_step,
) -> Float[Tensor, ""]:
    """Sum in nats over all targets that are not `IGNORE_INDEX`; 0 when there are none.

    Matrix products run in the autocast type where autocast is on; softmax, loss and the sum of
    the head's gradient over chunks are fp32. `step` is `softmax_step`, compiled or not, or
    `native_softmax_step`; without autograd it is called too, for half of it costs little.
    """
    return ChunkedCrossEntropy.apply(
        hidden.flatten(0, 1), weight, targets.flatten(), chunk_rows, step
    )  # pyright: ignore[reportReturnType]
