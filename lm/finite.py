"""Detection of NaN and infinity in tensors, and the error that ends a run because of them."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor


class NonFiniteError(RuntimeError):
    """Loss, gradients or weights are NaN or infinite."""

    def __init__(self, message: str, step: int = 0) -> None:
        """Store the step beside the message.

        Args:
            step: First bad optimizer step; 0 outside training.
        """
        super().__init__(message)
        self.step = step


def non_finite(value: Any, name: str = "") -> Iterator[str]:
    """Yield the names of tensors with NaN or infinity in nested containers."""
    if isinstance(value, Tensor):
        if not is_finite(value):
            yield name
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from non_finite(item, f"{name}.{key}".lstrip("."))
    elif isinstance(value, list | tuple):
        for place, item in enumerate(value):
            yield from non_finite(item, f"{name}.{place}".lstrip("."))


def is_finite(tensor: Tensor) -> bool:
    """Whether no element is NaN or infinite.

    CPU tensors are checked by numpy: checkpoints are checked in a thread of their own, whose torch
    thread pool would slow down that of training.
    """
    if not tensor.is_floating_point():
        return True
    if tensor.device.type != "cpu" or tensor.dtype.itemsize < 2:
        return bool(tensor.isfinite().all())
    plain = tensor.detach()
    if plain.dtype == torch.bfloat16:
        bits = plain.view(torch.int16).numpy()
        return not bool(((bits & 0x7F80) == 0x7F80).any())
    values = plain.numpy()
    # A finite sum proves it without a mask; the sum of finite elements may overflow.
    with np.errstate(all="ignore"):
        return bool(np.isfinite(values.sum()) or np.isfinite(values).all())


def few(names: list[str], most: int = 5) -> str:
    """Return the first names of a list, and the number of further ones."""
    more = len(names) - most
    return ", ".join(names[:most]) + (f" and {more} more" if more > 0 else "")
