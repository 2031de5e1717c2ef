"""Precision: what a device supports, and the choice of auto."""

from typing import Literal, get_args

import torch

Precision = Literal[
    "auto", "bf16-mixed", "16-mixed", "32-true", "bf16-true", "16-true", "64-true",
    "bf16", "16", "32", "64",
]  # fmt: skip
SHORT = {"bf16": "bf16-mixed", "16": "16-mixed", "32": "32-true", "64": "64-true"}


def has_bf16(device: str) -> bool:
    """Whether a device type computes in bf16 rather than emulating it."""
    if device == "cuda":
        return torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 0)
    if device == "cpu":
        able = torch.cpu.get_capabilities()
        return any(able.get(name) for name in ("amx_bf16", "avx512_bf16", "bf16"))
    return False


def choose_precision(asked: str, device: str) -> str:
    """Return the precision to train in, by Lightning's name.

    Raises:
        ValueError: the device does not support the requested precision.
    """
    asked = SHORT.get(asked, asked)
    if asked not in get_args(Precision):
        raise ValueError(
            f"trainer.precision is {asked}: it must be one of {', '.join(get_args(Precision))}"
        )
    if asked == "auto":
        if has_bf16(device):
            return "bf16-mixed"
        return "16-mixed" if device == "cuda" else "32-true"
    on_cuda = device == "cuda" and torch.cuda.is_available()  # else Lightning refuses it well
    if asked.startswith("bf16") and on_cuda and not has_bf16(device):
        raise ValueError(
            f"trainer.precision is {asked}: {torch.cuda.get_device_name()} has no bf16; use "
            "16-mixed (fp16), 32-true (fp32) or auto"
        )
    if asked.startswith("16") and device == "cpu":
        raise ValueError(
            f"trainer.precision is {asked}: fp16 needs a GPU; use bf16-mixed, 32-true or auto"
        )
    return asked
