"""Private names of Lightning that callbacks/run/patches.py replaces or reads still exist."""

from datetime import timedelta

import lightning.pytorch
import pytest
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.strategies.launchers import subprocess_script
from lightning.pytorch.trainer.connectors.signal_connector import _SignalConnector

from callbacks.run.patches import cluster_environment, requested_devices, set_peer_timeout


@pytest.fixture
def plain() -> lightning.pytorch.Trainer:
    return lightning.pytorch.Trainer(accelerator="cpu", devices=2, logger=False)


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (_SignalConnector, "register_signal_handlers"),
        (_TrainingEpochLoop, "_broadcast_sigterm_tensor"),
        (subprocess_script, "_launch_process_observer"),
        (lightning.pytorch.Trainer, "_run"),
        (lightning.pytorch.Trainer, "_run_stage"),
    ],
)
def test_replaced_function_exists(owner, name: str):
    assert callable(getattr(owner, name))


def test_replaced_functions_belong_to_the_trainer(plain):
    assert isinstance(plain._signal_connector, _SignalConnector)
    assert isinstance(plain.fit_loop.epoch_loop, _TrainingEpochLoop)


def test_requested_devices_are_those_of_the_arguments(plain):
    assert requested_devices(plain) == (2, 1)
    assert cluster_environment(plain) is plain.strategy.cluster_environment


def test_timeout_of_ddp_can_be_changed_after_its_construction():
    strategy = DDPStrategy(timeout=timedelta(seconds=5))
    assert set_peer_timeout(strategy, None) == timedelta(seconds=5)
    assert set_peer_timeout(strategy, 7) == timedelta(seconds=7)
