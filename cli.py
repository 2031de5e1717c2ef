"""Command line of Relight: wires model, data and callbacks together.

Heavy imports stand inside the functions that need them: help and a mistyped command answer at once.
"""

import argparse
import atexit
import contextlib
import difflib
import io
import math
import os
import random
import shutil
import signal
import sys
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from callbacks.config.options import LineParser, finite, integer, local_path, nonempty, utf8
from callbacks.processes.console import Console, Log, drop_unread, open_standard_streams
from callbacks.processes.errors import report
from callbacks.processes.launch import forget_launcher, read_launch
from callbacks.processes.parent import die_with_parent, hand_over_id
from callbacks.processes.stop_requests import StopRequests, leave

# Configuration keys that always follow another one.
LINKS = {
    "model.config.max_seq_len": "data.seq_len",
    "model.seed": "seed_everything",
    "data.seed": "seed_everything",
    "data.vocab_size": "model.config.vocab_size",
}

# Said at the end of the help of commands that have options of their own beside a run's.
OTHERS = "All other options are those of lightning fit, --config first of all."

# Of prepare, in both of its forms.
OVERWRITE = "--overwrite"

# What has weights.
TRAINED = "run folder (its newest checkpoint), checkpoint, weights file or export"

# Commands whose work is what they print: they end when nobody reads it, or it cannot be written.
PRINTERS = ("plan", "peek", "sample", "evaluate")

stop = StopRequests()


def main(argv: list[str] | None = None) -> int:
    """Run one command and return its exit code: 0 done, 1 failed, 2 a mistake of the user."""
    if argv is not None:
        return answer(argv)
    open_standard_streams()
    die_with_parent()
    codes: list[int] = []
    # Before the libraries register theirs: so it comes after all other clean-up. What Python would
    # still do takes a second and more, which a stopped run may not have.
    atexit.register(lambda: leave(*codes) if codes else None)
    codes.append(answer(sys.argv[1:]))
    return codes[0]


def answer(argv: list[str]) -> int:
    """Run one command with the console and the signals that suit it."""
    streams = sys.stdout, sys.stderr
    for stream in streams:
        if isinstance(stream, io.TextIOWrapper):
            # A terminal of a narrow alphabet must not end a run.
            stream.reconfigure(errors="backslashreplace")
    log, prints = Log(), not argv or argv[0] not in COMMANDS or argv[0] in PRINTERS
    sys.stderr = Console(sys.stderr, log)
    hangup = signal.getsignal(signal.SIGHUP)
    if not prints:
        # Work that is worth more than its messages goes on when the terminal goes away.
        sys.stdout = Console(sys.stdout, log)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with stop:
            return run(argv)
    except SystemExit as left:
        return left.code if isinstance(left.code, int) else int(left.code is not None)
    except BrokenPipeError as error:
        return 0 if prints else report(error)  # who read it has had enough
    except Exception as error:
        return report(error)
    finally:
        signal.signal(signal.SIGHUP, hangup)
        sys.stdout, sys.stderr = streams
        for stream in streams:
            drop_unread(stream)


def run(argv: list[str]) -> int:
    """Run one command; errors are the caller's."""
    if not argv or argv[0] in ("-h", "--help"):
        print(overview())
        return 0 if argv else 2
    command = COMMANDS.get(argv[0])
    if command is None:
        near = difflib.get_close_matches(argv[0], COMMANDS, 1)
        hint = f"did you mean {near[0]}?" if near else "the command comes first"
        raise ValueError(f"{argv[0]} is not a command; {hint} ({', '.join(COMMANDS)})")
    # Before Lightning is imported, which fails on variables that are no numbers.
    if argv[0] in ("fit", "validate"):
        read_launch()
    else:
        forget_launcher()
    command(argv[1:])
    # What cannot be written is an error of the command, while there is somebody to say so.
    sys.stdout.flush()
    return 0


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


# Commands over a run's configuration


def fit(argv: list[str]) -> None:
    """Train; the same command resumes after a kill at any moment."""
    run_cli("fit", argv)


def validate(argv: list[str]) -> None:
    """Evaluate a checkpoint on the validation data of its run."""
    run_cli("validate", argv)


def prepare(argv: list[str]) -> None:
    """Turn raw text into token files: given by --input, or the corpus of a run's configuration."""
    if any(word.partition("=")[0] == "--input" for word in argv):
        return prepare_input(argv)
    if {"-h", "--help"} & {*argv}:
        print(input_parser().format_help(), "", sep="\n")
    overwrite, argv = OVERWRITE in argv, [word for word in argv if word != OVERWRITE]

    from data.prepare.prepare import prepare_corpus
    from data.prepare.summary import summary

    data = run_cli("prepare", argv).datamodule
    if data.path is None:
        raise ValueError(
            "data.mixture is given: its folders are prepared one by one, by lightning prepare "
            "--input FILES --output DIR"
        )
    if data.corpus is None:
        raise ValueError(
            f"data.corpus is not set, so there is nothing to make data.path {data.path} of; bring "
            "a folder with its files, set data.corpus to python or stdlib, or name your text by "
            "lightning prepare --input FILES --output DIR"
        )
    meta = prepare_corpus(data.corpus, data.path, data.vocab_size, overwrite=overwrite)
    print_summary(summary(meta, data.path))


def input_parser() -> argparse.ArgumentParser:
    """Options of `prepare --input`."""
    parser = LineParser(
        prepare,
        usage="lightning prepare --input FILE ... --output DIR [--tokenizer NAME] [--OPTION VALUE]"
        "\n       lightning prepare --config FILE [--KEY VALUE ...]",
        description="Turn text into token files. A killed call goes on when it is given again.",
        epilog="With --config, the corpus named by data.corpus is prepared at data.path; "
        f"{OVERWRITE} works there too.",
    )
    add = parser.add_argument
    kinds = ".jsonl, .json (an object a line), .txt, also .gz, .zst, .bz2 or .xz; .parquet"
    words = f"files, folders, globs, pipes or - ({kinds}), hf:NAME[:SPLIT]"
    add("--input", required=True, nargs="+", type=local_path, metavar="FILE", help=words)
    words = "folder to make, for data.path"
    add("--output", required=True, type=local_path, metavar="DIR", help=words)
    words = "tokenizer.json, its folder, byte, or tiktoken:NAME; unset: one is trained"
    add("--tokenizer", type=local_path, metavar="NAME", help=words)
    add("--vocab_size", type=integer, metavar="N", help="ids of the BPE to train, on up to 512 MB")
    words = "key of the text in a row, dots lead into objects (text)"
    add("--field", default="text", type=nonempty, help=words)
    words = "documents of .txt: file (default), blank_line, or what stands between two of them"
    add("--split_documents", default="file", metavar="RULE", help=words)
    words = "share of documents to validate on, chosen by their text (0.01)"
    add("--val_fraction", type=finite, default=0.01, metavar="X", help=words)
    words = "files to validate on instead"
    add("--val_input", default=[], nargs="+", type=local_path, metavar="FILE", help=words)
    words = "at a row that is no text: stop (default), or skip and count"
    add("--on_bad_row", default="stop", choices=("stop", "skip"), help=words)
    words = "what is not UTF-8: strict, a bad row (default), or replace by U+FFFD"
    add("--encoding_errors", default="strict", choices=("strict", "replace"), help=words)
    words = "of the token files (auto: the narrowest that fits)"
    add("--dtype", default="auto", choices=("auto", "uint16", "uint32"), help=words)
    add("--bos", action="store_true", help="store a bos before each document, not only its eos")
    add("--eos", type=nonempty, metavar="TOKEN", help="name of the token that ends a document")
    add("--pad", type=nonempty, metavar="TOKEN", help="name of the token that pads rows")
    words = "tokens of a file; unset: one file a split"
    add("--shard_tokens", type=integer, metavar="N", help=words)
    words = "replace files in the output folder that were not made from the same inputs"
    add(OVERWRITE, action="store_true", help=words)
    add("--workers", type=integer, metavar="N", help="threads that encode (all cores)")
    return parser


def prepare_input(argv: list[str]) -> None:
    """Turn the files that a command line names into token files."""
    options = vars(input_parser().parse_args(argv))
    inputs, output = options.pop("input"), Path(options.pop("output"))
    how = {name: options.pop(name) for name in ("overwrite", "workers")}

    from data.prepare.prepare import Settings, prepare_files
    from data.prepare.summary import summary
    from data.prepare.texts import ReadOptions

    read = {name: options.pop(name) for name in ("field", "split_documents", "encoding_errors")}
    settings = Settings(read=ReadOptions(**read), **options)
    print_summary(summary(prepare_files(inputs, output, settings, **how), output))


def print_summary(lines: list[str]) -> None:
    """Print lines, warnings among them to stderr."""
    for line in lines:
        print(line, file=sys.stderr if line.startswith("warning") else sys.stdout)


def plan(argv: list[str]) -> None:
    """Show everything that can be known of a run without training."""
    parser = LineParser(plan, epilog=OTHERS)
    add = parser.add_argument
    add("--json", action="store_true", help="print all figures as JSON, for scripts")
    add("--hours", type=finite, nargs="+", help="durations to look at; unset: 8 to 67 hours")
    options, run = parser.parse_known_args(argv)
    for hours in options.hours or ():
        if not 0 < hours < float("inf"):
            raise ValueError(f"--hours is {hours:g}: must be a number above 0")
    cli = run_cli("plan", run)

    import json
    from dataclasses import asdict

    from callbacks.run.trainer_arguments import check_arguments
    from lm.plan import HOURS, ledger
    from lm.plan_table import table

    check_arguments(vars(cli.config.trainer))
    found = ledger(run_plan(cli, tuple(options.hours or HOURS)))
    print(json.dumps(asdict(found), indent=1) if options.json else table(found))


def run_plan(cli: Any, hours: tuple[float, ...]) -> Any:
    """The numbers of a parsed run that its plan is made of."""
    import torch

    from callbacks.checkpoint.files import checkpoints
    from callbacks.peak_flops import peak_flops
    from callbacks.run.devices import device_type
    from callbacks.run.precision import choose_precision
    from lm.plan import RunPlan

    trainer, checkpoint, throughput = (
        cli._get(cli.config, section) for section in ("trainer", "checkpoint", "throughput")
    )
    data = cli.datamodule
    root = Path(trainer.default_root_dir)
    there = next(folder for folder in (root, *root.resolve().parents) if folder.exists())
    # The GPUs of the run need not be here either.
    device = device_type(trainer.accelerator)
    device = "cuda" if (trainer.accelerator, device) == ("gpu", "cpu") else device
    precision = choose_precision(str(trainer.precision), device)
    here = device == "cuda" and torch.cuda.is_available()
    devices = count_devices(trainer) * trainer.num_nodes
    known = peak_flops(torch.cuda.get_device_name(), precision) if here else None
    return RunPlan(
        config=cli.model.config,
        optim=cli.model.optim_config,
        precision=precision,
        micro_batch_size=data.micro_batch_size,
        accumulate=trainer.accumulate_grad_batches,
        devices=devices,
        buckets=devices > 1 or "ddp" in str(trainer.strategy).lower(),
        max_steps=None if trainer.max_steps == -1 else trainer.max_steps,
        total_tokens=data.total_tokens,
        epochs=data.epochs,
        **data.known_sizes(),
        save_every=checkpoint.every_n_steps,
        save_minutes=checkpoint.every_minutes,
        kept_files=checkpoint.keep_last + 1,  # and the best
        keep_every=checkpoint.keep_every,
        free_bytes=shutil.disk_usage(there).free,
        held_bytes=sum(path.stat().st_size for _, path in checkpoints(root)),
        peak_flops=throughput.peak_tflops * 1e12 if throughput.peak_tflops else known,
        hours=hours,
    )


def peek(argv: list[str]) -> None:
    """Show samples as the model gets them: text, targets, padding, and where they come from."""
    parser = LineParser(peek, epilog=OTHERS)
    add = parser.add_argument
    add("--count", type=integer, default=3, help="how many samples (3)")
    add("--step", type=integer, default=1, help="optimizer step whose first samples are shown (1)")
    options, run = parser.parse_known_args(argv)
    if options.count < 1:
        raise ValueError(f"--count is {options.count}: must be at least 1")
    if options.step < 1:
        raise ValueError(f"--step is {options.step}: steps are counted from 1")

    from data.peek import MARKS
    from data.peek import peek as look

    cli = run_cli("peek", run)
    trainer, data = cli.config.trainer, cli.datamodule
    data.prepare_data()
    world_size = count_devices(trainer) * trainer.num_nodes
    a_step = data.micro_batch_size * trainer.accumulate_grad_batches * world_size
    samples = data.training_samples()
    print(
        "\n".join(
            [*samples.start_lines, f"nothing is learned from what stands in {'…'.join(MARKS)}"]
        )
    )
    for head, text in look(samples, data.tokenizer, (options.step - 1) * a_step, options.count):
        print(f"\n{head}\n{text}")


def count_devices(trainer: Any) -> int:
    """Devices that `trainer.devices` stands for; auto and -1 are all GPUs of this machine."""
    import torch

    asked = trainer.devices
    if isinstance(asked, list):
        return len(asked)
    if str(asked).isdecimal() and int(asked) > 0:
        return int(asked)
    return 1 if trainer.accelerator == "cpu" else max(1, torch.cuda.device_count())


def drill(argv: list[str]) -> None:
    """Prove on this machine that a run killed at the worst moments ends with the same bits."""
    parser = LineParser(drill, epilog=OTHERS)
    add = parser.add_argument
    add("--kills", type=integer, default=5, help="how often the run is killed")
    add("--steps", type=integer, help="shorten the run to so many optimizer steps")
    add("--seed", type=integer, default=0, help="of the moments and times")
    add("--elastic", action="store_true", help="also go on under another split of the batch")
    options, run = parser.parse_known_args(argv)
    if options.kills < 1:
        raise ValueError(f"--kills is {options.kills}: must be at least 1")
    if options.steps is not None and options.steps < 6:
        raise ValueError(f"--steps is {options.steps}: must be at least 6, to save and validate")

    from callbacks.config.files import read_pipes
    from callbacks.drill import drill as fire_drill
    from callbacks.run.devices import device_type
    from lm.compile import why_not_compiled
    from lm.flops import flops_per_token

    run = read_pipes(run)
    config = run_cli("prepare", [*run, *shortened(options.steps)]).config
    trainer, micro_batch_size = config.trainer, config.data.micro_batch_size
    split = (micro_batch_size, trainer.accumulate_grad_batches, count_devices(trainer))
    other = fire_drill.other_split(*split) if options.elastic else ()
    root = Path(trainer.default_root_dir + "-drill")
    draw = random.Random(options.seed)
    plan = fire_drill.plan_kills(
        options.kills,
        draw,
        accumulates=trainer.accumulate_grad_batches > 1,
        validates=trainer.limit_val_batches != 0,
    )
    say = print_in_place if sys.stderr.isatty() else lambda line: None
    arguments = [*run, *shortened(options.steps), "--trainer.log_every_n_steps=1"]
    arguments += ["--tracker.name=null", "--ckpt_path=last"]
    if options.steps and config.model.compile == "auto":
        # As the whole run decides, where a short one would not be compiled.
        whole = run_plan(run_cli("prepare", run), ())
        per_token = flops_per_token(whole.config, whole.config.max_seq_len)
        run_flops = per_token * whole.tokens_per_step * (whole.steps or 0)
        compiled = why_not_compiled("auto", device_type(trainer.accelerator), run_flops) is None
        arguments.append(f"--model.compile={str(compiled).lower()}")
    changed, loss, elastic = 0, 0.0, None
    with fire_drill.claim(root):
        print(f"drill: {options.kills} kills, seed {options.seed}, in {root}", flush=True)
        outcome = fire_drill.drill(arguments, root, plan, draw, say)
        if other and not outcome.found:
            elastic = fire_drill.elastic(arguments, root, other, say)
    print(f"\n{'start':>5}  {'resumed from':<14}{'killed':<36}{'last step seen':>14}")
    for number, start in enumerate(outcome.starts, 1):
        moment, *when = start.moment.split(":")
        killed = " ".join([moment, *(f"#{word}" for word in when[:1]), *when[1:]])
        killed = killed if start.code else "ran to its end"
        print(f"{number:>5}  {start.resumed_from:<14}{killed:<36}{start.last_step:>14}")
    for where, bits in outcome.found[:5]:
        print(f"differs: {where}: {bits} bits")
    if elastic is not None:
        step, steps, changed, loss = elastic
        print(
            f"elastic: {' × '.join(map(str, split))} until step {step}, then "
            f"{' × '.join(map(str, other))} (micro-batch × accumulate × devices): the same samples "
            f"in {steps - changed} of {steps} steps, losses within {loss:.0e} of each other"
        )
    print(f"drill: {outcome.kills} kills, {outcome.bits} differing bits")
    if outcome.found or changed:
        places = len(outcome.found) + changed
        on_gpu = device_type(trainer.accelerator) == "cuda" and not trainer.deterministic
        hint = "; on a GPU only --trainer.deterministic true repeats all bits" if on_gpu else ""
        raise RuntimeError(f"the runs differ in {places} places; they are in {root}{hint}")
    if outcome.kills < options.kills:
        raise RuntimeError(
            f"the run never came to {options.kills - outcome.kills} of {options.kills} kills: "
            "lengthen it, or save and validate more often"
        )
    if not loss <= fire_drill.SPLIT_LOSS:  # nan too
        raise RuntimeError(f"losses under the other split differ by {loss:.0e}; see {root}")


def shortened(steps: int | None) -> list[str]:
    """Options of a run cut down to so many steps, in which it still saves and validates."""
    if steps is None:
        return []
    length = [f"--trainer.max_steps={steps}", "--data.total_tokens=null", "--data.epochs=null"]
    every = [
        f"--checkpoint.every_n_steps={steps // 6}",
        f"--trainer.val_check_interval={steps // 3}",
    ]
    return [*length, *every]


def print_in_place(line: str) -> None:
    """Show a passing line on a terminal."""
    print(f"\r{line:<78}", end="", file=sys.stderr, flush=True)


def run_cli(command: str, argv: list[str]) -> Any:
    """Parse a run's configuration by LightningCLI and run the command on it."""
    import jsonargparse
    import yaml

    from callbacks.config.files import read_pipes
    from callbacks.config.parser import RunParser
    from callbacks.config.values import dump_yaml, load_yaml
    from callbacks.ddp import RestartInvariantDDP, SameData
    from callbacks.drill.kill_points import VARIABLE, Moments
    from callbacks.progress import Progress
    from callbacks.run.folder import RunConfig, RunRecord
    from callbacks.run.trainer import Trainer
    from callbacks.stop_signals import StopSignals
    from data.datamodule import LMDataModule
    from lm.module import LMModule

    if (whole := read_pipes(argv)) != argv:
        argv = whole
        sys.argv[1:] = [command, *argv]  # what Lightning starts the other processes with
    quiet_libraries()
    jsonargparse.set_parsing_settings(docstring_parse_attribute_docstrings=True)
    jsonargparse.set_loader("yaml", load_yaml, exceptions=(yaml.YAMLError,))
    jsonargparse.set_dumper("yaml", dump_yaml)
    runs = command in ("fit", "validate")
    callbacks = [SameData(), RestartInvariantDDP(), RunRecord(), Progress(), StopSignals(stop)]
    if VARIABLE in os.environ:
        callbacks.append(Moments())
    return cli_class(command, runs)(
        LMModule,
        LMDataModule,
        trainer_class=Trainer,
        parser_class=RunParser,
        trainer_defaults={"callbacks": callbacks},
        save_config_callback=RunConfig,
        save_config_kwargs={"save_to_log_dir": False},
        auto_configure_optimizers=False,
        load_from_checkpoint_support=False,
        args=[command, *argv] if runs else argv,
        run=runs,
    )


def cli_class(command: str, runs: bool) -> type:
    """LightningCLI for one command; one that runs nothing only parses and makes the parts."""
    from jsonargparse.typing import restricted_number_type
    from lightning.pytorch.cli import LightningArgumentParser, LightningCLI

    from callbacks.checkpoint.callback import AtomicCheckpoint
    from callbacks.checkpoint.files import resolve
    from callbacks.config.files import read_arguments
    from callbacks.config.parser import RunParser, keys_of
    from callbacks.ddp import check_port
    from callbacks.drill.kill_points import reach
    from callbacks.grad_norm import GradNorm
    from callbacks.health import Health
    from callbacks.loggers.metrics_csv import MetricsCSV
    from callbacks.loggers.tensorboard import SeamlessTensorBoard
    from callbacks.loggers.trackers import TrackedRun, Tracker, make_logger, run_id
    from callbacks.run.announce import announce
    from callbacks.run.devices import device_type
    from callbacks.run.folder import code_fingerprint, commit, lock, versions
    from callbacks.run.steps import is_dry_run
    from callbacks.samples import PromptSamples
    from callbacks.throughput import Throughput
    from callbacks.weights import Weights
    from data.text.tokenizer import TextTokenizer, check_same_ids
    from lm.cpu import keep_freed_memory
    from lm.hub.export import export as write_export
    from lm.plan import HOURS, ledger
    from lm.plan_table import table
    from lm.trained import starting_weights

    def export_weights(file: Path, folder: Path) -> list[str]:
        trained = read_trained(file)
        tokenizer = tokenizer_of(trained) if trained.has_tokenizer else None
        return write_export(trained, folder, tokenizer=tokenizer, overwrite=folder.exists())

    def same_everywhere(config: dict[str, Any]) -> dict[str, Any]:
        facts = flatten(config)
        for key in ("config", "data.path", "data.tokenizer", "data.num_workers"):
            facts.pop(key, None)
        installed = {f"version of {name}": known for name, known in versions().items()}
        del installed["version of python"]
        return facts | installed | {"code": f"{code_fingerprint()} (commit {commit()})"}

    class LMCLI(LightningCLI):
        @staticmethod
        def subcommands() -> dict[str, set[str]]:
            loaders = {"model", "dataloaders", "train_dataloaders", "val_dataloaders", "datamodule"}
            return {command: loaders | {"weights_only", "verbose"}}

        def add_default_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
            seed = restricted_number_type(
                *("Seed", int, [(">=", 0), ("<", 2**32)]),
                docstring="a whole number (int) from 0 to 4294967295",
            )
            words = "Of initial weights, data order and dropout."
            parser.add_argument("--seed_everything", type=seed, default=1337, help=words)

        def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
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
            if not runs:
                words = "Of a run; nothing to this command."
                parser.add_argument("--ckpt_path", type=str | None, help=words)

        def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
            RunParser.keys = keys_of(self._parser(command if runs else None))
            super().parse_arguments(parser, read_arguments(args, RunParser.keys, LINKS))

        def _parse_ckpt_path(self) -> None:
            """Not Lightning's: that lets a file's settings override the command line's."""

        def instantiate_classes(self) -> None:
            try:
                super().instantiate_classes()
            except (TypeError, ValueError) as error:
                raise ValueError(str(error)) from error

        def before_instantiate_classes(self) -> None:
            trainer = self._get(self.config, "trainer")
            if device_type(trainer.accelerator) == "cpu":
                keep_freed_memory()
            if runs and count_devices(trainer) > 1:
                check_port()
                hand_over_id()

        def instantiate_trainer(self, **kwargs: Any) -> Any:
            given = self._get(self.config_init, "trainer")
            if given["logger"] is None:
                root = Path(given["default_root_dir"])
                page = SeamlessTensorBoard(root, lambda: table(ledger(run_plan(self, HOURS))))
                kwargs["logger"] = [page, MetricsCSV(root)]
            if not runs:
                return None
            trainer: Any = super().instantiate_trainer(**kwargs)
            trainer.peer_facts = lambda: same_everywhere(self.config[command].as_dict())
            for callback in trainer.callbacks:
                if isinstance(callback, Weights):
                    callback.export = export_weights
            settings = self._get(self.config_init, "tracker")
            if command == "fit" and settings.name is not None and not is_dry_run(trainer):
                root = Path(given["default_root_dir"])
                own = run_id(root)
                trainer.loggers.append(make_logger(settings, root, own))
                trainer.callbacks.append(TrackedRun(own))
            return trainer

        def fit(self, model: Any, ckpt_path: str | None = None, **kwargs: Any) -> None:
            root = Path(self.trainer.default_root_dir)
            trainer: Any = self.trainer
            if is_dry_run(trainer):
                self.read_start(model)
                return trainer.fit(model, weights_only=True, **kwargs)
            first = trainer.is_global_zero
            # Rank 0 decides for all what the run goes on from.
            trainer.start_elsewhere = lambda: self.read_start(model)
            with lock(root) if first else contextlib.nullcontext():
                reach("start-up")
                found = resolve(ckpt_path, root, starts=True) if first else None
                if first and found is None:
                    self.read_start(model)
                self.trainer.fit(model, ckpt_path=found, weights_only=True, **kwargs)

        def read_start(self, model: Any) -> None:
            """Read the weights that a run starts from; they are compared when its data is known."""
            if model.from_weights is None:
                return
            trained = read_trained(Path(model.from_weights), "model.from_weights")

            def weights() -> Any:
                self.check_tokenizer(trained, model.grow_vocab)
                return starting_weights(trained, model.config, model.grow_vocab)

            model.starting_weights = weights

        def check_tokenizer(self, trained: Any, grow: bool) -> None:
            """Refuse data whose ids mean something else to the weights."""
            data, known = self.datamodule, trained.tokenizer_fingerprint
            new = data.tokenizer if data.tokenizer_path is not None else None
            if new is not None and known == new.fingerprint:
                return
            place = trained.tokenizer_path
            old = TextTokenizer.load(place.parent) if place.is_file() else None
            if new is None or old is None or known not in (None, old.fingerprint):
                if new is not None and known is not None:
                    raise ValueError(
                        f"the data's tokenizer ({new.fingerprint[:12]}) is not that of "
                        f"model.from_weights {trained.source} ({known[:12]}); put that one's "
                        f"tokenizer.json beside it, and prepare the data with it"
                    )
                announce(
                    f"warning: whether the ids of the data mean the same to {trained.source} is "
                    "not known: one of them has no tokenizer"
                )
            else:
                check_same_ids(new, old, trained.source, grow)

        def validate(self, model: Any, ckpt_path: str | None = None, **kwargs: Any) -> None:
            if self.trainer.limit_val_batches == 0:
                raise ValueError("trainer.limit_val_batches is 0: there is nothing to validate on")
            root = Path(self.trainer.default_root_dir)
            first = self.trainer.is_global_zero
            found = resolve(ckpt_path or "last", root) if first else None
            self.trainer.validate(
                model, ckpt_path=found, weights_only=True, verbose=False, **kwargs
            )
            if not math.isfinite(loss := model.validation_metrics["val/loss"]):
                raise RuntimeError(
                    f"the validation loss is {loss}: the weights are too large or damaged; give an "
                    "earlier checkpoint by --ckpt_path"
                )

    return LMCLI


def flatten(nested: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings by their dotted keys."""
    flat: dict[str, Any] = {}
    for key, value in nested.items():
        flat |= (
            flatten(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
        )
    return flat


def quiet_libraries() -> None:
    """Silence adverts and warnings of libraries that a user cannot act on."""
    import logging

    # After the import of lightning, which sets its loggers back.
    for name in list(logging.root.manager.loggerDict):
        if name.startswith("lightning"):
            logging.getLogger(name).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module=r"(lightning|torch|jsonargparse)(\.|$)")


# Commands over a checkpoint


def verify(argv: list[str]) -> None:
    """Say of each checkpoint of a run, and of its weights, whether they are whole."""
    parser = LineParser(verify)
    parser.add_argument(
        "--ckpt_path", required=True, type=local_path, help="run folder or checkpoint file"
    )
    place = Path(parser.parse_args(argv).ckpt_path)

    from callbacks.checkpoint.files import WEIGHTS, checkpoints, unusable
    from lm.trained import has_checksum

    if not place.exists():
        raise ValueError(f"--ckpt_path {place} does not exist; give a run folder or a checkpoint")
    files = [path for _, path in checkpoints(place)] if place.is_dir() else [place]
    if (weights := place / WEIGHTS).is_file():
        files.append(weights)
    if not files:
        raise ValueError(f"{place} holds no checkpoint; give a run folder or a file")
    read = bad = 0
    for path in files:
        try:
            fault = unusable(path)
        except (OSError, ValueError) as error:
            fault = str(error).removeprefix(f"{path} ")
        if fault is not None and place.is_dir() and not os.path.lexists(path):
            continue  # the run goes on, and keeps it no more
        whole = "whole"
        if path.suffix == ".safetensors" and fault is None and not has_checksum(path):
            whole = "readable (from before these files had a checksum)"
        print(f"{path}: {fault or whole}")
        read, bad = read + 1, bad + (fault is not None)
    if not read:
        return verify(argv)
    if bad:
        raise RuntimeError(f"{bad} of {read} files are damaged or unreadable")


def export(argv: list[str]) -> None:
    """Write a trained model as a Hugging Face folder, compared with it before it is there."""
    parser = LineParser(export)
    add = parser.add_argument
    add("--ckpt_path", required=True, type=local_path, help=TRAINED)
    add("--output", required=True, type=local_path, metavar="DIR", help="folder to make")
    add("--dtype", default="fp32", choices=("fp32", "bf16", "fp16"), help="of the weights (fp32)")
    add("--tokenizer", type=local_path, help="tokenizer.json; unset: the one in the run folder")
    add("--overwrite", action="store_true", help="replace an export that is there")
    add("--shard_gb", type=finite, default=5.0, metavar="X", help="largest file of weights (5)")
    options = parser.parse_args(argv)
    if not options.shard_gb > 0:
        raise ValueError(f"--shard_gb is {options.shard_gb}: must be above 0")

    from lm.hub.export import export as write
    from lm.hub.folder import check_place

    output = Path(options.output)
    check_place(output, options.overwrite)
    trained = read_trained(Path(options.ckpt_path))
    with_tokenizer = trained.has_tokenizer or options.tokenizer
    lines = write(
        trained,
        output,
        dtype=options.dtype,
        tokenizer=tokenizer_of(trained, options.tokenizer) if with_tokenizer else None,
        overwrite=options.overwrite,
        shard_bytes=options.shard_gb * 1e9,
    )
    print("\n".join(lines))


def evaluate(argv: list[str]) -> None:
    """Measure a trained model: bits per byte of texts, or tasks of lm-eval."""
    parser = LineParser(evaluate)
    add = parser.add_argument
    add("--ckpt_path", required=True, type=local_path, help=TRAINED)
    add(
        "--text",
        nargs="+",
        default=[],
        type=local_path,
        metavar="FILE",
        help="UTF-8 files to foretell",
    )
    words = "ids by which the window moves on; unset: half of the context"
    add("--stride", type=integer, metavar="N", help=words)
    add("--tasks", type=nonempty, metavar="A,B", help="tasks of lm-eval, a package to install")
    add("--include_path", type=local_path, metavar="DIR", help="folder of tasks of your own")
    add("--limit", type=integer, metavar="N", help="only so many examples of a task")
    add("--device", default="auto", choices=("auto", "cpu", "cuda", "mps"), help="where to run")
    add("--tokenizer", type=local_path, help="tokenizer.json; unset: the one beside the model")
    options = parser.parse_args(argv)
    if not options.text and not options.tasks:
        raise ValueError("there is nothing to evaluate on: give --text FILES or --tasks NAMES")
    for file in options.text:
        if not Path(file).is_file():
            raise ValueError(f"--text {file} is no file; name UTF-8 text")

    if options.tasks:
        from lm.hub.tasks import require_lm_eval

        require_lm_eval()
    if options.text:
        evaluate_texts(options)
    if options.tasks:
        from lm.hub.tasks import run_tasks

        device = usable_device(options.device)
        trained = read_trained(Path(options.ckpt_path))
        tokenizer = tokenizer_of(trained, options.tokenizer)
        names = options.tasks.split(",")
        folder, limit = options.include_path, options.limit
        print(run_tasks(trained, tokenizer, names, folder, limit, device))


def evaluate_texts(options: Any) -> None:
    """Print the bits per byte of each text, and of all together."""
    from data.system.threads import in_thread
    from data.text.text_loss import TextLoss
    from lm.evaluate import bits_per_byte, loss_of_text

    model, tokenizer, start = load_trained(options.ckpt_path, options.device, options.tokenizer)
    half = max(1, model.config.max_seq_len // 2)
    stride = half if options.stride is None else options.stride
    results: dict[str, list[float]] = {}
    for file in options.text:
        try:
            text = Path(file).read_bytes().decode("utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"--text {file} is not UTF-8 ({error}): convert it first") from error
        if not text:
            raise ValueError(f"--text {file} is empty: there is nothing to foretell")
        (row,) = in_thread(partial(tokenizer.encode_batch, [text]))
        loss = TextLoss(len(text), tokenizer.lost([text], [row]))
        n_bytes = len(text.encode("utf-8")) - loss.n_lost_bytes
        if n_bytes == 0:
            raise ValueError(
                f"--text {file}: the model's tokenizer knows no character of it: give another text"
            )
        if loss.lost:
            print(
                f"warning: {file}: {loss.share} do not come back from their ids: their "
                f"{loss.n_lost_bytes:,} bytes are left out, and the bits per byte of other models "
                "are not comparable",
                file=sys.stderr,
            )
        # As a document stands in the data: after its bos, or after the end of another.
        ids = [*(start or [tokenizer.eos_id]), *row]
        nats = loss_of_text(model, ids, stride)
        if not math.isfinite(nats):
            raise RuntimeError(
                f"the loss of {file} is {nats}: the weights of {options.ckpt_path} are too large "
                "or damaged; give an earlier checkpoint"
            )
        results[file] = [nats, len(row), n_bytes]
    if len(results) > 1:
        results["all"] = [sum(column) for column in zip(*results.values(), strict=True)]
    for name, (nats, tokens, n_bytes) in results.items():
        print(
            f"{name}: {bits_per_byte(nats, int(n_bytes)):.4f} bits per byte, {nats / tokens:.4f} "
            f"nats a token, {tokens:,} tokens, {n_bytes:,} bytes"
        )


def sample(argv: list[str]) -> None:
    """Write text with a trained model."""
    parser = LineParser(sample)
    add = parser.add_argument
    add("--ckpt_path", required=True, type=local_path, help=TRAINED)
    add(
        "--prompt",
        action="append",
        type=utf8,
        help="text to go on from, repeatable; else stdin is read",
    )
    add(
        "--max_new_tokens",
        type=integer,
        default=200,
        help="at most so many tokens after each prompt",
    )
    add("--temperature", type=finite, default=0.8, help="0 always takes the likeliest token")
    add("--top_k", type=integer, help="draw from the k likeliest tokens only")
    add("--top_p", type=finite, help="draw from the fewest tokens whose mass reaches p")
    add("--seed", type=integer, default=1337, help="of the draws")
    add("--device", default="auto", choices=("auto", "cpu", "cuda", "mps"), help="where to run")
    add("--tokenizer", type=local_path, help="tokenizer.json; unset: the one in the run folder")
    options = parser.parse_args(argv)
    if not 0 <= options.seed < 2**63:
        raise ValueError(f"--seed is {options.seed}: must be 0 or more and below 2^63")

    from data.system.threads import in_thread
    from data.text.continuation import continuation
    from data.text.text_loss import TextLoss
    from lm.generate import generate

    model, tokenizer, start = load_trained(options.ckpt_path, options.device, options.tokenizer)
    started, count = time.perf_counter(), 0
    for prompt in options.prompt or [piped_prompt()]:
        ids = list(in_thread(partial(tokenizer.encode_batch, [prompt]))[0])
        if lost := tokenizer.lost([prompt], [ids]):
            share = TextLoss(len(prompt), lost).share
            print(f"warning: --prompt: {share} do not come back from their ids", file=sys.stderr)
        new = generate(
            model,
            # Without a prompt a document starts, as after the end of another.
            start + ids or [tokenizer.eos_id],
            max_new_tokens=options.max_new_tokens,
            temperature=options.temperature,
            top_k=options.top_k,
            top_p=options.top_p,
            seed=options.seed,
            eos_id=tokenizer.eos_id,
            n_tokens=tokenizer.size,
            holes=tokenizer.holes,
        )
        print(prompt, end="", flush=True)
        n_new = 0
        for n_new, text in enumerate(continuation(tokenizer, ids, new)):  # noqa: B007
            print(text, end="", flush=True)
        count += n_new
        print(flush=True)
    rate = count / (time.perf_counter() - started)
    print(f"{count} tokens, {rate:.0f} tokens/s", file=sys.stderr)


def piped_prompt() -> str:
    """What stdin holds, as UTF-8."""
    if sys.stdin.isatty():
        raise ValueError("there is no prompt; give --prompt TEXT or pipe text in")
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(encoding="utf-8", errors="strict")
    try:
        return sys.stdin.read()
    except UnicodeDecodeError as error:
        raise ValueError(f"the piped prompt is not UTF-8 ({error}); convert it first") from None


def load_trained(
    ckpt_path: str, device: str, tokenizer_path: str | None
) -> tuple[Any, Any, list[int]]:
    """Model and tokenizer of what a command line names, and the ids that documents begin with."""
    device = usable_device(device)
    trained = read_trained(Path(ckpt_path))
    tokenizer = tokenizer_of(trained, tokenizer_path)
    bos = trained.begins_with_bos
    start = tokenizer.start_ids(tokenizer.adds_bos if bos is None else bos)
    return trained.model().to(device), tokenizer, start


def usable_device(asked: str) -> str:
    """Device type of a command's --device."""
    import torch

    from callbacks.run.devices import device_type

    if asked == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device is cuda, but this machine has none; leave it out or give cpu")
    torch.set_float32_matmul_precision("highest")  # as in training
    return device_type(asked)


def read_trained(place: Path, key: str = "--ckpt_path") -> Any:
    """Read a run folder's newest whole checkpoint, a checkpoint, a weights-only file, or a folder
    of Hugging Face's form.
    """
    import zipfile

    from callbacks.checkpoint.files import WEIGHTS, checkpoints, read_checkpoint, read_newest
    from callbacks.run.announce import announce
    from lm.hub.files import names_model
    from lm.trained import from_checkpoint, from_folder, from_weights_file

    if not place.exists():
        raise ValueError(
            f"{key} {place} does not exist; give a {TRAINED}, each as a path on this machine"
        )
    if names_model(place) and not checkpoints(place):
        return from_folder(place)
    if (place / WEIGHTS).is_file() and not checkpoints(place):
        return from_weights_file(place / WEIGHTS)
    known = place.suffix in (".ckpt", ".safetensors") or not place.is_file()
    if not known and not zipfile.is_zipfile(place):
        raise ValueError(
            f"{key} {place} is no checkpoint and no weights file by its content: give one, or of a "
            "model in Hugging Face's form the folder"
        )
    if place.is_dir():
        path, content = read_newest(place, announce)
        return from_checkpoint(content, path)
    if place.suffix == ".safetensors":
        return from_weights_file(place)
    return from_checkpoint(read_checkpoint(place), place)


def tokenizer_of(trained: Any, path: str | None = None) -> Any:
    """The tokenizer of a trained model: that beside it, or a given one, if it is the same."""
    from data.text.tokenizer import TextTokenizer

    source, fingerprint = trained.source, trained.tokenizer_fingerprint
    if path is None and not trained.has_tokenizer:
        raise ValueError(
            f"{source} was trained on token files without a tokenizer; name theirs by --tokenizer"
        )
    found = trained.tokenizer_path if path is None else Path(path)
    if not found.is_file():
        raise ValueError(f"{found} does not exist; name the tokenizer.json by --tokenizer")
    # Hugging Face's folders name special tokens in a file beside.
    beside = found.name == "tokenizer.json" and (found.parent / "tokenizer_config.json").is_file()
    tokenizer = TextTokenizer.load(found.parent if beside else found)
    if fingerprint is not None and tokenizer.fingerprint != fingerprint:
        raise ValueError(
            f"{found} has fingerprint {tokenizer.fingerprint[:12]}, but {source} was trained with "
            f"{fingerprint[:12]}; give that one by --tokenizer"
        )
    if tokenizer.size > trained.config.vocab_size:
        raise ValueError(
            f"{found} has {tokenizer.size} ids, more than the {trained.config.vocab_size} of "
            f"{source}: it is another model's; name the right one by --tokenizer"
        )
    return tokenizer


COMMANDS: dict[str, Callable[[list[str]], None]] = {
    "fit": fit,
    "validate": validate,
    "prepare": prepare,
    "plan": plan,
    "peek": peek,
    "sample": sample,
    "export": export,
    "evaluate": evaluate,
    "verify": verify,
    "drill": drill,
}

if __name__ == "__main__":
    sys.exit(main())
