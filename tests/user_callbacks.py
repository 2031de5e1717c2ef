"""Callbacks as users write them, for runs of tests."""

import enum
import os
import signal
from collections import Counter, OrderedDict, defaultdict, deque
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import EMAWeightAveraging


class Phase(enum.Enum):
    WARM = "warm"


RICH: dict[str, Any] = {
    "best": np.float64(0.5),
    "count": np.int32(3),
    "curve": np.arange(6, dtype=np.float32).reshape(2, 3),
    "names": np.array(["a", "bc"]),
    "file": Path("runs/x"),
    "window": deque([1.5, np.float64(2.5)], maxlen=4),
    "by_step": {np.int64(3): [np.float32(1.0)]},
    "set": {1, 2},
    "none": np.zeros((0, 3)),
    "bytes": [b"", b"\xff\0"],
    "seen": Counter("aab"),
    "lists": defaultdict(list, a=[np.float32(1.0)]),
    "recent": OrderedDict(b=1, a=2),
}


class Rich(Callback):
    """Keeps values of numpy and of the standard library."""

    loaded: ClassVar[list[dict[str, Any]]] = []

    def state_dict(self) -> dict[str, Any]:
        return RICH

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.loaded.append(state_dict)


class WithEnum(Callback):
    """Keeps an enum, from the start or from a step on."""

    def __init__(self, from_step: int = 0) -> None:
        self.from_step, self.step = from_step, 0

    def on_train_batch_end(self, trainer: Any, *args: Any, **kwargs: Any) -> None:
        self.step = trainer.global_step

    def state_dict(self) -> dict[str, Any]:
        return {"phase": Phase.WARM if self.step >= self.from_step else "cold"}


class Averaging(EMAWeightAveraging):
    """An average that differs much from the weights."""

    def __init__(self, stop_at_step: int | None = None) -> None:
        super().__init__(decay=0.5)
        self.stop_at_step = stop_at_step

    def on_validation_batch_end(self, trainer: Any, *args: Any, **kwargs: Any) -> None:
        if trainer.global_step == self.stop_at_step:
            os.kill(os.getpid(), signal.SIGTERM)
