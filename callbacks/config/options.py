"""Options of the commands: parser, rules for local paths and numbers.

Without heavy imports: a mistyped option is refused at once.
"""

import argparse
import difflib
import math
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

OTHERS = "All other options are those of lightning fit, --config first of all."
"""End of the help of commands that take a run's configuration and options of their own."""

# Numbers of an option, and what an error calls them.
KINDS = {"integer": "a whole number", "finite": "a finite number"}


class LineParser(argparse.ArgumentParser):
    """Parser of the options that are a command's own."""

    def __init__(self, command: Callable[[list[str]], None], **settings: Any) -> None:
        settings = {"description": command.__doc__} | settings
        super().__init__(prog=f"lightning {command.__name__}", allow_abbrev=False, **settings)

    def error(self, message: str) -> NoReturn:
        """Raise `ValueError` instead of printing the usage."""
        option, _, problem = message.removeprefix("argument ").partition(": ")
        if kind := re.fullmatch(r"invalid (\w+) value: '(.*)'", problem, re.DOTALL):
            raise ValueError(f"{option} is {kind[2] or 'empty'}: it must be {KINDS[kind[1]]}")
        if problem.startswith("is "):  # from `local_path`, `nonempty`, `utf8`
            raise ValueError(f"{option} {problem}")
        unknown = message.partition("unrecognized arguments: --")[2]
        keys = [action.dest for action in self._actions]
        near = difflib.get_close_matches(unknown.split("=")[0].split(" ")[0], keys, 1)
        hint = f"; did you mean --{near[0]}?" if near else f"; {self.prog} --help shows all options"
        raise ValueError(message + hint)


def local_path(text: str) -> str:
    """Return a path with a leading ~ or ~user replaced by the home folder, as a shell does it.

    Raises:
        argparse.ArgumentTypeError: the path is empty, a URL, or names a shell variable.
    """
    if not text.strip():
        raise argparse.ArgumentTypeError(
            "is empty: it must name a path; check that the shell variable in it is set, or leave "
            "it out"
        )
    if "\0" in text or (re.search(r"[\x01-\x1f]", text) and not Path(text).exists()):
        raise argparse.ArgumentTypeError(
            f"is {text!r}: a path holds no control characters; remove them (in YAML, a path with "
            "backslashes stands in single quotes)"
        )
    if (url := re.match(r"\w+://", text)) and not Path(text).exists():
        raise argparse.ArgumentTypeError(
            f"is {text}: it must be a path on this machine, not a {url[0]} address; fetch or mount "
            "it, and name the local path"
        )
    variable = re.search(r"(?:^|/)\$[A-Za-z_]\w*(?=/|$)|\$\{\w+\}", text)
    if variable and not Path(text).exists():
        raise argparse.ArgumentTypeError(
            f"is {text}: variables ({variable[0].strip('/')}) are replaced by a shell only; write "
            "the path in full, or give it in double quotes on the command line"
        )
    return os.path.expanduser(text)  # Path would drop ./ and a final /


def nonempty(text: str) -> str:
    """Return a text that is not empty.

    Raises:
        argparse.ArgumentTypeError: it is empty.
    """
    if not text.strip():
        raise argparse.ArgumentTypeError("is empty: give it a value, or leave it out")
    return text


def utf8(text: str) -> str:
    """Return a text of the command line.

    Raises:
        argparse.ArgumentTypeError: it is not UTF-8, which Python hands over as surrogates.
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        raise argparse.ArgumentTypeError(f"is {text!a}: it is not UTF-8; convert it") from None
    return text


def integer(text: str) -> int:
    """Return a whole number, also written 1e3 or 1_000.

    Raises:
        ValueError: it is none, or has leading zeros.
    """
    text = whole_number(text.strip())
    if not re.fullmatch(r"[-+]?(0|[1-9][\d_]*)", text):
        raise ValueError(text)
    return int(text)


def finite(text: str) -> float:
    """Return a finite number.

    Raises:
        ValueError: it is none.
    """
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(text)
    return value


def whole_number(text: str) -> str:
    """Write 1e3 as 1000 and 1.5e9 in full; anything else stays."""
    match = re.fullmatch(r"([-+]?\d+(?:\.\d+)?)[eE]\+?(\d{1,2})", text)
    if match is None:
        return text
    value = float(f"{match[1]}e{match[2]}")
    return str(int(value)) if value.is_integer() else text
