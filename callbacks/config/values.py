"""Values of configuration keys: YAML scalars are read by the type of their key.

A name that looks like a number (12e3, on, 2024-01-01) stays the name it is, and a number has one
reading, in a file and on the command line.
"""

import argparse
import math
import os
import re
import types
from datetime import timedelta
from typing import Any, Literal, Union, get_args, get_origin

import yaml
from jsonargparse._loaders_dumpers import get_yaml_default_loader, yaml_load

from callbacks.config.options import local_path, whole_number

Keys = dict[str, Any]
"""Type hint of each dotted key of a command; None for a section."""

SECTIONS = (
    *("model", "data", "trainer"),
    *("checkpoint", "throughput", "grad_norm", "health", "samples", "weights", "tracker"),
)

# Keys that name files and folders; those of data.mixture do too.
PATHS = (
    *("trainer.default_root_dir", "data.path", "data.tokenizer"),
    *("model.from_weights", "ckpt_path"),
)

FLOAT = re.compile(
    r"[-+]?(?:[0-9][0-9_]*)?\.[0-9_]+(?:[eE][-+]?[0-9]+)?|[-+]?[0-9][0-9_]*\.(?:[eE][-+]?[0-9]+)?"
    r"|[-+]?[0-9][0-9_]*[eE][-+]?[0-9]+|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)"
)
INT = re.compile(r"[-+]?(?:0x[0-9a-fA-F_]+|0b[01_]+|[0-9][0-9_]*)")


class Loader(get_yaml_default_loader()):
    """YAML whose numbers have one reading: 3e-4 is a float, 1e3 an int, 1:30 a text."""

    def construct_yaml_float(self, node: yaml.ScalarNode) -> float | int:
        """Return a float, or an int where the number is whole and written with an exponent."""
        text = whole_number(self.construct_scalar(node).replace("_", "").lower())
        if re.fullmatch(r"[-+]?\d+", text):
            return int(text)
        return float(text.replace(".inf", "inf").replace(".nan", "nan"))

    def construct_yaml_int(self, node: yaml.ScalarNode) -> int:
        """Return an int, unless a leading zero leaves its base open."""
        text = self.construct_scalar(node)
        if re.match(r"[-+]?0[\d_]", text):
            raise yaml.constructor.ConstructorError(
                problem=f"{text} has a leading zero, which means base 8 to YAML and nothing to a "
                "command line; write the number without it, or a name in quotes",
                problem_mark=node.start_mark,
            )
        return int(text, 0) if text.strip("+-")[:2] in ("0x", "0b") else int(text)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict:
        """Return a dict, unless a key is written twice."""
        refuse_twice(self, node)
        return super().construct_mapping(node, deep)


# A copy: the resolvers of the parent class are those of jsonargparse.
Loader.yaml_implicit_resolvers = {
    first: [(tag, shape) for tag, shape in found if not tag.endswith((":float", ":int"))]
    for first, found in Loader.yaml_implicit_resolvers.items()
}
for kind, shape in (("int", INT), ("float", FLOAT)):
    whole_shape = re.compile(f"(?:{shape.pattern})$")
    Loader.add_implicit_resolver(f"tag:yaml.org,2002:{kind}", whole_shape, [*"-+.0123456789"])
Loader.add_constructor("tag:yaml.org,2002:float", Loader.construct_yaml_float)
Loader.add_constructor("tag:yaml.org,2002:int", Loader.construct_yaml_int)


class Dumper(yaml.SafeDumper):
    """YAML that reads back the same: every text stands in quotes."""


Dumper.add_representer(str, lambda dumper, text: dumper.represent_scalar(STRING, text, style='"'))
STRING = "tag:yaml.org,2002:str"


def dump_inline(value: Any) -> str:
    """Return a value as YAML in one line."""
    text = yaml.dump(value, Dumper=Dumper, default_flow_style=True, width=math.inf)
    return text.removesuffix("...\n").strip()


class SavedDumper(yaml.SafeDumper):
    """YAML in which a text that `Loader` would take for a number stands in quotes."""


SavedDumper.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(f"(?:{FLOAT.pattern})$"), [*"-+.0123456789"]
)


def dump_yaml(value: Any) -> str:
    """Return a configuration as the text of config.yaml."""
    return yaml.dump(
        value, Dumper=SavedDumper, default_flow_style=False, allow_unicode=True, sort_keys=False
    )


def refuse_twice(loader: Loader, node: yaml.MappingNode) -> None:
    """Refuse a mapping in which a key is written twice."""
    seen: dict[Any, yaml.Node] = {}
    for key_node, value_node in node.value:
        if not isinstance(key_node, yaml.ScalarNode) or key_node.tag.endswith(":merge"):
            continue  # the parent class merges the one and refuses the other
        key = loader.construct_object(key_node)
        if before := seen.get(key):
            both = [part.value for part in (before, value_node)]
            raise yaml.constructor.ConstructorError(
                problem=f"key {key!r} is written twice, with {both[0]} and {both[1]}"
                if all(isinstance(value, str) for value in both)
                else f"section {key!r} is written twice; put the keys of both below one",
                problem_mark=key_node.start_mark,
            )
        seen[key] = value_node


def load_yaml(text: str) -> Any:
    """Return the content of a value on the command line, or of a file of one section.

    Raises:
        yaml.YAMLError: with the line of the fault.
    """
    content = yaml.load(text, Loader=Loader)
    return content if isinstance(content, dict) and ":" in text else yaml_load(text)


def read_config(text: str, keys: Keys, prefix: str = "") -> dict[str, Any]:
    """Return the keys of a configuration as nested dicts, each value read by its key's type.

    A section whose keys are all commented out is no section.

    Args:
        prefix: Section that the text is the content of.

    Raises:
        yaml.YAMLError: the text is no YAML, with the line of the fault.
        ValueError: a value does not fit its key.
    """
    loader = Loader(text)
    try:
        root = loader.get_single_node()
        if not isinstance(root, yaml.MappingNode):
            raise ValueError("it holds no keys; write one key: value a line, as in configs/")
        found: dict[str, Any] = {}
        _collect(loader, root, keys, prefix, found)
    finally:
        loader.dispose()
    nested: dict[str, Any] = {}
    for key, value in found.items():
        *sections, last = key.removeprefix(f"{prefix}.").split(".")
        place = nested
        for section in sections:
            place = place.setdefault(section, {})
        place[last] = value
    return nested


def _collect(
    loader: Loader, node: yaml.MappingNode, keys: Keys, prefix: str, found: dict[str, Any]
) -> None:
    """Put the values below a section into `found`, by dotted key."""
    refuse_twice(loader, node)
    loader.flatten_mapping(node)
    for key_node, child in dict(_named(node)).items():
        key = f"{prefix}.{key_node}".lstrip(".")
        if re.search(r"\s", key):
            raise ValueError(f"key {key!r} holds a space, maybe one that looks like indentation")
        if keys.get(key, ...) is None or key in SECTIONS:
            if isinstance(child, yaml.MappingNode):
                _collect(loader, child, keys, key, found)
            elif child.tag != "tag:yaml.org,2002:null":
                value = loader.construct_object(child, deep=True)
                raise ValueError(
                    f"{key} is {value}; it is a section: write its keys below it, two spaces in, "
                    "as in configs/"
                )
        elif key in found:
            raise ValueError(f"{key} is written twice, with {found[key]} and {child.value}")
        else:
            found[key] = read_node(loader, child, key, keys.get(key))


def _named(node: yaml.MappingNode) -> list[tuple[str, yaml.Node]]:
    """Return the entries of a mapping by their keys as written."""
    for key_node, _ in node.value:
        if not isinstance(key_node, yaml.ScalarNode):
            raise yaml.constructor.ConstructorError(
                problem="a key must be a name", problem_mark=key_node.start_mark
            )
    return [(key_node.value, child) for key_node, child in node.value]


def read_node(loader: Loader, node: yaml.Node, key: str, hint: Any) -> Any:
    """Return the value of a node, read by the type of its key."""
    value = _construct(loader, node, key, hint)
    if hint is not None:
        check(value, key, hint, shown=node.value if isinstance(node.value, str) else value)
    return value


def _construct(loader: Loader, node: yaml.Node, key: str, hint: Any) -> Any:
    if isinstance(node, yaml.ScalarNode):
        if takes_text(hint):
            null = not node.style and node.tag == "tag:yaml.org,2002:null"
            return None if null else read_text(key, node.value)
        if takes_numbers(hint):
            return _number(loader, node, key)
        if is_plain(hint):  # a list or a mapping, which this is not
            return None if node.tag.endswith(":null") and not node.style else node.value
    elif isinstance(node, yaml.MappingNode) and (inner := _inside(hint, dict)):
        refuse_twice(loader, node)
        loader.flatten_mapping(node)
        return {
            read_text(key, name) if key == "data.mixture" else name: _construct(
                loader, child, f"{key}.{name}", inner[1]
            )
            for name, child in _named(node)
        }
    elif isinstance(node, yaml.SequenceNode) and (inner := _inside(hint, list, tuple)):
        return [_construct(loader, child, key, inner[0]) for child in node.value]
    return loader.construct_object(node, deep=True)


def _number(loader: Loader, node: yaml.ScalarNode, key: str) -> Any:
    if re.match(r"[-+]?0[\d_]+$", node.value):
        raise ValueError(
            f"{key} is {node.value}: a leading zero means base 8 to YAML and nothing to a "
            "command line; write the number without it"
        )
    if node.style and not node.value.strip():
        return ""
    # Quotes make no text of a number: the parser reads it again.
    kind = loader.resolve(yaml.ScalarNode, node.value, (True, False))
    if kind.rpartition(":")[2] not in ("int", "float", "bool", "null"):
        return node.value
    return loader.construct_object(yaml.ScalarNode(kind, node.value, node.start_mark))


def read_word(text: str, key: str, hint: Any) -> str:
    """Return a value of the command line as the parser reads it right.

    Raises:
        ValueError: the value does not fit its key.
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError(
            f"{key} is {text}: it is not UTF-8; give it in UTF-8, or rename the file"
        ) from None
    if takes_text(hint):
        value = None if text == "null" else read_text(key, text)
        check(value, key, hint, shown=text)
        return text if value is None else value
    if not text.strip():
        check("", key, hint, shown=text)
    if not is_plain(hint):
        return text
    loader = Loader(text)
    try:
        node = loader.get_single_node()
        value = read_node(loader, node, key, hint)
    except yaml.YAMLError as error:
        raise ValueError(f"{key} is {text}: {getattr(error, 'problem', None) or error}") from None
    finally:
        loader.dispose()
    return text if isinstance(value, str) else dump_inline(value)


def read_text(key: str, text: str) -> str:
    """Return the text of a key; a path has its home folder in full.

    Raises:
        ValueError: it is a path that is empty or not on this machine.
    """
    if key.split(".mixture")[0] not in (*PATHS, "data"):
        return text
    try:
        path = local_path(text)
    except argparse.ArgumentTypeError as error:
        raise ValueError(f"{key} {error}") from None
    # Lightning normalizes the run folder for itself: both must name the same one.
    return os.path.normpath(path) if key == "trainer.default_root_dir" else path


def check(value: Any, key: str, hint: Any, shown: Any) -> None:
    """Refuse a value that does not fit the type of its key.

    Raises:
        ValueError: names the key, the value and the rule.
    """
    empty = value is None or (isinstance(value, str) and not value.strip())
    if empty and not (value is None and type(None) in members(hint)):
        raise ValueError(
            f"{key} is {str(shown).strip() or 'empty'}: it must be {rule(hint)}; give it a value, "
            "or leave the key out"
        )
    if is_plain(hint) and isinstance(value, int | float) and abs(value) >= 2**63:
        raise ValueError(f"{key} is {shown}: it must be finite and below 2^63")
    if not fits(value, hint):
        shown = f"{shown}".lower() if isinstance(shown, bool) else shown
        raise ValueError(f"{key} is {shown}: it must be {rule(hint)}")


def members(hint: Any) -> tuple[Any, ...]:
    """Return the members of a union, or the one type."""
    return get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)


def _inside(hint: Any, *containers: type) -> tuple[Any, ...]:
    """Return the types inside a container type of a union, if it has one."""
    found = [get_args(each) for each in members(hint) if get_origin(each) in containers]
    return found[0] if found else ()


def takes_text(hint: Any) -> bool:
    """Whether a scalar of this type is a text, whatever it looks like."""
    texts = any(each is str or get_origin(each) is Literal for each in members(hint))
    return texts and not takes_numbers(hint)


def takes_numbers(hint: Any) -> bool:
    """Whether a scalar of this type may be a number, or true and false."""
    return any(isinstance(each, type) and issubclass(each, int | float) for each in members(hint))


def is_plain(hint: Any) -> bool:
    """Whether a type is made of texts, numbers and containers of them."""
    return all(
        each in (str, type(None))
        or get_origin(each) is Literal
        or takes_numbers(each)
        or (get_origin(each) in (list, tuple, dict) and all(map(is_plain, get_args(each))))
        for each in members(hint)
    )


def fits(value: Any, hint: Any) -> bool:
    """Whether a value is of a type; types of libraries are left to the parser."""
    if not is_plain(hint):
        return True
    return any(_fits_one(value, each) for each in members(hint))


def _fits_one(value: Any, hint: Any) -> bool:
    inner = get_args(hint)
    match get_origin(hint) or hint:
        case origin if origin is Literal:
            return value in inner
        case origin if origin is list:
            return isinstance(value, list) and all(fits(each, inner[0]) for each in value)
        case origin if origin is tuple:
            return (
                isinstance(value, list)
                and len(value) == len(inner)
                and all(map(fits, value, inner))
            )
        case origin if origin is dict:
            return isinstance(value, dict) and all(fits(each, inner[1]) for each in value.values())
        case origin if origin is float:
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            return is_number and math.isfinite(value)
        case origin if isinstance(origin, type) and issubclass(origin, int) and origin is not bool:
            if not isinstance(value, int) or isinstance(value, bool):
                return False
            try:
                return origin(value) == value
            except ValueError:
                return False
        case origin:
            return isinstance(value, origin)


def rule(hint: Any) -> str:
    """Return what a value of a type must be, in words."""
    literals = any(get_origin(each) is Literal for each in members(hint))
    # trainer.precision: 16 is one of its words too. A duration is written as a text.
    found = [each for each in members(hint) if not (literals and each is int)]
    found = [each for each in found if not (each is str and timedelta in found)]
    classes = [each for each in found if is_class(each)]
    lists = [each for each in found if {*members(*get_args(each)[:1] or (0,))} <= {*classes}]
    words = [_rule_of_one(each) for each in found if each not in classes + lists]
    words = ["a short name" if classes and word == "a text" else word for word in words]
    if classes:
        names = " or ".join(each.__name__ for each in classes)
        words.insert(0, f"the class path of a {names}" + (" or a list of them" if lists else ""))
    return " or ".join(dict.fromkeys(words))


def is_class(hint: Any) -> bool:
    """Whether a type is a class that a configuration names by its class path."""
    return (
        isinstance(hint, type)
        and not get_origin(hint)
        and not is_plain(hint)
        and (hint is not timedelta)
    )


def _rule_of_one(hint: Any) -> str:
    inner = get_args(hint)
    match get_origin(hint) or hint:
        case origin if origin is Literal:
            return ("one of " if len(inner) > 1 else "") + ", ".join(map(str, inner))
        case origin if origin is list:
            return f"a list, each {rule(inner[0])}"
        case origin if origin is tuple:
            return f"a list of {len(inner)}, each {rule(inner[0])}"
        case origin if origin is dict:
            return f"a mapping of names, each to {rule(inner[1])}"
        case origin if origin is float:
            return "a finite number (float)"
        case origin if origin is bool:
            return "true or false"
        case origin if origin is int:
            return "a whole number (int)"
        case origin if origin is str:
            return "a text"
        case origin if origin is type(None):
            return "null"
        case origin:
            if isinstance(origin, type) and issubclass(origin, int):
                return origin.__doc__ or "a whole number (int)"
            return "a duration as DD:HH:MM:SS" if origin is timedelta else f"a {origin}"
