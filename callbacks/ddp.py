"""What makes a run on several processes as repeatable as one on a single process."""

import ctypes
import os
import signal
import sys
from typing import Any, cast

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy


class RestartInvariantDDP(Callback):
    """Two passes over a dummy batch before the first step, in fresh and resumed runs alike.

    DDP sums the first backward pass after every start in one order, and all later ones in
    another, because it sorts its buckets anew in between. With three or more ranks the sums differ
    in their last bits, so a resumed run would drift away while its losses still look equal.
    """

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not isinstance(trainer.strategy, DDPStrategy):
            return
        device = trainer.strategy.root_device
        batch = cast(Any, trainer).datamodule.dummy_batch()
        batch = {name: tensor.to(device) for name, tensor in batch.items()}
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            for _ in range(2):
                loss = cast(torch.Tensor, trainer.strategy.training_step(batch, 0))
                loss.backward()
        pl_module.zero_grad(set_to_none=True)


def die_with_parent() -> None:
    """Have the kernel kill this process when the one that started it ends, however that ends."""
    if sys.platform == "linux":
        parent = os.getppid()
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
        if os.getppid() != parent:  # it ended before the call
            os.kill(os.getpid(), signal.SIGKILL)
