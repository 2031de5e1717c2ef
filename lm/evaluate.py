"""Evaluation: validation metrics, and bits per byte, comparable across tokenizers."""

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
    """Yield inputs and targets of overlapping windows; each id but the first is a target once.

    From the second window on, each target has at least `length - stride` ids of context.
    """
    for start in range(0, max(len(ids) - 1 - (length - stride), 1), stride):
        part = torch.tensor(ids[start : start + length + 1])
        targets = part[1:].clone()
        if start:
            targets[: length - stride] = IGNORE_INDEX
        yield part[:-1], targets


@torch.inference_mode()
def loss_of_text(model: LM, ids: Sequence[int], stride: int) -> float:
    """Return the loss in nats, summed over all ids after the first.

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
    """Convert a summed loss in nats to bits per byte."""
    return nats / math.log(2) / n_bytes


def validation_metrics(totals: list[list[float]], source_names: Sequence[str]) -> dict[str, float]:
    """Return the metrics of a validation.

    Args:
        totals: Per loader: loss in nats, targets, bytes of the targets. First the validation
            loader of each source, then that of training samples if it is evaluated.
        source_names: Names of the sources if there are several.
    """
    sources = totals[: max(len(source_names), 1)]
    loss, targets, n_bytes = map(sum, zip(*sources, strict=True))
    metrics: dict[str, float] = {}
    if targets:
        mean = loss / targets
        # math.exp overflows above 709; mean * inf keeps NaN.
        perplexity = math.exp(mean) if mean < 700 else mean * math.inf
        metrics = {"val/loss": mean, "val/perplexity": perplexity}
    for name, (total, count, _) in zip(source_names, sources, strict=False):
        if count:
            metrics[f"val/loss/{name}"] = total / count
    if targets and n_bytes:
        # The loss includes document separators, the bytes are those of the text alone.
        metrics["val/bits_per_byte"] = bits_per_byte(loss, int(n_bytes))
    for total, count, _ in totals[len(sources) :]:
        if count:
            metrics["train/eval_loss"] = total / count
    return metrics
