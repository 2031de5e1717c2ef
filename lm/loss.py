"""Chunked cross-entropy over hidden states and head weight; full logits never exist in memory."""

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

# Label of positions without a target; data has the same constant and cannot be imported here.
IGNORE_INDEX = -100

# Rows of hidden states per chunk; memory grows with it. On 2 CPU cores the loss took 1.06 times as
# long with 512, because the head's gradient is accumulated once per chunk.
CHUNK_ROWS = 1024


def shift(
    input_ids: Int[Tensor, "B L"], labels: Int[Tensor, "B L"]
) -> tuple[Int[Tensor, "B T"], Int[Tensor, "B T"]]:
    """Return inputs and next-token targets (T = L - 1) of a batch; nothing else shifts."""
    return input_ids[:, :-1], labels[:, 1:]


def softmax_step(
    logits: Float[Tensor, "R V"], targets: Int[Tensor, " R"]
) -> tuple[Float[Tensor, " R"], Float[Tensor, "R V"]]:
    """Return each row's loss and the gradient of their sum to the logits, both zero if ignored.

    Computed in fp32 for all types of logits, including the p - 1 of the target: on confident tokens
    a bf16 softmax has the right sum, but its gradient is wrong by 100 %. Overwrites fp32 logits.
    """
    real = targets != IGNORE_INDEX
    index = torch.where(real, targets, 0).unsqueeze(1)
    wide = logits.float()
    log_sum = torch.logsumexp(wide, dim=1, keepdim=True)
    loss = torch.where(real, (log_sum - wide.gather(1, index)).squeeze(1), 0.0)
    # exp(x - inf) is 0, so ignored rows need no separate pass.
    log_sum = log_sum.masked_fill(~real.unsqueeze(1), torch.inf)
    gradient = wide.sub_(log_sum).exp_().to(logits.dtype)
    # Ignored rows get expm1(-0) = 0.
    return loss, gradient.scatter_(1, index, torch.expm1(-loss).unsqueeze(1).to(logits.dtype))


class ChunkedCrossEntropy(torch.autograd.Function):
    """Sum of cross-entropies; gradients are computed in the forward pass, chunk by chunk.

    Recomputing the logits in the backward pass took twice as long.
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
            # One buffer for all chunks: its pages stay mapped, and in the cache if they fit.
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
                head_grad = gradient.T @ part
                gradients[1].add_(head_grad) if start else gradients[1].copy_(head_grad)
                del gradient, head_grad  # frees them before the next chunk
        if gradients is not None:
            # Not save_for_backward: it would keep a reference to the head's gradient, and autograd
            # would copy it instead of taking it over.
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
    """Return the logits, written to `room` in the memory order that is faster on the device.

    On a CPU the vocabulary is the first axis: all but one of a chunk's products then repack their
    smaller operand and run up to twice as fast.
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
    """Return the sum in nats over all targets that are not `IGNORE_INDEX`; 0 without targets.

    Matrix products run in the autocast type; softmax, loss and the sum of the head's gradient over
    chunks are fp32. `step` is `softmax_step`, compiled or not, or `native_softmax_step`. It also
    runs without autograd, because the unused gradient costs little.
    """
    return ChunkedCrossEntropy.apply(
        hidden.flatten(0, 1), weight, targets.flatten(), chunk_rows, step
    )  # pyright: ignore[reportReturnType]
