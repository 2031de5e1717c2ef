"""LightningCLI of a run: parses its configuration, makes its parts and runs fit or validate."""

import contextlib
import logging
import math
import os
import sys
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import jsonargparse
import yaml
from jsonargparse.typing import restricted_number_type
from lightning.pytorch import Callback
from lightning.pytorch.cli import LightningArgumentParser

from callbacks.checkpoint.callback import AtomicCheckpoint
from callbacks.checkpoint.ckpt_path import resolve
from callbacks.config.files import read_arguments, read_pipes
from callbacks.config.parser import RunParser, hinted, keys_of
from callbacks.config.values import dump_yaml, load_yaml
from callbacks.ddp import RestartInvariantDDP, SameData, check_port
from callbacks.drill.kill_points import VARIABLE, Moments, reach
from callbacks.grad_norm import GradNorm
from callbacks.health import Health
from callbacks.loggers.metrics_csv import MetricsCSV
from callbacks.loggers.tensorboard import SeamlessTensorBoard
from callbacks.loggers.trackers import TrackedRun, Tracker, make_logger, run_id
from callbacks.processes.parent import hand_over_id
from callbacks.processes.stop_requests import stop
from callbacks.progress import Progress
from callbacks.run.devices import count_devices, device_type
from callbacks.run.folder import RunConfig, RunRecord, code_fingerprint, lock, versions
from callbacks.run.patches import PatchedCLI
from callbacks.run.plan import run_plan
from callbacks.run.starting_weights import read_start
from callbacks.run.steps import is_dry_run
from callbacks.run.trainer import Trainer
from callbacks.samples import PromptSamples
from callbacks.stop_signals import StopSignals
from callbacks.throughput import Throughput
from callbacks.weights import Weights
from data.datamodule import LMDataModule
from lm.cpu import keep_freed_memory
from lm.module import LMModule
from lm.plan import HOURS, ledger
from lm.plan_table import table

# Configuration keys that always follow another one.
LINKS = {
    "model.config.max_seq_len": "data.seq_len",
    "model.seed": "seed_everything",
    "data.seed": "seed_everything",
    "data.vocab_size": "model.config.vocab_size",
}

# Keys whose values may differ between the processes of a run.
OWN_KEYS = ("config", "data.path", "data.tokenizer", "data.num_workers")


class RunCLI(PatchedCLI):
    """LightningCLI for one command; without a command it only parses and makes the parts."""

    trainer: Trainer
    model: LMModule
    datamodule: LMDataModule

    def __init__(self, command: str | None, args: list[str]) -> None:
        self.command = command
        callbacks = [SameData(), RestartInvariantDDP(), RunRecord(), Progress(), StopSignals(stop)]
        if VARIABLE in os.environ:
            callbacks.append(Moments())
        super().__init__(
            LMModule,
            LMDataModule,
            trainer_class=Trainer,
            parser_class=RunParser,
            trainer_defaults={"callbacks": callbacks},
            save_config_callback=RunConfig,
            save_config_kwargs={"save_to_log_dir": False},
            auto_configure_optimizers=False,
            load_from_checkpoint_support=False,
            args=[command, *args] if command else args,
            run=command is not None,
        )

    def section(self, name: str) -> Any:
        """Return a section of the configuration, such as trainer."""
        return self.config.get(str(self.command), self.config)[name]

    def instance(self, name: str) -> Any:
        """Return a section of the configuration with its classes instantiated."""
        return self.config_init.get(str(self.command), self.config_init)[name]

    def subcommands(self) -> dict[str, set[str]]:  # pyright: ignore[reportIncompatibleMethodOverride]
        loaders = {"model", "dataloaders", "train_dataloaders", "val_dataloaders", "datamodule"}
        return {str(self.command): loaders | {"weights_only", "verbose"}}

    def add_default_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        seed = restricted_number_type(
            *("Seed", int, [(">=", 0), ("<", 2**32)]),
            docstring="a whole number (int) from 0 to 4294967295",
        )
        words = "Of initial weights, data order and dropout; 0 to 4294967295."
        parser.add_argument("--seed_everything", type=seed, default=1337, help=words)

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        self.run_parser = parser
        # argparse's own would name all keys, twice a screen.
        parser.usage = f"lightning {self.command or 'prepare'} [--config FILE] [--KEY VALUE ...]"
        parser.add_lightning_class_args(AtomicCheckpoint, "checkpoint")
        parser.add_class_arguments(Throughput, "throughput", skip={"now"})
        parser.callback_keys.append("throughput")
        parser.add_lightning_class_args(GradNorm, "grad_norm")
        parser.add_lightning_class_args(Health, "health")
        parser.add_lightning_class_args(PromptSamples, "samples")
        parser.add_lightning_class_args(Weights, "weights")
        parser.add_class_arguments(Tracker, "tracker")
        for target, source in LINKS.items():
            # As a plain int: a checkpoint holds the seed, and no type of a library.
            parser.link_arguments(source, target, compute_fn=int)
        if self.command is None:
            words = "Of a run; nothing to this command."
            parser.add_argument("--ckpt_path", type=str | None, help=words)

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        RunParser.keys = keys_of(self.run_parser)
        super().parse_arguments(parser, read_arguments(args, RunParser.keys, LINKS))

    def instantiate_classes(self) -> None:
        try:
            super().instantiate_classes()
        except (TypeError, ValueError) as error:
            message = " ".join(str(error).split())
            raise ValueError(hinted(message, RunParser.keys)) from error

    def before_instantiate_classes(self) -> None:
        trainer = self.section("trainer")
        if device_type(trainer.accelerator) == "cpu":
            keep_freed_memory()
        devices, runs = count_devices(trainer), self.command is not None
        if runs and devices * trainer.num_nodes > 1:
            check_port()
        if runs and devices > 1:
            hand_over_id()

    def instantiate_trainer(self, **kwargs: Any) -> Any:
        given = self.instance("trainer")
        root = Path(given["default_root_dir"])
        if given["logger"] is None:
            kwargs["logger"] = [SeamlessTensorBoard(root, self.plan_table), MetricsCSV(root)]
        if self.command is None:
            return None
        trainer: Any = super().instantiate_trainer(**kwargs)
        trainer.peer_facts = self.common_facts
        if self.command == "fit":
            self.add_tracker(trainer, root)
        return trainer

    def add_tracker(self, trainer: Trainer, root: Path) -> None:
        """Add the logger of an external tracker, if the configuration names one."""
        settings = self.instance("tracker")
        if settings.name is None or is_dry_run(trainer):
            return
        own = run_id(root)
        trainer.loggers.append(make_logger(settings, root, own))
        callback: Callback = TrackedRun(own)
        trainer.callbacks.append(callback)  # pyright: ignore[reportAttributeAccessIssue]

    def plan_table(self) -> str:
        """Return the plan of this run as text."""
        return table(ledger(run_plan(self, HOURS)))

    def common_facts(self) -> dict[str, Any]:
        """Return settings, versions and code, which must be equal on all processes of a run."""
        facts = flatten(self.config[str(self.command)].as_dict())
        for key in OWN_KEYS:
            facts.pop(key, None)
        installed = {f"version of {name}": known for name, known in versions().items()}
        del installed["version of python"]
        return facts | installed | {"code": code_fingerprint()}

    def fit(self, model: LMModule, ckpt_path: str | None = None, **kwargs: Any) -> None:
        """Train from a checkpoint, from given weights, or from the beginning."""
        root, trainer = Path(self.trainer.default_root_dir), self.trainer
        if is_dry_run(trainer):
            read_start(model, self.datamodule)
            return trainer.fit(model, weights_only=True, **kwargs)
        first = trainer.is_global_zero
        # Rank 0 decides for all which checkpoint the run resumes from.
        trainer.start_elsewhere = partial(read_start, model, self.datamodule)
        with lock(root) if first else contextlib.nullcontext():
            reach("start-up")
            found: Any = resolve(ckpt_path, root, starts=True) if first else None
            if first and found is None:
                read_start(model, self.datamodule)
            trainer.fit(model, ckpt_path=found, weights_only=True, **kwargs)

    def validate(self, model: LMModule, ckpt_path: str | None = None, **kwargs: Any) -> None:
        """Evaluate a checkpoint on validation data."""
        if self.trainer.limit_val_batches == 0:
            raise ValueError("trainer.limit_val_batches is 0: there is nothing to validate on")
        root = Path(self.trainer.default_root_dir)
        first = self.trainer.is_global_zero
        found: Any = resolve(ckpt_path or "last", root) if first else None
        self.trainer.validate(model, ckpt_path=found, weights_only=True, verbose=False, **kwargs)
        if not math.isfinite(loss := model.validation_metrics["val/loss"]):
            raise RuntimeError(
                f"the validation loss is {loss}: the weights are too large or damaged; give an "
                "earlier checkpoint by --ckpt_path"
            )


def run_cli(command: str, argv: list[str]) -> None:
    """Run fit or validate on a run's configuration."""
    if (complete := read_pipes(argv)) != argv:
        argv = complete
        sys.argv[1:] = [command, *argv]  # Lightning starts the other processes with these words
    set_up_libraries()
    RunCLI(command, argv)


def parse_run(argv: list[str]) -> RunCLI:
    """Parse a run's configuration and make its model and data, without a Trainer."""
    set_up_libraries()
    return RunCLI(None, read_pipes(argv))


def set_up_libraries() -> None:
    """Set the rules of jsonargparse, and silence warnings that a user cannot act on."""
    # jsonargparse has variables of its own: keys are given by files and options alone.
    for name in [name for name in os.environ if name.startswith("JSONARGPARSE_")]:
        del os.environ[name]
    jsonargparse.set_parsing_settings(docstring_parse_attribute_docstrings=True)
    jsonargparse.set_loader("yaml", load_yaml, exceptions=(yaml.YAMLError,))
    jsonargparse.set_dumper("yaml", dump_yaml)
    # After the import of lightning, which sets its loggers back.
    for name in list(logging.root.manager.loggerDict):
        if name.startswith("lightning"):
            logging.getLogger(name).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module=r"(lightning|torch|jsonargparse)(\.|$)")


def flatten(nested: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested settings by their dotted keys."""
    flat: dict[str, Any] = {}
    for key, value in nested.items():
        flat |= (
            flatten(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
        )
    return flat
