"""Errors of a command: whose mistake they are."""

import importlib
import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from callbacks.processes import errors
from callbacks.processes.errors import raised_here, report
from data.windows import Windows

SOURCE = """
def on_purpose():
    raise ValueError(
        "seq_len is 0: it must be at least 1"
    )

def by_a_call():
    int("a")

def by_another():
    try:
        int("a")
    except ValueError as error:
        raise RuntimeError("no number") from error"""


def outcome(call: Callable[[], None]) -> Exception:
    try:
        call()
    except Exception as error:
        return error
    raise AssertionError("nothing was raised")


@pytest.fixture
def function(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Callable]:
    """Functions of a file that counts as ours; its source changes after it is imported."""
    file = tmp_path / "data" / "odd.py"
    file.parent.mkdir()
    file.write_text(SOURCE, encoding="utf-8")
    monkeypatch.syspath_prepend(file.parent)
    module = importlib.import_module("odd")
    file.write_text("", encoding="utf-8")
    del sys.modules["odd"]
    monkeypatch.setattr(errors, "HOME", tmp_path)
    return lambda name: getattr(module, name)


@pytest.mark.parametrize(
    ("name", "ours"),
    [("on_purpose", True), ("by_another", True), ("by_a_call", False)],
)
def test_error_is_ours_if_our_own_raise_made_it(function: Callable, name: str, ours: bool):
    assert raised_here(outcome(function(name))) is ours


def test_error_that_a_library_raises_is_not_ours():
    assert not raised_here(outcome(lambda: json.loads("{")))


def test_mistake_of_the_user_is_one_line(function: Callable, capsys: pytest.CaptureFixture[str]):
    assert report(outcome(function("on_purpose"))) == 2
    assert capsys.readouterr().err == "error: seq_len is 0: it must be at least 1\n"


def test_killed_data_worker_is_told_in_two_lines(run_yaml, lightning, monkeypatch):
    def killed(*_: object) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    monkeypatch.setattr(Windows, "__getitems__", killed)
    code, _, err = lightning("fit", "--config", run_yaml(), "--data.num_workers", 1)
    assert (code, err.splitlines()[-1]) == (1, errors.WORKER_LOST)
    assert "Traceback" not in err
