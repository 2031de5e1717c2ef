"""Checkpoint contents: copies that a thread can write, and random states."""

import random
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor


class Copies:
    """Copies of nested plain containers; their tensors lie in buffers that are used again.

    A copy into fresh memory takes three times as long, for its page faults.
    """

    def __init__(self) -> None:
        self._buffers: dict[tuple, Tensor] = {}

    def of(self, value: Any, *place: Any) -> Any:
        """The value as it is now, on the CPU; the copy before it is overwritten."""
        if isinstance(value, Tensor):
            buffer = self._buffers.get(place)
            if buffer is None or (buffer.shape, buffer.dtype) != (value.shape, value.dtype):
                buffer = self._buffers[place] = torch.empty_like(value, device="cpu")
            return buffer.copy_(value)
        if isinstance(value, dict):
            return {key: self.of(item, *place, key) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return type(value)(self.of(item, *place, i) for i, item in enumerate(value))
        return value


def random_states() -> dict[str, Any]:
    """States of the generators that users' own code may draw from, as plain types."""
    numpy_state = cast(tuple, np.random.get_state())
    return {
        "python": random.getstate(),
        "numpy": [numpy_state[0], numpy_state[1].tolist(), *numpy_state[2:]],
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else [],
    }


def restore_random_states(states: dict[str, Any]) -> None:
    """Put back what `random_states` took."""
    version, internal, gauss = states["python"]
    random.setstate((version, tuple(internal), gauss))
    name, keys, *rest = states["numpy"]
    np.random.set_state((name, np.array(keys, dtype=np.uint32), *rest))
    torch.set_rng_state(states["torch"])
    if len(states["cuda"]) == torch.cuda.device_count() and states["cuda"]:
        torch.cuda.set_rng_state_all(states["cuda"])
