"""Gradients of an optimizer step: total norm, clipping, and updates that are skipped."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.linalg import vector_norm
from torch.nn.utils import get_total_norm

from lm.finite import NonFiniteError, few

# Elements per fp32 sum on a CPU. A single sum over 200 million elements was 3 % too low, because
# small terms vanish beside a large sum; and torch splits sums of 32,768 or more among its threads.
BLOCK = 1024
# Isolated skipped updates are normal: an outlier batch, or an overflow of the scaled fp16 loss.
MOST_SKIPPED_AT_END = 2


def total_norm(gradients: Sequence[Tensor]) -> Tensor:
    """Return the L2 norm of all gradients together, as a 0-d tensor.

    On a CPU it is accurate to 1e-6 at any size and independent of the number of threads. GPU
    kernels sum in blocks by themselves.
    """
    if not gradients or gradients[0].device.type != "cpu":
        return get_total_norm(gradients)
    return vector_norm(torch.stack([norm(gradient) for gradient in gradients]))


def norm(tensor: Tensor) -> Tensor:
    """Return the L2 norm of a CPU tensor: norms of blocks, summed in fp64."""
    flat = tensor.reshape(-1)
    if len(flat) <= BLOCK:
        return vector_norm(flat)
    whole = len(flat) // BLOCK * BLOCK
    rows = vector_norm(flat[:whole].view(-1, BLOCK), dim=1)
    rest = vector_norm(flat[whole:]).unsqueeze(0)
    return norm(torch.cat((rows, rest)).double()).to(tensor.dtype)


def clipped(scale: Tensor, norm: Tensor, clip_val: float | None) -> Tensor:
    """Return the gradient scale, reduced so that the norm is at most `clip_val`.

    Args:
        norm: Norm of the scaled gradients.
        clip_val: None or 0: no clipping.
    """
    return scale * (clip_val / (norm + 1e-6)).clamp(max=1.0) if clip_val else scale


def is_fused(optimizer: torch.optim.Optimizer) -> bool:
    """Whether every parameter group is updated by a fused kernel."""
    return all(group.get("fused") for group in optimizer.param_groups)


def skip_if_not_finite(
    optimizer: torch.optim.Optimizer, parameters: Sequence[nn.Parameter], finite: Tensor
) -> None:
    """Let the coming optimizer step change nothing unless the gradient norm is finite.

    A fused optimizer reads `found_inf`, without a host/device synchronization. Others skip
    parameters without a gradient.
    """
    if is_fused(optimizer):
        optimizer.found_inf = (~finite).float()  # pyright: ignore[reportAttributeAccessIssue]
    elif not finite:
        for parameter in parameters:
            parameter.grad = None


class SkippedUpdates:
    """Counts of updates skipped because of a non-finite gradient: in a row, and in total."""

    def __init__(self, in_row: int = 0, in_total: int = 0) -> None:
        self.counts = torch.tensor([in_row, in_total])

    def count(self, finite: Tensor) -> None:
        """Count one step on its device, without a synchronization."""
        in_row, in_total = self.counts.to(finite.device)
        skipped = (~finite).to(torch.int64)
        self.counts = torch.stack((torch.where(finite, 0, in_row + 1), in_total + skipped))

    @property
    def in_row(self) -> int:
        """Updates skipped since the last one that was not."""
        return int(self.counts[0])

    @property
    def in_total(self) -> int:
        """Updates skipped in the whole run."""
        return int(self.counts[1])

    def check(self, limit: int, step: int, named: dict[str, nn.Parameter]) -> None:
        """Stop the run after too many skipped updates in a row.

        Raises:
            NonFiniteError: `limit` is reached; the message names parameters with bad gradients.
        """
        skipped = self.in_row
        if skipped < limit:
            return
        bad = [n for n, p in named.items() if p.grad is not None and not p.grad.isfinite().all()]
        raise NonFiniteError(
            f"the gradient was not finite in {skipped} steps in a row (bad now: {few(bad)}); "
            f"the last finite step was {step - skipped}",
            step - skipped + 1,
        )

    @staticmethod
    def check_end(in_row: int, step: int) -> None:
        """Refuse to end a run whose last updates were skipped.

        Raises:
            NonFiniteError: more than isolated updates were skipped before the end.
        """
        if in_row > MOST_SKIPPED_AT_END:
            raise NonFiniteError(
                f"the run ended at step {step}; the last {in_row} updates were skipped because "
                "the gradient was not finite",
                step - in_row + 1,
            )
