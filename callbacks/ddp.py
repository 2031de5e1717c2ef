"""Several processes: the same data on all ranks, and sums that a restart does not change."""

import os
import socket
from typing import cast

import torch
from lightning.pytorch import Callback
from lightning.pytorch.strategies import DDPStrategy

from callbacks.run.folder import contract
from callbacks.run.trainer import Trainer
from lm.module import LMModule


class SameData(Callback):
    """Compares the data of all processes before training."""

    def setup(self, trainer: Trainer, pl_module: LMModule, stage: str) -> None:
        ours = trainer
        if ours.peers is None:
            return
        mine = contract(trainer)
        for key in ("device", "data.path"):  # nodes may have copies of their own
            mine.pop(key, None)
        for number, source in enumerate(ours.datamodule.sources.values()):
            for split, fingerprint in source.fingerprints.items():
                mine[f"{split} data fingerprint of source {number}"] = fingerprint
        ours.peers.agree("data", mine, ours.peer_timeout.total_seconds())


class RestartInvariantDDP(Callback):
    """Two passes over a dummy batch before the first step, in fresh and resumed runs alike.

    DDP sums the first backward pass after every start in one order, and all later ones in
    another, because it sorts its buckets anew in between. With three or more ranks the sums differ
    in their last bits, so a resumed run would drift away while its losses still look equal.
    """

    def on_train_start(self, trainer: Trainer, pl_module: LMModule) -> None:
        if not isinstance(trainer.strategy, DDPStrategy):
            return
        device = trainer.strategy.root_device
        batch = trainer.datamodule.dummy_batch()
        batch = {name: tensor.to(device) for name, tensor in batch.items()}
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            for _ in range(2):
                loss = cast(torch.Tensor, trainer.strategy.training_step(batch, 0))
                loss.backward()
        pl_module.zero_grad(set_to_none=True)


def check_port() -> None:
    """Refuse a MASTER_PORT that another program listens on; without one a free port is taken.

    Raises:
        ValueError: the port is in use, or no port at all, MASTER_ADDR is empty, or
            GLOO_SOCKET_IFNAME names no interface of this machine.
    """
    interfaces = os.environ.get("GLOO_SOCKET_IFNAME", "")
    known = [name for _, name in socket.if_nameindex()]
    if interfaces and not set(interfaces.split(",")) <= set(known):
        raise ValueError(
            f"GLOO_SOCKET_IFNAME is {interfaces}: {socket.gethostname()} has the interfaces "
            f"{', '.join(known)}; set it to one of them, or unset it"
        )
    if os.environ.get("MASTER_ADDR") == "":
        raise ValueError(
            "MASTER_ADDR is empty: it must be the name or address of the first node; set it, or "
            "unset it for a run on one machine"
        )
    asked = os.environ.get("MASTER_PORT")
    if asked is None:
        return
    if not (asked.isdecimal() and int(asked) < 2**16):
        raise ValueError(
            f"MASTER_PORT is {asked!r}: it must be a number below 65536, of a free port on the "
            "first node; set it so, or unset it for a run on one machine"
        )
    # Who started several processes has taken it already, or the first of them has, perhaps on
    # another node.
    places = ("SLURM_PROCID", "NODE_RANK", "GROUP_RANK")
    if "LOCAL_RANK" in os.environ or any(os.environ.get(name, "0") != "0" for name in places):
        return
    try:
        with socket.socket() as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(("", int(asked)))
    except OSError as error:
        raise ValueError(
            f"MASTER_PORT is {asked}, where the processes of this run cannot meet ({error}); unset "
            "it, and a free port is taken, or give another"
        ) from None
