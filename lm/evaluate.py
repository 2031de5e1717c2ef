"""How well a model foretells a text, in bits a byte: a figure that tokenizers cannot move."""

import math
from collections.abc import Iterator, Sequence

import torch
from jaxtyping import Int
from torch import Tensor

from lm.loss import IGNORE_INDEX, cross_entropy_sum
from lm.model import LM


def windows(
    ids: Sequence[int], length: int, stride: int
) -> Iterator[tuple[Int[Tensor, " T"], Int[Tensor, " T"]]]:
    """Inputs and targets of windows that overlap; every id but the first is a target once.

    From the second window on a target has at least `length - stride` ids before it.
    """
    for start in range(0, max(len(ids) - 1 - (length - stride), 1), stride):
        part = torch.tensor(ids[start : start + length + 1])
        targets = part[1:].clone()
        if start:
            targets[: length - stride] = IGNORE_INDEX
        yield part[:-1], targets


@torch.inference_mode()
def loss_of_text(model: LM, ids: Sequence[int], stride: int) -> float:
    """Sum in nats over all ids after the first.

    Raises:
        ValueError: the stride is not 1 to max_seq_len.
    """
    length = model.config.max_seq_len
    if not 1 <= stride <= length:
        raise ValueError(f"--stride is {stride}: must be 1 to {length}, the model's context")
    model.eval()
    device, total = model.head_weight.device, 0.0
    for inputs, targets in windows(ids, length, stride):
        hidden = model.model(inputs.to(device).unsqueeze(0))
        total += float(
            cross_entropy_sum(hidden, model.head_weight, targets.to(device).unsqueeze(0))
        )
    return total


def bits_per_byte(nats: float, n_bytes: int) -> float:
    """Bits a byte of a loss in nats."""
    return nats / math.log(2) / n_bytes
