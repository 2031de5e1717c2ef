"""Puts a result into RESULTS.md, with what it was measured on."""

import os
import platform
import shlex
import sys
import time
from importlib.metadata import version
from pathlib import Path

from callbacks.run.folder import commit

RESULTS = Path(__file__).with_name("RESULTS.md")
MARK = "hardware and versions.\n"


def record(title: str, text: str) -> None:
    """Insert a section above all others."""
    script, *options = sys.argv
    command = shlex.join(["python", f"benchmarks/{Path(script).name}", *options])
    versions = ", ".join(f"{name} {version(name)}" for name in ("torch", "lightning", "numpy"))
    section = (
        f"\n## {time.strftime('%Y-%m-%d')} · {title}\n\n`{command}`; commit {commit()}, "
        f"{os.cpu_count()} cores ({platform.machine()}), Python {platform.python_version()}, "
        f"{versions}.\n\n{text}\n"
    )
    head, mark, rest = RESULTS.read_text(encoding="utf-8").partition(MARK)
    RESULTS.write_text(head + mark + section + rest, encoding="utf-8")
