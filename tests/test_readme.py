"""The README's commands, run in an empty folder as a newcomer would."""

import re
import shlex
import shutil
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
# What `.ci/run` does, and what the tests below do, with the small run shortened.
SHORT = "--trainer.max_steps 3 --trainer.val_check_interval 2 --trainer.limit_val_batches 2"
RUN_BY_CI = {
    "make train",
    "make test",
    "make check",
    "python3 -m venv .venv",
    """.venv/bin/pip install "$(grep '^torch==' constraints.txt)\"""",
    ".venv/bin/pip install -c constraints.txt -e '.[dev]'",
}


def commands() -> list[str]:
    """Lines of the README's fenced blocks that are commands, without their comments."""
    blocks = re.findall(r"^```\n(.*?)^```", README, flags=re.MULTILINE | re.DOTALL)
    lines = [line.split("  #")[0].strip() for block in blocks for line in block.splitlines()]
    starts = ("make ", "python", ".venv/bin/", "lightning ", "tensorboard ")
    return [line for line in lines if line.startswith(starts)]


def trip() -> list[str]:
    """The commands that train, look at and use the small run."""
    return [line for line in commands() if line.startswith(("lightning", "tensorboard"))]


def test_every_command_is_run_by_ci_or_here():
    here = {*trip(), ".venv/bin/lightning fit --config configs/small.yaml"}
    assert set(commands()) - RUN_BY_CI - here == set()
    assert len(trip()) >= 4


def test_readme_is_read_in_one_sitting():
    assert len(README.splitlines()) <= 150


@pytest.mark.parametrize("path", re.findall(r"^  (\w+\.py) ", README, flags=re.MULTILINE))
def test_map_names_files_that_are_there(path: str):
    assert [*ROOT.glob(path), *ROOT.glob(f"*/{path}")]


@pytest.mark.parametrize("folder", ["lm", "data", "callbacks"])
def test_map_leaves_no_file_out(folder: str):
    named = set(re.findall(r"^  (\w+\.py) ", README, flags=re.MULTILINE))
    assert {p.name for p in (ROOT / folder).glob("*.py")} - named == {"__init__.py"}


@pytest.mark.slow
def test_commands_of_the_small_run_work_in_an_empty_folder(tmp_path: Path):
    shutil.copytree(ROOT / "configs", tmp_path / "configs")
    for line in trip():
        words = shlex.split(line)
        program = Path(sys.executable).with_name(words[0])
        if words[0] == "tensorboard":
            assert_serves_a_page([program, *words[1:]], tmp_path)
            continue
        short = shlex.split(SHORT) if words[1] in ("fit", "validate") else []
        short = ["--steps", "12"] if words[1] == "drill" else short
        subprocess.run([program, *words[1:], *short], cwd=tmp_path, check=True, timeout=300)
    assert (tmp_path / "runs" / "small" / "checkpoints" / "step-00000003.ckpt").exists()


def assert_serves_a_page(command: list[str | Path], folder: Path) -> None:
    with subprocess.Popen([*command, "--port", "16006"], cwd=folder) as server:
        try:
            for _ in range(60):
                try:
                    with urllib.request.urlopen("http://localhost:16006/") as page:
                        assert page.status == 200
                        return
                except OSError:
                    time.sleep(1)
            raise AssertionError("tensorboard served no page within a minute")
        finally:
            server.kill()
