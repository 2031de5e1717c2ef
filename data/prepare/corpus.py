"""The default corpora: Python source that is on every machine that runs us."""

import importlib.metadata
import importlib.util
import os
import platform
import sysconfig
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from data.prepare.texts import EMPTY, Note

CORPORA: dict[str, tuple[str, ...]] = {
    "stdlib": ("stdlib",),
    "python": ("stdlib", "torch", "lightning", "numpy"),
}
"""Corpus name → its sources: the standard library or the name of an installed package."""

LEFT_OUT = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
"""Folder names that no corpus reads."""


def python_files(name: str) -> list[tuple[str, Path]]:
    """The Python files of a corpus, each with a name that is the same on every machine.

    Sorted by that name, which is `<source>/<path inside it>` with forward slashes.

    Raises:
        ValueError: for an unknown corpus, or a source that is not installed.
    """
    if name not in CORPORA:
        raise ValueError(f"corpus is {name!r}: must be one of {', '.join(sorted(CORPORA))}")
    found = []
    for source in CORPORA[name]:
        root = _root(source)
        for folder, folders, files in os.walk(root):
            folders[:] = [inner for inner in folders if inner not in LEFT_OUT]
            paths = [Path(folder, file) for file in files if file.endswith(".py")]
            found += [(f"{source}/{p.relative_to(root).as_posix()}", p) for p in paths]
    return sorted(found)


def read_source(path: Path) -> str | None:
    """The text of a Python file in the encoding it declares, line ends as `\\n`.

    None where the file does not decode.
    """
    try:
        with tokenize.open(path) as file:
            return file.read()
    except (SyntaxError, UnicodeDecodeError):
        return None


class SourceFile:
    """A Python file as an input to prepare: one document."""

    def __init__(self, name: str, path: Path) -> None:
        self.name, self.path, self.at, stat = name, path, 0, path.stat()
        self.size, self.identity = stat.st_size, [name, stat.st_size, stat.st_mtime_ns]

    def __iter__(self) -> Iterator[str | Note]:
        text = read_source(self.path)
        self.at = self.size
        yield Note("undecodable file") if text is None else text or Note(EMPTY)


def describe(name: str) -> dict[str, Any]:
    """What the corpus was made of on this machine: its name and versions."""
    packages = [source for source in CORPORA[name] if source != "stdlib"]
    versions = {package: importlib.metadata.version(package) for package in packages}
    return {"name": name, "versions": {"python": platform.python_version(), **versions}}


def _root(source: str) -> Path:
    if source == "stdlib":
        return Path(sysconfig.get_path("stdlib"))
    spec = importlib.util.find_spec(source)
    if spec is None or not spec.submodule_search_locations:
        raise ValueError(f"corpus source {source!r} is not an installed package: install it")
    return Path(spec.submodule_search_locations[0])
