"""Private names of libraries that callbacks/run/patches.py replaces or reads still exist."""

import inspect
from datetime import timedelta

import lightning.pytorch
import pytest
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.strategies.launchers import subprocess_script
from lightning.pytorch.trainer.connectors.signal_connector import _SignalConnector
from torch.utils.tensorboard import FileWriter, SummaryWriter

from callbacks.run.patches import (
    PatchedSummaryWriter,
    argument_types,
    cluster_environment,
    is_inner_parser,
    requested_devices,
    set_peer_timeout,
)


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
        (LightningCLI, "_parse_ckpt_path"),
        (SummaryWriter, "_get_file_writer"),
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


def test_library_calls_what_is_replaced():
    calls = {
        LightningCLI.__init__: "self._parse_ckpt_path()",
        lightning.pytorch.Trainer._fit_impl: "self._run(model, ckpt_path=ckpt_path",
        lightning.pytorch.Trainer._run: "self._run_stage()",
        SummaryWriter.add_scalar: "self._get_file_writer()",
    }
    assert {text for call, text in calls.items() if text not in inspect.getsource(call)} == set()


def test_events_go_to_the_given_file_writer(tmp_path):
    writer = FileWriter(str(tmp_path))
    page = PatchedSummaryWriter(writer, purge_step=3)
    assert page.file_writer is writer
    page.close()
    assert len(list(tmp_path.iterdir())) == 1


class Inner:
    """A class with an argument, for a value that names a class."""

    def __init__(self, size: int) -> None:
        self.size = size


def test_types_of_arguments_are_their_hints():
    parser = LightningArgumentParser()
    parser.add_class_arguments(Inner, "part")
    parser.add_argument("--steps", type=int | None)
    types = argument_types(parser)
    assert [types[key] for key in ("part", "part.size", "steps")] == [None, int, int | None]


def test_parser_of_a_class_is_an_inner_one():
    found = []

    class Parser(LightningArgumentParser):
        def error(self, message, ex=None):
            found.append(is_inner_parser(self))
            raise ValueError(message)

    parser = Parser()
    parser.add_argument("--part", type=Inner)
    inner = {"class_path": f"{__name__}.Inner", "init_args": {"size": "large"}}
    with pytest.raises(ValueError, match="size"):
        parser.parse_object({"part": inner})
    assert found == [True, False]
