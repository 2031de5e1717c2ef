"""Command line of Relight: wires model, data and callbacks together.

Heavy imports stand inside the functions that need them: help and a mistyped command answer at once.
"""

import atexit
import difflib
import io
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

# Ctrl-C during the imports below, or after the work, ends the program without a traceback.
if (
    Path(sys.argv[0]).stem in ("lightning", "relight", "cli")
    and signal.getsignal(signal.SIGINT) is signal.default_int_handler
):
    signal.signal(signal.SIGINT, signal.SIG_DFL)

from callbacks.commands.drill import drill
from callbacks.commands.evaluate import evaluate
from callbacks.commands.export import export
from callbacks.commands.peek import peek
from callbacks.commands.plan import plan
from callbacks.commands.prepare import prepare
from callbacks.commands.sample import sample
from callbacks.commands.verify import verify
from callbacks.processes.console import Console, Log, drop_unread, open_standard_streams
from callbacks.processes.errors import report
from callbacks.processes.launch import forget_launcher, read_launch
from callbacks.processes.parent import die_with_parent
from callbacks.processes.stop_requests import leave, stop

# Commands whose work is what they print: they end when nobody reads it, or it cannot be written.
PRINTERS = ("plan", "peek", "sample", "evaluate")


def main(argv: list[str] | None = None) -> int:
    """Run one command and return its exit code: 0 done, 1 failed, 2 a mistake of the user."""
    if argv is not None:
        return answer(argv)
    open_standard_streams()
    die_with_parent()
    # Before torch is imported: each failed try to connect would print a page of C++ frames.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")
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


def fit(argv: list[str]) -> None:
    """Train; the same command resumes after a kill at any moment."""
    from callbacks.run.lightning_cli import run_cli

    run_cli("fit", argv)


def validate(argv: list[str]) -> None:
    """Evaluate a checkpoint on the validation data of its run."""
    from callbacks.run.lightning_cli import run_cli

    run_cli("validate", argv)


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
