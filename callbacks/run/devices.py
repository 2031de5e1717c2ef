"""Devices: the choice of an accelerator, and requests that this machine cannot meet."""

import re
from typing import Any

import torch

ACCELERATORS = ("auto", "cpu", "gpu", "cuda", "mps")


def is_devices(value: Any) -> bool:
    """Whether a value is a number of devices, a list of indices, or means all devices."""
    if isinstance(value, list):
        return bool(value) and all(number >= 0 for number in value)
    return bool(re.fullmatch(r"auto|-1|0*[1-9]\d*|\d+(,\d+)*,\d*", str(value).replace(" ", "")))


def check_devices(accelerator: str, devices: Any) -> None:
    """Check that this machine has the requested devices.

    Raises:
        ValueError: names the argument, the value found, the rule and the way out.
    """
    device = device_type(accelerator)
    there = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    if not there.get(device, accelerator != "gpu"):
        raise ValueError(
            f"trainer.accelerator is {accelerator}: this machine has none that torch "
            f"{torch.__version__} can use; pass auto or cpu"
        )
    if device == "cpu" and (isinstance(devices, list) or re.search("-|,", str(devices))):
        raise ValueError(
            f"trainer.devices is {devices}: on CPUs it must be auto or a number of processes "
            "above 0; pass --trainer.devices 1"
        )
    count = torch.cuda.device_count()
    text = str(devices).strip("[] ,")
    listed = isinstance(devices, list) or "," in str(devices)
    asked = [int(number) for number in text.split(",")] if text[:1].isdecimal() else []
    if device == "cuda" and asked and (max(asked) >= count if listed else asked[0] > count):
        raise ValueError(
            f"trainer.devices is {devices}: this machine has {count} GPUs"
            + (f", numbered from 0 to {count - 1}" if listed else "")
            + "; pass --trainer.devices auto for all"
        )


def device_type(accelerator: str) -> str:
    """Return the device type that Lightning chooses for an accelerator."""
    if accelerator in ("gpu", "auto"):
        if torch.cuda.is_available():
            return "cuda"
        if torch.backends.mps.is_available():
            return "mps"
    return "cpu" if accelerator in ("auto", "gpu") else accelerator


def count_devices(trainer: Any) -> int:
    """Return the number of devices per node of a Trainer's settings.

    auto and -1 mean all GPUs of this machine.
    """
    asked = trainer.devices
    if isinstance(asked, list):
        return len(asked)
    if str(asked).isdecimal() and int(asked) > 0:
        return int(asked)
    return 1 if trainer.accelerator == "cpu" else max(1, torch.cuda.device_count())
