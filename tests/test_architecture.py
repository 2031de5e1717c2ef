"""The import rule: cli.py → callbacks → {lm, data}; lm and data know neither each other."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
ALLOWED = {"lm": set(), "data": set(), "callbacks": {"lm", "data"}}
"""Folders whose modules each folder may import, beside its own."""


def imported(path: Path) -> set[str]:
    """Top-level names of everything that a file imports, wherever in it."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names.add((node.module or "").split(".")[0])
    return names


@pytest.mark.parametrize("folder", ALLOWED)
def test_a_folder_imports_only_the_folders_below_it(folder: str):
    files = sorted((ROOT / folder).rglob("*.py"))
    assert files
    others = {*ALLOWED, "cli", "tests", "benchmarks"} - {folder} - ALLOWED[folder]
    assert {str(path): imported(path) & others for path in files if imported(path) & others} == {}


def test_only_module_py_of_lm_imports_lightning():
    found = {p.name for p in (ROOT / "lm").rglob("*.py") if "lightning" in imported(p)}
    assert found == {"module.py"}
