"""Packages that only some inputs and tokenizers need."""

import importlib
from typing import Any


def package(module: str, extra: str, needed_by: object) -> Any:
    """Return a module that may be missing.

    Raises:
        ValueError: it is not installed.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ValueError(
            f"{needed_by} needs the package {error.name or module}: pip install -e '.[{extra}]'"
        ) from error
