"""A run's configuration as people write it: YAML, command line, and what is said of mistakes."""

import difflib
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar, NoReturn

import yaml
from jsonargparse._loaders_dumpers import get_yaml_default_loader, yaml_load
from lightning.pytorch.cli import LightningArgumentParser

SECTIONS = (
    *("model", "data", "trainer"),
    *("checkpoint", "throughput", "grad_norm", "health", "samples", "weights", "tracker"),
)


class RunParser(LightningArgumentParser):
    """Parser whose errors are one line with the nearest key."""

    keys: ClassVar[list[str]] = []
    """Dotted keys of the command, for hints."""

    def __init__(self, *args: Any, **options: Any) -> None:
        options.setdefault("allow_abbrev", False)
        super().__init__(*args, **options)

    def parse_args(self, args: list[str] | None = None, *rest: Any, **options: Any) -> Any:
        """Parse, with 1e3 read as a whole number."""
        given = sys.argv[1:] if args is None else args
        return super().parse_args([whole_number(text) for text in given], *rest, **options)

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Raise `ValueError` instead of printing the usage of every key."""
        raise ValueError(hinted(" ".join(message.split()), RunParser.keys)) from None


class Loader(get_yaml_default_loader()):
    """YAML as configurations are written: 3e-4 is a number, 1e3 a whole one, no key twice."""

    def construct_yaml_float(self, node: yaml.ScalarNode) -> float | int:
        """A float, or an int where the number is whole and written with an exponent."""
        text = whole_number(self.construct_scalar(node))
        return int(text) if re.fullmatch(r"[-+]?\d+", text) else float(text)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict:
        """A dict, unless a key is written twice."""
        seen: dict[Any, str] = {}
        for key_node, value_node in node.value:
            if not isinstance(key_node, yaml.ScalarNode) or key_node.tag.endswith(":merge"):
                continue  # the parent merges the one and refuses the other
            key, value = self.construct_object(key_node), str(value_node.value)
            if key in seen:
                raise yaml.constructor.ConstructorError(
                    problem=f"key {key!r} is written twice, with {seen[key]} and {value}",
                    problem_mark=key_node.start_mark,
                )
            seen[key] = value
        return super().construct_mapping(node, deep)


Loader.add_constructor("tag:yaml.org,2002:float", Loader.construct_yaml_float)


def load_yaml(text: str) -> Any:
    """What a file or a value on the command line holds.

    A section whose keys are all commented out is no section.

    Raises:
        yaml.YAMLError: with the line of the fault.
    """
    content = yaml.load(text, Loader=Loader)
    if not isinstance(content, dict) or ":" not in text:
        return yaml_load(text)
    if isinstance(model := content.get("model"), dict):
        content["model"] = {k: v for k, v in model.items() if v is not None}
    return {k: v for k, v in content.items() if v is not None or k not in SECTIONS}


def whole_number(text: str) -> str:
    """Write 1e3 as 1000 and 1.5e9 in full, also behind --key=; anything else stays."""
    match = re.fullmatch(r"(|--[\w.]+=)([-+]?\d+(?:\.\d+)?)[eE]\+?(\d{1,2})", text)
    if match is None:
        return text
    number = float(f"{match[2]}e{match[3]}")
    return f"{match[1]}{int(number)}" if number.is_integer() else text


def config_files(argv: list[str]) -> Iterator[Path]:
    """The files named by --config or -c.

    Raises:
        ValueError: no file is named after it.
    """
    for i, word in enumerate(argv):
        name, equals, value = word.partition("=")
        if name in ("--config", "-c"):
            if not equals:
                value = argv[i + 1] if i + 1 < len(argv) else ""
            if not value:
                raise ValueError(
                    f"{name} names no file; give one, as in --config configs/tiny.yaml"
                )
            yield Path(value)


def check_config(file: Path, links: Mapping[str, str]) -> None:
    """Find what the parser would not say well: a missing file, broken YAML, a linked key.

    Args:
        links: Keys that always follow another one.

    Raises:
        ValueError: names the file and the way out.
    """
    if not file.is_file():
        raise ValueError(f"--config {file} does not exist; the shipped ones are in configs/")
    try:
        content = load_yaml(file.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{file}: {error}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{file} holds no keys; write one key: value a line, as in configs/")
    for section in (*SECTIONS, "model.config", "model.optim"):
        value = nested(content, section)
        if not isinstance(value, dict | None):
            raise ValueError(
                f"{file}: {section} is {value}; it is a section: write its keys below it, two "
                "spaces in, as in configs/"
            )
    for target, source in links.items():
        value = nested(content, target)
        if value is not None and value != nested(content, source):
            raise ValueError(
                f"{file}: {target} is {value}, but it always follows {source} "
                f"({nested(content, source)}); give {source} alone"
            )


def nested(content: Any, key: str) -> Any:
    """Value of a dotted key in nested mappings, or None."""
    for part in key.split("."):
        content = content.get(part) if isinstance(content, dict) else None
    return content


def hinted(message: str, keys: list[str]) -> str:
    """The parser's message in short, with the nearest key where one is unknown."""
    union = re.search(r'key "([\w.]+)".*Subtypes: \[(.*?)\].*Given value: (.*)$', message)
    if union:
        kinds = re.sub(r"<class '(\w+)'>|typing\.|NoneType", r"\1", union[2])
        return f"{union[1]} is {union[3]}: it must be one of {kinds.strip(', ')}"
    match = re.search(r"does not accept option '([\w.]+)'|[oO]ption '([\w.]+)' is not", message)
    match = match or re.search(r"[uU]nrecognized arguments: --([\w.]+)", message)
    if match is None:
        return message
    key = next(group for group in match.groups() if group)
    last = key.rsplit(".", 1)[-1]
    ends = {known: known.rsplit(".", 1)[-1] for known in keys}
    if homes := [known for known, end in ends.items() if end == last]:
        return f"{key} is not a known key; {last} belongs at {' or '.join(homes)}"
    level = [known for known in keys if known.count(".") == key.count(".")]
    near = difflib.get_close_matches(key, level, 1, cutoff=0.7)
    for end in difflib.get_close_matches(last, ends.values(), 1) if not near else ():
        near = [known for known in keys if ends[known] == end]
    if near:
        return f"{key} is not a known key; did you mean {near[0]}?"
    sections = sorted({known.split(".")[0] for known in keys})
    where = (
        f"lightning fit --help shows the keys of {key.split('.')[0]}"
        if key.split(".")[0] in sections
        else f"the sections are {', '.join(sections)}"
    )
    return f"{key} is not a known key; {where}"
