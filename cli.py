"""Command line of Relight: wires model, data and callbacks together.

Heavy imports stand inside the functions that need them: help and mistakes answer at once.
"""

import argparse
import contextlib
import difflib
import io
import os
import random
import re
import shutil
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar, NoReturn

# Configuration keys that always follow another one.
LINKS = {
    "model.config.max_seq_len": "data.seq_len",
    "model.seed": "seed_everything",
    "data.seed": "seed_everything",
    "data.vocab_size": "model.config.vocab_size",
}
NO_DEFAULT_RUN = "runs/default"


class UserError(Exception):
    """A mistake of the user: one line on stderr, exit code 2."""


def main(argv: list[str] | None = None) -> int:
    """Run one command and return its exit code: 0 done, 1 failed, 2 a mistake of the user."""
    argv = sys.argv[1:] if argv is None else argv
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # A terminal of a narrow alphabet must not end a run.
            stream.reconfigure(errors="backslashreplace")
    # For the time before training, which has handlers of its own, and for all other commands.
    handlers = {number: signal.signal(number, leave) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        if not argv or argv[0] in ("-h", "--help"):
            print(overview())
            return 0 if argv else 2
        command = COMMANDS.get(argv[0])
        if command is None:
            near = difflib.get_close_matches(argv[0], COMMANDS, 1)
            hint = f"did you mean {near[0]}?" if near else "the command comes first"
            raise UserError(f"{argv[0]} is not a command; {hint} ({', '.join(COMMANDS)})")
        command(argv[1:])
        return 0
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except Exception as error:
        return report(error)
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def overview() -> str:
    """Help of the program: each command with the first line of its docstring."""
    lines = [f"  {name:<10}{(run.__doc__ or '').splitlines()[0]}" for name, run in COMMANDS.items()]
    return "\n".join(
        [
            "usage: lightning COMMAND [--config FILE] [--KEY VALUE ...]",
            "",
            "Causal language-model pretraining that survives being killed.",
            "",
            *lines,
            "",
            "lightning COMMAND --help shows all keys of a command.",
        ]
    )


def leave(number: int, frame: object) -> NoReturn:
    """Leave on a signal with the shell's exit code for it."""
    raise SystemExit(128 + number)


def report(error: Exception) -> int:
    """Say what went wrong, in one line where the cause is the user's or the machine's."""
    from lightning.fabric.utilities.exceptions import MisconfigurationException

    if os.environ.get("RELIGHT_TRACEBACK") == "1":
        traceback.print_exception(error)
    by_user = isinstance(error, UserError | MisconfigurationException) or (
        isinstance(error, ValueError) and raised_here(error)
    )
    of_run = isinstance(error, OSError) or (isinstance(error, RuntimeError) and raised_here(error))
    if not by_user and not of_run:
        traceback.print_exception(error)
    print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
    return 2 if by_user else 1


def raised_here(error: Exception) -> bool:
    """Whether our own code raised it on purpose, rather than something that it called."""
    place = error.__traceback__
    while place is not None and place.tb_next is not None:
        place = place.tb_next
    if place is None:
        return False
    home = Path(__file__).resolve().parent
    path = Path(place.tb_frame.f_code.co_filename).resolve()
    return path.is_relative_to(home) and path.relative_to(home).parts[0] in (
        *("lm", "data", "callbacks"),
        "cli.py",
    )


# Commands over a run's configuration


def fit(argv: list[str]) -> None:
    """Train; the same command resumes after a kill at any moment."""
    run_cli("fit", argv)


def validate(argv: list[str]) -> None:
    """Evaluate a checkpoint on the validation data of its run."""
    run_cli("validate", argv)


def prepare(argv: list[str]) -> None:
    """Make the token files that a run's configuration names."""
    from data.prepare import prepare_corpus

    data = run_cli("prepare", argv).datamodule
    if data.corpus is None:
        raise UserError(
            f"data.corpus is not set, so there is nothing to fill data.path {data.path} from; set "
            "it to python or stdlib"
        )
    meta = prepare_corpus(data.corpus, data.path, data.vocab_size)
    for split in ("train", "val"):
        print(
            f"{data.path / split}.bin: {meta[split]['tokens']:,} tokens in "
            f"{meta[split]['documents']:,} documents, {meta[split]['bytes']:,} bytes of text "
            f"({meta[split]['empty']} empty, {meta[split]['undecodable']} undecodable left out)"
        )


def drill(argv: list[str]) -> None:
    """Prove on this machine that a run killed at the worst moments ends with the same bits."""
    parser = LineParser(prog="lightning drill", description=drill.__doc__, allow_abbrev=False)
    add = parser.add_argument
    add("--kills", type=int, default=5, help="how often the run is killed")
    add("--steps", type=int, help="shorten the run to so many optimizer steps")
    add("--seed", type=int, default=0, help="of the moments and times")
    parser.epilog = "All other options are those of lightning fit, --config first of all."
    options, run = parser.parse_known_args([whole_number(text) for text in argv])
    if options.kills < 1:
        raise UserError(f"--kills is {options.kills}: must be at least 1")

    from callbacks import drill as fire_drill

    config = run_cli("prepare", run).config
    root = Path(config.trainer.default_root_dir + "-drill")
    shutil.rmtree(root, ignore_errors=True)
    steps = [] if options.steps is None else [f"--trainer.max_steps={options.steps}"]
    draw = random.Random(options.seed)
    plan = fire_drill.plan_kills(
        options.kills,
        draw,
        accumulates=config.trainer.accumulate_grad_batches > 1,
        validates=config.trainer.limit_val_batches != 0,
    )
    say = print_in_place if sys.stderr.isatty() else lambda line: None
    print(f"drill: {options.kills} kills, seed {options.seed}, in {root}", flush=True)
    starts, found, bits = fire_drill.drill(
        [*run, *steps, "--trainer.log_every_n_steps=1"], root, plan, draw, say
    )
    print(f"\n{'start':>5}  {'resumed from':<14}{'killed':<28}{'last step seen':>14}")
    for number, start in enumerate(starts, 1):
        killed = start.moment if start.code else f"{start.moment}, not reached" * bool(start.moment)
        print(f"{number:>5}  {start.resumed_from:<14}{killed:<28}{start.last_step:>14}")
    kills = sum(start.code != 0 for start in starts)
    for line in found[:5]:
        print(f"differs: {line}")
    print(f"drill: {kills} kills, {bits} differing bits")
    if found:
        raise RuntimeError(f"the killed run differs in {len(found)} places; both are in {root}")


def print_in_place(line: str) -> None:
    """Show a passing line on a terminal."""
    print(f"\r{line:<78}", end="", file=sys.stderr, flush=True)


def run_cli(command: str, argv: list[str]) -> Any:
    """Parse a run's configuration by LightningCLI and run the command on it."""
    for file in config_files(argv):
        check_config(file)

    import jsonargparse
    import torch
    import yaml
    from lightning.pytorch.cli import LightningArgumentParser, LightningCLI

    from callbacks.checkpoint import AtomicCheckpoint, resolve
    from callbacks.ddp import RestartInvariantDDP, die_with_parent
    from callbacks.metrics_csv import MetricsCSV, SeamlessTensorBoard
    from callbacks.moments import VARIABLE, Moments, reach
    from callbacks.progress import Progress
    from callbacks.run_folder import RunConfig, RunRecord, lock
    from callbacks.signals import StopSignals
    from callbacks.throughput import Throughput
    from callbacks.trainer import Trainer, is_dry_run
    from data.datamodule import LMDataModule
    from lm.cpu import keep_freed_memory
    from lm.module import LMModule

    runs = command != "prepare"
    quiet_libraries()
    if os.environ.get("LOCAL_RANK", "0") != "0":
        die_with_parent()
    if not torch.cuda.is_available():
        keep_freed_memory()
    jsonargparse.set_parsing_settings(docstring_parse_attribute_docstrings=True)
    jsonargparse.set_loader("yaml", load_yaml, exceptions=(yaml.YAMLError,))

    class Parser(LightningArgumentParser):
        keys: ClassVar[list[str]] = []

        def parse_args(self, args: list[str] | None = None, *rest: Any, **options: Any) -> Any:
            given = sys.argv[1:] if args is None else args
            return super().parse_args([whole_number(text) for text in given], *rest, **options)

        def error(self, message: str, ex: Exception | None = None) -> NoReturn:
            raise UserError(hinted(" ".join(message.split()), Parser.keys)) from None

    class LMCLI(LightningCLI):
        @staticmethod
        def subcommands() -> dict[str, set[str]]:
            loaders = {"model", "dataloaders", "train_dataloaders", "val_dataloaders", "datamodule"}
            return {command: loaders | {"weights_only", "verbose"}}

        def add_default_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
            parser.add_argument(
                "--seed_everything", type=int, default=1337, help="Of weights, data order, dropout."
            )

        def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
            parser.add_lightning_class_args(AtomicCheckpoint, "checkpoint")
            for target, source in LINKS.items():
                parser.link_arguments(source, target)
            parser.set_defaults({"trainer.default_root_dir": NO_DEFAULT_RUN})
            if not runs:
                parser.add_argument("--ckpt_path", help="Of a run; nothing to this command.")
            Parser.keys = [action.dest for action in parser._actions]

        def _parse_ckpt_path(self) -> None:
            """Not Lightning's: that lets a file's settings override the command line's."""

        def instantiate_classes(self) -> None:
            try:
                super().instantiate_classes()
            except (TypeError, ValueError) as error:
                raise UserError(str(error)) from error

        def instantiate_trainer(self, **kwargs: Any) -> Any:
            if not runs:
                return None
            root = Path(self._get(self.config_init, "trainer")["default_root_dir"])
            if self._get(self.config_init, "trainer")["logger"] is None:
                kwargs["logger"] = [SeamlessTensorBoard(root), MetricsCSV(root)]
            return super().instantiate_trainer(**kwargs)

        def fit(self, model: LMModule, ckpt_path: str | None = None, **kwargs: Any) -> None:
            root = Path(self.trainer.default_root_dir)
            writes = self.trainer.is_global_zero and not is_dry_run(self.trainer)
            with lock(root) if writes else contextlib.nullcontext():
                reach("start-up")
                found = resolve(ckpt_path, root, starts=True)
                self.trainer.fit(model, ckpt_path=found, weights_only=True, **kwargs)

        def validate(self, model: LMModule, ckpt_path: str | None = None, **kwargs: Any) -> None:
            found = resolve(ckpt_path or "last", Path(self.trainer.default_root_dir))
            self.trainer.validate(
                model, ckpt_path=found, weights_only=True, verbose=False, **kwargs
            )

    callbacks = [RestartInvariantDDP(), RunRecord(), Throughput(), Progress(), StopSignals()]
    if VARIABLE in os.environ:
        callbacks.append(Moments())
    return LMCLI(
        LMModule,
        LMDataModule,
        trainer_class=Trainer,
        parser_class=Parser,
        trainer_defaults={"callbacks": callbacks},
        save_config_callback=RunConfig,
        save_config_kwargs={"save_to_log_dir": False},
        auto_configure_optimizers=False,
        load_from_checkpoint_support=False,
        args=[command, *argv] if runs else argv,
        run=runs,
    )


def quiet_libraries() -> None:
    """Silence adverts and warnings of libraries that a user cannot act on."""
    import logging

    # After the import of lightning, which sets its loggers back.
    for name in list(logging.root.manager.loggerDict):
        if name.startswith("lightning"):
            logging.getLogger(name).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module=r"(lightning|torch|jsonargparse)(\.|$)")


# Configuration files


def config_files(argv: list[str]) -> Iterator[Path]:
    """The files named by --config or -c."""
    for i, word in enumerate(argv):
        name, equals, value = word.partition("=")
        if name in ("--config", "-c"):
            if not equals:
                value = argv[i + 1] if i + 1 < len(argv) else ""
            yield Path(value)


def check_config(file: Path) -> None:
    """Find what the parser would not say well: a missing file, broken YAML, a linked key.

    Raises:
        UserError: names the file and the way out.
    """
    import yaml

    if not file.is_file():
        raise UserError(f"--config {file} does not exist; the shipped ones are in configs/")
    try:
        content = load_yaml(file.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"{file}: {error}") from None
    if not isinstance(content, dict):
        raise UserError(f"{file} holds no keys; write one key: value a line, as in configs/")
    for target, source in LINKS.items():
        value = nested(content, target)
        if value is not None and value != nested(content, source):
            raise UserError(
                f"{file}: {target} is {value}, but it always follows {source} "
                f"({nested(content, source)}); give {source} alone"
            )


def nested(content: Any, key: str) -> Any:
    """Value of a dotted key in nested mappings, or None."""
    for part in key.split("."):
        content = content.get(part) if isinstance(content, dict) else None
    return content


def load_yaml(text: str) -> Any:
    """YAML as configurations are written: 3e-4 is a number, 1e3 a whole one, no key twice.

    Raises:
        yaml.YAMLError: with the line of the fault.
    """
    import yaml
    from jsonargparse._loaders_dumpers import get_yaml_default_loader, yaml_load

    class Loader(get_yaml_default_loader()):
        def construct_yaml_float(self, node: yaml.ScalarNode) -> float | int:
            whole = whole_number(self.construct_scalar(node))
            return int(whole) if re.fullmatch(r"[-+]?\d+", whole) else float(whole)

        def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict:
            seen: dict[Any, str] = {}
            for key_node, value_node in node.value:
                key, value = self.construct_object(key_node), str(value_node.value)
                if key in seen:
                    raise yaml.constructor.ConstructorError(
                        problem=f"key {key!r} is written twice, with {seen[key]} and {value}",
                        problem_mark=key_node.start_mark,
                    )
                seen[key] = value
            return super().construct_mapping(node, deep)

    Loader.add_constructor("tag:yaml.org,2002:float", Loader.construct_yaml_float)
    content = yaml.load(text, Loader=Loader)
    if isinstance(content, dict) and ":" in text:
        # A section whose keys are all commented out is no section.
        return {key: value for key, value in content.items() if value is not None or key in NULL}
    return yaml_load(text)


NULL = ("ckpt_path",)


def whole_number(text: str) -> str:
    """Write 1e3 as 1000, also behind --key=; anything else stays."""
    match = re.fullmatch(r"(|--[\w.]+=)([-+]?\d+)[eE]\+?(\d{1,2})", text)
    return f"{match[1]}{int(match[2]) * 10 ** int(match[3])}" if match else text


def hinted(message: str, keys: list[str]) -> str:
    """Parser's message, with the nearest key where one is unknown."""
    match = re.search(r"does not accept option '([\w.]+)'|[oO]ption '([\w.]+)' is not", message)
    match = match or re.search(r"[uU]nrecognized arguments: --([\w.]+)", message)
    if match is None:
        return message
    key = next(group for group in match.groups() if group)
    last = key.rsplit(".", 1)[-1]
    homes = [known for known in keys if known.rsplit(".", 1)[-1] == last]
    level = [known for known in keys if known.count(".") == key.count(".")]
    near = difflib.get_close_matches(key, level, 1, cutoff=0.7) or [
        known
        for name in difflib.get_close_matches(last, [k.rsplit(".", 1)[-1] for k in keys], 1)
        for known in keys
        if known.rsplit(".", 1)[-1] == name
    ]
    if homes:
        hint = f"{last} belongs at {' or '.join(homes)}"
    elif near:
        hint = f"did you mean {near[0]}?"
    else:
        section = key.split(".")[0]
        known = sorted({k.split(".")[0] for k in keys})
        hint = (
            f"see lightning fit --help for the keys of {section}"
            if section in known
            else f"the sections are {', '.join(known)}"
        )
    return f"{key} is not a known key; {hint}"


# Commands over a checkpoint


class LineParser(argparse.ArgumentParser):
    """Parser of the commands that take no run's configuration."""

    def error(self, message: str) -> NoReturn:
        keys = [action.dest for action in self._actions]
        raise UserError(hinted(message, keys))


def verify(argv: list[str]) -> None:
    """Say of each checkpoint of a run whether it is whole."""
    parser = LineParser(prog="lightning verify", description=verify.__doc__, allow_abbrev=False)
    parser.add_argument("--ckpt_path", required=True, help="run folder or checkpoint file")
    place = Path(parser.parse_args(argv).ckpt_path)

    from callbacks.checkpoint import checkpoints, damage

    if not place.exists():
        raise UserError(f"--ckpt_path {place} does not exist; give a run folder or a checkpoint")
    files = [path for _, path in checkpoints(place)] if place.is_dir() else [place]
    if not files:
        raise UserError(f"{place} holds no checkpoint; give a run folder or a file")
    faults = {path: damage(path) for path in files}
    for path, fault in faults.items():
        print(f"{path}: {'whole' if fault is None else fault}")
    if any(faults.values()):
        bad = sum(fault is not None for fault in faults.values())
        raise RuntimeError(f"{bad} of {len(files)} checkpoints are damaged")


def sample(argv: list[str]) -> None:
    """Write text with a trained model."""
    parser = LineParser(prog="lightning sample", description=sample.__doc__, allow_abbrev=False)
    add = parser.add_argument
    add("--ckpt_path", required=True, help="run folder (its newest checkpoint) or file")
    add("--prompt", action="append", help="text to go on from, repeatable; else stdin is read")
    add("--max_new_tokens", type=int, default=200, help="at most so many tokens after each prompt")
    add("--temperature", type=float, default=0.8, help="0 always takes the likeliest token")
    add("--top_k", type=int, help="draw from the k likeliest tokens only")
    add("--top_p", type=float, help="draw from the fewest tokens whose mass reaches p")
    add("--seed", type=int, default=1337, help="of the draws")
    add("--device", default="auto", help="auto, cpu, cuda, mps")
    add("--tokenizer", help="tokenizer.json; unset: the one in the run folder")
    options = parser.parse_args([whole_number(text) for text in argv])

    import torch

    from callbacks.checkpoint import newest_whole, read_checkpoint
    from callbacks.trainer import device_type
    from data.tokenizer import TextTokenizer
    from lm.generate import generate
    from lm.model import LM, ModelConfig, plain_keys

    place = Path(options.ckpt_path)
    if not place.exists():
        raise UserError(f"--ckpt_path {place} does not exist; give a run folder or a checkpoint")
    path = (
        newest_whole(place, lambda line: print(line, file=sys.stderr)) if place.is_dir() else place
    )
    checkpoint = read_checkpoint(path)
    run_folder = path.parent.parent
    tokenizer = TextTokenizer.load(Path(options.tokenizer or run_folder / "tokenizer.json"))
    trained = checkpoint["contract"]["tokenizer fingerprint"]
    if tokenizer.fingerprint != trained:
        raise UserError(
            f"{tokenizer.source} has fingerprint {tokenizer.fingerprint[:12]}, but {path} was "
            f"trained with {trained[:12]}; give that one by --tokenizer"
        )
    model = LM(ModelConfig(**checkpoint["model_config"]))
    weights = plain_keys(checkpoint["state_dict"])
    model.load_state_dict({name.removeprefix("net."): t for name, t in weights.items()})
    device = torch.device(device_type(options.device))
    model.to(device)
    prompts = options.prompt
    if prompts is None:
        if sys.stdin.isatty():
            raise UserError("there is no prompt; give --prompt TEXT or pipe text in")
        prompts = [sys.stdin.read()]
    started, count = time.perf_counter(), 0
    for prompt in prompts:
        # Without a prompt a document starts, as after the end of another.
        ids = tokenizer.encode(prompt) or [tokenizer.eos_id]
        new = counted(
            generate(
                model,
                ids,
                max_new_tokens=options.max_new_tokens,
                temperature=options.temperature,
                top_k=options.top_k,
                top_p=options.top_p,
                seed=options.seed,
                eos_id=tokenizer.eos_id,
                n_tokens=tokenizer.size,
            )
        )
        print(prompt, end="", flush=True)
        for text in tokenizer.decode_stream(new):
            print(text, end="", flush=True)
        print(flush=True)
        count += new.count
    seconds = time.perf_counter() - started
    print(f"{count} tokens, {count / seconds:.0f} tokens/s", file=sys.stderr)


class counted:
    """Iterator that knows how many items it gave."""

    def __init__(self, items: Iterator[int]) -> None:
        self.items, self.count = items, 0

    def __iter__(self) -> Iterator[int]:
        for item in self.items:
            self.count += 1
            yield item


COMMANDS: dict[str, Callable[[list[str]], None]] = {
    "fit": fit,
    "validate": validate,
    "prepare": prepare,
    "sample": sample,
    "verify": verify,
    "drill": drill,
}

if __name__ == "__main__":
    sys.exit(main())
