"""Configuration files: which ones a command line names, read once, with errors by file and line."""

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from callbacks.config.options import local_path
from callbacks.config.values import Keys, dump_inline, read_config, read_word
from callbacks.processes.launch import read_launch

MOST_BYTES = 2**24

OTHER_FORMATS = (".toml", ".ini", ".py")


def config_words(argv: list[str]) -> list[tuple[int, int, str]]:
    """Return start, end and value of each --config of a command line.

    Raises:
        ValueError: no file is named after it.
    """
    found = []
    for i, word in enumerate(argv):
        name, equals, value = word.partition("=")
        if word.startswith("-c") and name not in ("-c", "-config"):
            name, equals, value = "-c", "=", word[2:]  # -cFILE
        if name in ("--config", "-c", "-config"):
            end = i + 1 if equals else i + 2
            value = value if equals else "".join(argv[i + 1 : i + 2])
            if not value.strip():
                raise ValueError(
                    f"{name} names no file; give one, as in --config configs/tiny.yaml"
                )
            found.append((i, end, value))
    return found


def read_pipes(argv: list[str]) -> list[str]:
    """Return a command line that holds the content of --config - and of pipes.

    A pipe can be read only once, but the processes of a run and those of a drill all need it.
    """
    for start, end, value in reversed(config_words(argv)):
        if "\n" in value or Path(value).is_file() or not (value == "-" or is_stream(value)):
            continue
        if not (text := read_text(value)).strip():
            raise ValueError(
                f"--config {value} holds no keys; write one key: value a line, as in configs/"
            )
        argv = [*argv[:start], f"--config={text}\n", *argv[end:]]
    return argv


def is_stream(value: str) -> bool:
    """Whether a path leads to a pipe, a terminal or another device."""
    return Path(value).exists() and not Path(value).is_dir()


def read_text(value: str, option: str = "--config") -> str:
    """Return the text of the file, or of the pipe, that an option names.

    Raises:
        ValueError: it cannot be read as text, or not by several processes.
    """
    try:
        file = Path(local_path(value))
    except argparse.ArgumentTypeError as error:
        raise ValueError(f"{option} {error}") from None
    if value != "-" and not file.exists():
        way = "the shipped ones are in configs/" if option == "--config" else "name a file of keys"
        raise ValueError(f"{option} {value} does not exist; {way}")
    if file.suffix in OTHER_FORMATS:
        raise ValueError(
            f"{option} {value} is a {file.suffix} file: YAML and JSON alone are read; write it as "
            "YAML, one key: value a line, as in configs/"
        )
    if file.is_dir():
        raise ValueError(f"{option} {value} is a folder; name the file inside it")
    if value == "-" or not file.is_file():
        ranks = read_launch().world_size or 1
        if ranks > 1:
            raise ValueError(
                f"{option} {value} is a pipe, which only one of the {ranks} processes can read; "
                "write it to a file, and name that file"
            )
    if value == "-":
        data = sys.stdin.buffer.read(MOST_BYTES + 1)
    else:
        with file.open("rb") as stream:
            data = stream.read(MOST_BYTES + 1)
    if len(data) > MOST_BYTES:
        raise ValueError(f"{option} {value} is larger than 16 MB: it is no configuration")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        kind = "UTF-16" if data[:2] in (b"\xff\xfe", b"\xfe\xff") else f"not UTF-8 ({error})"
        raise ValueError(f"{option} {value} is {kind}; save it as UTF-8 text") from None


def read_arguments(argv: list[str], keys: Keys, links: Mapping[str, str]) -> list[str]:
    """Return a command line whose files are read and whose values have the type of their key.

    The files come first, wherever they stand: an option always wins over a file.

    Args:
        keys: Type hints by dotted key.
        links: Keys that always follow another one.

    Raises:
        ValueError: names the file or key and the way out.
    """
    files = {start: (end, value) for start, end, value in config_words(argv)}
    # `fit` and `validate` stand before their options.
    place = int(argv[:1] in (["fit"], ["validate"]))
    command, configs, sections, given = argv[:place], [], [], []
    while place < len(argv):
        word = argv[place]
        if place in files:
            place, value = files[place]
            configs.append(f"--config={dump_inline(read_file(value, keys, links))}")
            continue
        place += 1
        name, equals, value = word.removeprefix("--").partition("=")
        if word.startswith("--") and name in keys:
            if not equals and place < len(argv) and not argv[place].startswith("--"):
                equals, value = "=", argv[place]
                place += 1
            if equals:
                word = f"--{name}={read_value(value, name, keys)}"
        (sections if keys.get(name, ...) is None else given).append(word)
    return [*command, *configs, *sections, *given]


def read_value(text: str, key: str, keys: Keys) -> str:
    """Return a value of the command line as the parser reads it right; a section may be a file."""
    if keys[key] is not None:
        return read_word(text, key, keys[key])
    content = text if text.lstrip().startswith("{") else read_text(text, f"--{key}")
    try:
        return dump_inline(read_config(content, keys, key))
    except yaml.YAMLError as error:
        raise ValueError(f"--{key} {text}: {fault(error)}") from None


def read_file(value: str, keys: Keys, links: Mapping[str, str]) -> dict[str, Any]:
    """Return the content of a configuration file, or of its text.

    Raises:
        ValueError: names the file and the way out.
    """
    file = "--config" if "\n" in value else value
    try:
        content = read_config(value if "\n" in value else read_text(value), keys)
        for target, source in links.items():
            linked = nested(content, target)
            if linked is not None and linked != nested(content, source):
                raise ValueError(
                    f"{target} is {linked}, but it always follows {source} "
                    f"({nested(content, source)}); give {source} alone"
                )
    except yaml.YAMLError as error:
        raise ValueError(f"{file}: {fault(error)}") from None
    except ValueError as error:
        raise error if str(error).startswith("--") else ValueError(f"{file}: {error}") from None
    return content


def nested(content: Any, key: str) -> Any:
    """Return the value of a dotted key in nested mappings, or None."""
    for part in key.split("."):
        content = content.get(part) if isinstance(content, dict) else None
    return content


def fault(error: yaml.YAMLError) -> str:
    """Return what is wrong in a YAML text, and where."""
    form = "write one key: value a line, as in configs/"
    if not isinstance(error, yaml.MarkedYAMLError) or error.problem is None:
        return f"not YAML ({error}); {form}"
    marks = [(error.context, error.context_mark), (error.problem, error.problem_mark)]
    said = [
        part if mark is None else f"{part} (line {mark.line + 1})" for part, mark in marks if part
    ]
    if "cannot start any token" in error.problem:
        said.append(
            "YAML takes no tabs: indent by spaces, and quote texts that begin with @, ` or %"
        )
    elif "document" in " ".join(said):
        said.append(form)
    return "; ".join(said)
