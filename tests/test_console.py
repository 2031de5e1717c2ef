"""The console may go away; its lines are in the run folder."""

import io
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from callbacks.processes.console import Console, Log, drop_unread, keep_log

ROOT = Path(__file__).parent.parent


class Gone(io.StringIO):
    """A stream that nobody reads any more."""

    def write(self, text: str) -> int:
        raise BrokenPipeError

    def flush(self) -> None:
        raise OSError(5, "Input/output error")


@pytest.fixture
def log(tmp_path: Path) -> Log:
    log = Log()
    log.path = tmp_path / "console.log"
    return log


def test_console_that_is_gone_is_written_to_without_an_error(log: Log):
    console: Any = Console(Gone(), log)
    print("step 1", file=console, flush=True)
    assert log.path
    assert log.path.read_text(encoding="utf-8") == "step 1\n"


def test_closed_stream_is_written_to_without_an_error(log: Log):
    stream = io.StringIO()
    stream.close()
    console: Any = Console(stream, log)
    print("step 1", file=console, flush=True)


def test_console_is_its_stream_in_all_else():
    assert Console(sys.__stdout__ or io.StringIO(), Log()).isatty() == os.isatty(1)


def test_log_that_cannot_be_written_gives_its_error_once_and_keeps_its_lines(tmp_path, monkeypatch):
    stream: Any = Console(io.StringIO(), Log())
    monkeypatch.setattr("sys.stderr", stream)
    print("step 1", file=stream)
    error = keep_log(tmp_path / "missing")
    assert error
    assert error.filename == str(tmp_path / "missing" / "console.log")
    (tmp_path / "missing").mkdir()
    print("step 2", file=stream)
    lines = (tmp_path / "missing" / "console.log").read_text(encoding="utf-8").splitlines()
    assert lines[1:] == ["step 1", "step 2"]


def test_lines_before_the_file_is_known_come_first(tmp_path: Path):
    log = Log()
    log.write("one\ntw")
    log.write("o\n\n")
    log.path = tmp_path / "console.log"
    log.write("three\n")
    assert log.path.read_text(encoding="utf-8") == "one\ntwo\nthree\n"


def test_bar_that_overwrites_itself_is_left_out(log: Log):
    log.write("\r 10% ")
    log.write("\r 20% ")
    log.write("\nend\n")
    assert log.path
    assert log.path.read_text(encoding="utf-8") == "end\n"


def test_lines_wait_for_a_folder_that_takes_no_file(tmp_path: Path):
    log = Log()
    log.path = tmp_path / "later" / "console.log"
    log.write("one\n")
    log.path.parent.mkdir()
    log.write("two\n")
    assert log.path.read_text(encoding="utf-8") == "one\ntwo\n"


def test_stream_that_cannot_be_flushed_is_dropped():
    drop_unread(Gone())


def test_log_in_the_run_folder_holds_the_lines_of_every_start(run_yaml, lightning, tmp_path):
    config = run_yaml()
    said = []
    for steps in (4, 6):
        said += lightning("fit", "--config", config, "--trainer.max_steps", steps)[2].splitlines()
    lines = (tmp_path / "run" / "console.log").read_text(encoding="utf-8").splitlines()
    assert [line for line in lines if not line.startswith("--- ")] == said
    assert len(lines) == len(said) + 2


def test_finished_run_leaves_its_log_as_it_was(run_yaml, lightning, tmp_path):
    config, log = run_yaml(), tmp_path / "run" / "console.log"
    lightning("fit", "--config", config)
    before = log.read_bytes()
    assert lightning("fit", "--config", config)[0] == 0
    assert log.read_bytes() == before


def test_trial_run_leaves_no_log(run_yaml, lightning, tmp_path):
    assert lightning("fit", "--config", run_yaml(), "--trainer.fast_dev_run", 1)[0] == 0
    assert not (tmp_path / "run" / "console.log").exists()


@pytest.mark.slow
@pytest.mark.parametrize("streams", [">&-", "2>&-", "<&- >&- 2>&-", ">/dev/full 2>/dev/full"])
def test_streams_that_are_closed_or_full_do_not_stop_a_command(streams, tmp_path):
    command = f'"{sys.executable}" cli.py verify --ckpt_path "{tmp_path}" {streams}'
    assert subprocess.run(["sh", "-c", command], cwd=ROOT, check=False).returncode == 2


@pytest.mark.slow
def test_run_whose_reader_leaves_goes_on_to_its_end(run_yaml, tmp_path):
    command = f'"{sys.executable}" cli.py fit --config "{run_yaml()}" 2>&1 | head -n 1'
    subprocess.run(["sh", "-c", command], cwd=ROOT, check=True, capture_output=True)
    log = tmp_path / "run" / "console.log"
    assert log.read_text(encoding="utf-8").splitlines()[-1].startswith("done: 6 steps")


@pytest.mark.slow
def test_run_whose_terminal_hangs_up_goes_on_to_its_end(run_yaml, tmp_path):
    leader, terminal = os.openpty()
    command = [sys.executable, "cli.py", "fit", "--config", str(run_yaml())]
    with subprocess.Popen(
        ["setsid", "--ctty", *command], cwd=ROOT, stdin=terminal, stdout=terminal, stderr=terminal
    ) as run:
        os.close(terminal)
        os.read(leader, 1)  # the first line: from then on a SIGHUP is ignored
        os.close(leader)
    assert run.returncode == 0
    log = tmp_path / "run" / "console.log"
    assert log.read_text(encoding="utf-8").splitlines()[-1].startswith("done: 6 steps")
