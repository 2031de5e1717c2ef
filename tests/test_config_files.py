# ruff: noqa: E501 - error lines are compared whole
"""Configuration files: how they are read, and what is said of one that cannot be."""

import io
import os
import sys
import threading
from pathlib import Path

import pytest
from conftest import Lightning, RunYaml


@pytest.mark.parametrize(
    ("content", "line"),
    [
        (b"\xff\xfea\0", "--config {file} is UTF-16; save it as UTF-8 text"),
        (b"a: \xe9", "--config {file} is not UTF-8 ('utf-8' codec can't decode byte 0xe9 in position 3: unexpected end of data); save it as UTF-8 text"),
        (b"", "{file}: it holds no keys; write one key: value a line, as in configs/"),
        (b"- a", "{file}: it holds no keys; write one key: value a line, as in configs/"),
        (b"data:\n\tseq_len: 3", "{file}: while scanning for the next token (line 2); found character that cannot start any token (line 2); YAML takes no tabs: indent by spaces, and quote texts that begin with @, ` or %"),
        (b"data:\n  seq_len: 3\ndata:\n  path: x", "{file}: section 'data' is written twice; put the keys of both below one (line 3)"),
        (b"data: &a [*a]", "{file}: found unconstructable recursive node (line 1)"),
        ("trainer:\n\u00a0 max_steps: 3".encode(), "{file}: key '\\xa0 max_steps' holds a space, maybe one that looks like indentation"),
        (b"model.optim.lr: .nan", "{file}: model.optim.lr is .nan: it must be a finite number (float)"),
    ],
    ids=str,
)  # fmt: skip
def test_file_that_cannot_be_read_is_named_with_its_fault(
    lightning: Lightning, tmp_path: Path, content: bytes, line: str
):
    file = tmp_path / "run.yaml"
    file.write_bytes(content)
    code, _, err = lightning("fit", "--config", file)
    assert (code, err) == (2, f"error: {line.format(file=file)}\n")


def test_mark_at_the_start_of_a_file_is_no_content(lightning: Lightning, run_yaml: RunYaml):
    file = run_yaml({"trainer.fast_dev_run": 1})
    file.write_bytes(b"\xef\xbb\xbf" + file.read_bytes())
    code, _, err = lightning("fit", "--config", file)
    assert code == 0, err
    assert err.splitlines()[-1] == "done: 1 steps of a dry run, which leaves nothing behind"


@pytest.mark.parametrize("option", ["--config", "-config", "-c"])
def test_option_wins_over_a_file_wherever_it_stands(
    lightning: Lightning, run_yaml: RunYaml, tmp_path: Path, option: str
):
    part = tmp_path / "part.yaml"
    part.write_text("fast_dev_run: 2\nmax_steps: 9", encoding="utf-8")
    file = run_yaml({"trainer.fast_dev_run": 3})
    words = ["--trainer.log_every_n_steps=2", "--trainer", part, option, file]
    code, _, err = lightning("fit", "--trainer.fast_dev_run=1", *words)
    assert code == 0, err
    assert err.splitlines()[-1].startswith("done: 1 steps")


def test_folder_is_no_configuration(lightning: Lightning, tmp_path: Path):
    code, _, err = lightning("fit", "--config", tmp_path)
    assert (code, err) == (2, f"error: --config {tmp_path} is a folder; name the file inside it\n")


# Pipes


@pytest.fixture
def fifo(run_yaml: RunYaml, tmp_path: Path) -> Path:
    """A pipe into which a configuration is written once."""
    path = tmp_path / "pipe"
    os.mkfifo(path)
    content = run_yaml({"trainer.fast_dev_run": 1}).read_bytes()
    threading.Thread(target=path.write_bytes, args=(content,), daemon=True).start()
    return path


def test_pipe_is_read_once_and_handed_on(
    lightning: Lightning, fifo: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(sys, "argv", ["lightning", "fit", "--config", str(fifo)])
    code, _, err = lightning("fit", "--config", fifo)
    assert code == 0, err
    # Lightning starts the other processes with this.
    assert sys.argv[2].startswith("--config=checkpoint:\n")
    assert lightning(*sys.argv[1:])[0] == 0


def test_standard_input_is_a_configuration_too(
    lightning: Lightning, run_yaml: RunYaml, monkeypatch: pytest.MonkeyPatch
):
    content = run_yaml({"trainer.fast_dev_run": 1}).read_bytes()
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content)))
    monkeypatch.setattr(sys, "argv", ["lightning"])
    code, _, err = lightning("fit", "--config", "-")
    assert code == 0, err


def test_pipe_for_several_processes_is_refused(
    lightning: Lightning, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    code, _, err = lightning("fit", "--config", "-")
    assert (code, err) == (
        2,
        "error: --config - is a pipe, which only one of the 2 processes can read; write it to a "
        "file, and name that file\n",
    )


# Options of the commands


@pytest.mark.parametrize(
    ("command", "option"),
    [
        *[("prepare", option) for option in ("--input", "--output", "--val_input", "--tokenizer")],
        *[("export", option) for option in ("--ckpt_path", "--output", "--tokenizer")],
        *[("evaluate", option) for option in ("--ckpt_path", "--text", "--include_path")],
        *[("sample", option) for option in ("--ckpt_path", "--tokenizer")],
        ("verify", "--ckpt_path"),
    ],
)
def test_empty_path_of_every_option_is_refused(lightning: Lightning, command: str, option: str):
    code, _, err = lightning(command, "--input", "x", option, "")
    assert (code, err) == (
        2,
        f"error: {option} is empty: it must name a path; check that the shell variable in it is "
        "set, or leave it out\n",
    )


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        (["sample", "--temperature", "nan"], "--temperature is nan: it must be a finite number"),
        (["sample", "--top_k", "1.5"], "--top_k is 1.5: it must be a whole number"),
        (["sample", "--seed", "010"], "--seed is 010: it must be a whole number"),
        (["sample", "--prompt", "\udcff"], "--prompt is '\\udcff': it is not UTF-8; convert it"),
        (["plan", "--hours", ""], "--hours is empty: it must be a finite number"),
    ],
)
def test_value_of_an_option_is_named_with_its_rule(
    lightning: Lightning, argv: list[str], line: str
):
    code, _, err = lightning(*argv)
    assert (code, err) == (2, f"error: {line}\n")


def test_home_folder_of_an_option_is_found(
    lightning: Lightning, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("HOME", str(tmp_path))
    _, _, err = lightning("verify", "--ckpt_path=~/run")
    assert err.startswith(f"error: --ckpt_path {tmp_path}/run does not exist")
