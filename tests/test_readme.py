"""The README's commands, run in an empty folder as a newcomer would."""

import gzip
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest
from conftest import RunYaml

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
CODE = ("lm", "data", "callbacks")
MAP = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
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
    starts = ("make ", "python", ".venv/bin/", "lightning ", "tensorboard ", "while ")
    return [line for line in lines if line.startswith(starts)]


def trip() -> list[str]:
    """The commands that train, look at and use the small run."""
    return [line for line in commands() if line.startswith(("lightning", "tensorboard"))]


def loop() -> str:
    """The command that starts a run until it is done."""
    [line] = [line for line in commands() if line.startswith("while ")]
    return line


def test_every_command_is_run_by_ci_or_here():
    here = {*trip(), loop(), ".venv/bin/lightning fit --config configs/small.yaml"}
    assert set(commands()) - RUN_BY_CI - here == set()
    assert len(trip()) >= 4


def test_readme_is_read_in_one_sitting():
    assert len(README.splitlines()) <= 180


@pytest.mark.parametrize("path", re.findall(r"^ +(\w+\.py) ", MAP, flags=re.MULTILINE))
def test_map_names_files_that_are_there(path: str):
    assert [*ROOT.glob(path), *(p for d in CODE for p in (ROOT / d).rglob(path))]


@pytest.mark.parametrize("folder", CODE)
def test_map_leaves_no_file_out(folder: str):
    named = set(re.findall(r"^ +(\w+\.py) ", MAP, flags=re.MULTILINE))
    assert {p.name for p in (ROOT / folder).rglob("*.py")} - named == {"__init__.py"}


@pytest.mark.slow
def test_commands_of_the_small_run_work_in_an_empty_folder(tmp_path: Path):
    shutil.copytree(ROOT / "configs", tmp_path / "configs")
    write_dump(tmp_path)
    for line in trip():
        words = shlex.split(line)
        program = Path(sys.executable).with_name(words[0])
        if words[0] == "tensorboard":
            assert_serves_a_page([program, *words[1:]], tmp_path)
            continue
        short = shlex.split(SHORT) if words[1] in ("fit", "validate") else []
        short = ["--steps", "12", "--kills", "2"] if words[1] == "drill" else short
        subprocess.run([program, *words[1:], *short], cwd=tmp_path, check=True, timeout=300)
    assert (tmp_path / "runs" / "small" / "checkpoints" / "step-00000003.ckpt").exists()


@pytest.mark.slow
def test_loop_brings_a_run_that_is_killed_again_and_again_to_its_end(
    run_yaml: RunYaml, tmp_path: Path
):
    config = run_yaml({"trainer.max_steps": 5, "checkpoint.every_n_steps": 1})
    line = loop().replace("configs/small.yaml", str(config)).replace("sleep 5", "sleep 0")
    # Each start dies at its second save, before it drops an older one, while one is ahead of it.
    environment = os.environ | {
        "RELIGHT_KILL_AT": "before retention:2",
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    }
    run = subprocess.run(
        ["bash", "-c", line], env=environment, capture_output=True, text=True, check=False
    )
    assert run.stderr.count("resuming from") == 2
    assert run.stderr.splitlines()[-1] == f"done: 5 steps in {tmp_path / 'run'}"


def write_dump(folder: Path) -> None:
    """Text of one's own, as the README names it."""
    texts = [f"def f{i}(a):\n    return a + {i} * {i * i}\n" * 40 for i in range(300)]
    (folder / "dump").mkdir()
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
    (folder / "dump" / "part.jsonl.gz").write_bytes(gzip.compress(lines.encode("utf-8")))
    (folder / "texts").mkdir()
    for i, text in enumerate(texts):
        (folder / "texts" / f"{i}.txt").write_text(text, encoding="utf-8")


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
