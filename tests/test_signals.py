"""Stop signals: the step is finished and saved, and the exit code is the shell's."""

import itertools
import os
import queue
import re
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from callbacks.checkpoint.callback import AtomicCheckpoint
from callbacks.checkpoint.files import read_newest
from callbacks.drill.drill import compare, rows
from callbacks.processes.stop_requests import EXIT_CODES, REPEAT, StopRequests
from callbacks.stop_signals import StopSignals
from lm.module import LMModule

ROOT = Path(__file__).parent.parent
NO_MODULE: Any = None
# A shell shows 130 for a program that died of SIGINT, and ends its loop.
CODES = [(signal.SIGTERM, 143), (signal.SIGUSR1, 143), (signal.SIGINT, -signal.SIGINT)]
ENDLESS = {
    "trainer.max_steps": 1_000_000,
    "trainer.val_check_interval": 1_000_000,
    "checkpoint.every_n_steps": 1_000_000,
    "trainer.max_time": "00:00:10:00",  # where a test that fails leaves the run
}


def fit_until_signalled(config: Path, number: signal.Signals) -> tuple[int, list[str]]:
    """Start a run with workers, send the signal to its process group once it trains.

    Returns its exit code and lines on stderr.
    """
    command = [sys.executable, "cli.py", "fit", "--config", str(config), "--data.num_workers=1"]
    with subprocess.Popen(
        command, cwd=ROOT, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as run:
        assert run.stderr
        lines = [run.stderr.readline()]
        while lines[-1] and not lines[-1].startswith("step "):
            lines.append(run.stderr.readline())
        os.killpg(run.pid, number)
        lines += run.stderr.readlines()
    return run.returncode, [line.rstrip("\n") for line in lines]


@pytest.mark.parametrize(
    ("number", "code"), [CODES[0], *(pytest.param(*c, marks=pytest.mark.slow) for c in CODES[1:])]
)
def test_signalled_run_saves_leaves_with_its_code_and_resumes(
    number, code, run_yaml, lightning, tmp_path
):
    config = run_yaml(ENDLESS)
    found, lines = fit_until_signalled(config, number)
    told = re.fullmatch(rf"{number.name}: saved at step (\d+) of 1000000; .* from here", lines[-1])
    assert (found, "Traceback" in "".join(lines)) == (code, False)
    assert told
    step = int(told[1])
    saved = tmp_path / "run" / "checkpoints" / f"step-{step:08d}.ckpt"
    assert list(saved.parent.iterdir()) == [saved]
    code, _, err = lightning("fit", "--config", config, "--trainer.max_steps", step + 2)
    assert code == 0, err
    assert f"resuming from {saved} at step {step}\n" in err
    assert f"done: {step + 2} steps" in err


# Inside a validation


def signal_in_validation(monkeypatch: pytest.MonkeyPatch, *calls: int) -> None:
    """Send SIGTERM in these micro-batches of validations, counted over all starts from 1."""
    count, step = itertools.count(1), LMModule.validation_step

    def signalled_step(module: LMModule, *batch: Any) -> None:
        if next(count) in calls:
            signal.raise_signal(signal.SIGTERM)
        step(module, *batch)

    monkeypatch.setattr(LMModule, "validation_step", signalled_step)


@pytest.mark.parametrize(("calls", "step"), [((2, 4), 3), ((5, 7), 6), ((6,), 6)])
def test_validation_cut_short_is_made_up_and_the_run_ends_with_the_same_bits(
    calls, step, run_yaml, lightning, monkeypatch, tmp_path
):
    # Micro-batches 1 to 3 belong to the validation at step 3, 4 to 6 to the run's last one.
    config = run_yaml({"trainer.limit_val_batches": 3})
    lightning("fit", "--config", config, "--trainer.default_root_dir", tmp_path / "whole")
    signal_in_validation(monkeypatch, *calls)
    for _ in calls:
        assert lightning("fit", "--config", config)[0] == 143
        _, saved = read_newest(tmp_path / "run", print)
        assert (saved["global_step"], saved["validation_due"]) == (step, True)
    assert lightning("fit", "--config", config)[0] == 0
    assert compare(tmp_path / "whole", tmp_path / "run") == []
    assert [row["step"] for row in rows(tmp_path / "run") if row["val/loss"]] == ["3", "6"]


def test_validation_once_made_up_is_not_made_again(run_yaml, lightning, monkeypatch, tmp_path):
    config = run_yaml({"checkpoint.every_n_steps": 3, "trainer.accumulate_grad_batches": 2})
    lightning("fit", "--config", config, "--trainer.default_root_dir", tmp_path / "whole")
    signal_in_validation(monkeypatch, 1)
    assert [lightning("fit", "--config", config)[0] for _ in range(2)] == [143, 0]
    # As a kill leaves it before the next save.
    (tmp_path / "run" / "checkpoints" / "step-00000006.ckpt").unlink()
    _, _, err = lightning("fit", "--config", config)
    validated = [line.split(" · ")[0] for line in err.splitlines() if "perplexity" in line]
    assert (validated, compare(tmp_path / "whole", tmp_path / "run")) == (["step 6"], [])


# Where a run may stop


class Saver(AtomicCheckpoint):
    """Notes at which steps a save is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[int] = []

    def save_now(self, trainer: Any, verify: bool = False) -> None:
        self.steps.append(trainer.global_step)

    def wait(self, trainer: Any) -> None:
        assert self.steps, "nothing to wait for"


def stand_in(**changes: Any) -> Any:
    """What StopSignals asks of a Trainer."""
    values = {
        "accumulate_grad_batches": 3,
        "enable_validation": True,
        "val_check_batch": 12,
        "global_step": 2,
        "max_steps": 20,
        "max_seconds": None,
        "strategy": SimpleNamespace(barrier=lambda: None),
        "largest": lambda number: number,
        "local_rank": 0,
        "state": SimpleNamespace(fn="fit"),
        "checkpoint_callbacks": [Saver()],
        "callbacks": [],
    }
    return SimpleNamespace(**values | changes)


@pytest.fixture
def requests():
    """Stop requests of a training."""
    with StopRequests() as stop:
        stop.saves = True
        yield stop


@pytest.fixture
def signalled(requests):
    """Stop signals of a training that got SIGTERM."""
    callback: Any = StopSignals(requests)
    callback.on_train_start(stand_in(), None)
    signal.raise_signal(signal.SIGTERM)
    return callback


@pytest.mark.parametrize("batch_idx", [3, 4])
def test_step_is_finished_first(signalled, batch_idx):
    trainer = stand_in()
    signalled.on_train_batch_end(trainer, None, None, None, batch_idx)
    assert trainer.checkpoint_callbacks[0].steps == []


def test_run_stops_after_the_save_at_the_step_edge(signalled, capsys):
    trainer = stand_in()
    with pytest.raises(SystemExit) as stop:
        signalled.on_train_batch_end(trainer, None, None, None, 5)
    assert (stop.value.code, trainer.checkpoint_callbacks[0].steps) == (143, [2])
    assert capsys.readouterr().err == (
        "\nSIGTERM: saved at step 2 of 20; the same command goes on from here\n"
    )


def test_validation_that_is_due_comes_before_the_stop(signalled):
    trainer = stand_in(global_step=4)
    signalled.on_train_batch_end(trainer, None, None, None, 11)
    with pytest.raises(SystemExit) as stop:
        signalled.on_validation_end(trainer, None)
    assert (stop.value.code, trainer.checkpoint_callbacks[0].steps) == (143, [4])


def test_run_stops_inside_a_validation_too(signalled):
    trainer = stand_in(global_step=4)
    with pytest.raises(SystemExit) as stop:
        signalled.on_validation_batch_end(trainer, None, None, None, 0)
    assert (stop.value.code, trainer.checkpoint_callbacks[0].steps) == (143, [4])


def test_validation_outside_a_fit_is_not_stopped(signalled):
    trainer = stand_in(state=SimpleNamespace(fn="validate"))
    signalled.on_validation_batch_end(trainer, None, None, None, 0)
    signalled.on_validation_end(trainer, None)
    assert trainer.checkpoint_callbacks[0].steps == []


def test_run_without_a_signal_goes_on(requests):
    callback, trainer = StopSignals(requests), stand_in()
    callback.on_train_batch_end(trainer, NO_MODULE, None, None, 5)
    assert trainer.checkpoint_callbacks[0].steps == []


@pytest.mark.parametrize(
    ("local_rank", "external", "code"),
    [(0, False, 143), (1, False, 0), (0, True, 143), (1, True, 143)],
)
def test_only_ranks_that_lightning_launched_leave_with_zero(signalled, local_rank, external, code):
    environment = SimpleNamespace(creates_processes_externally=external)
    strategy = SimpleNamespace(barrier=lambda: None, cluster_environment=environment)
    trainer = stand_in(local_rank=local_rank, strategy=strategy)
    with pytest.raises(SystemExit) as stop:
        signalled.on_train_batch_end(trainer, None, None, None, 5)
    assert stop.value.code == code


def test_signal_before_the_first_step_of_a_start_leaves_at_once():
    with StopRequests() as stop:
        callback: Any = StopSignals(stop)
        callback.on_train_start(stand_in(), None)
        with pytest.raises(SystemExit):
            signal.raise_signal(signal.SIGTERM)
        callback.on_before_optimizer_step(stand_in(), None, None)
        assert stop.saves


def test_signal_in_a_step_is_received_after_it(requests):
    callback: Any = StopSignals(requests)
    callback.on_train_batch_start(stand_in(), None, None, 0)
    signal.raise_signal(signal.SIGTERM)
    during = requests.received
    callback.on_train_batch_end(stand_in(), None, None, None, 0)
    assert (during, requests.received) == (0, signal.SIGTERM)


# What counts as a second request


@pytest.fixture
def left() -> Any:
    """Codes with which a process would have left at once."""
    return queue.Queue()


def send(stop: StopRequests, *numbers: signal.Signals) -> None:
    stop.saves = True
    for number in numbers:
        signal.raise_signal(number)


def test_second_signal_leaves_at_once_by_the_first(left, capsys):
    with StopRequests(left.put) as stop:
        send(stop, signal.SIGTERM, signal.SIGINT)
        assert left.get(timeout=60) == signal.SIGTERM
    assert capsys.readouterr().err == (
        "\nSIGINT, the second signal: left at once; the same command goes on from the newest "
        "checkpoint\n"
    )


def test_second_signal_is_told_by_the_first_process_alone(left, capsys, monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "1")  # as in a process that the first one has started
    with StopRequests(left.put) as stop:
        send(stop, signal.SIGTERM, signal.SIGINT)
        assert left.get(timeout=60) == signal.SIGTERM
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("number", EXIT_CODES)
def test_same_signal_passed_on_by_a_launcher_is_no_second_request(number, left):
    with StopRequests(left.put, lambda: 0.0) as stop:
        send(stop, number, number)
        # What comes after it is one, so it is known to have been looked at.
        send(stop, signal.SIGINT if number != signal.SIGINT else signal.SIGTERM)
        left.get(timeout=60)
    assert (left.empty(), stop.received) == (True, number)


@pytest.mark.parametrize(
    ("number", "seconds"), [(signal.SIGTERM, REPEAT), (signal.SIGINT, 0.5)], ids=["late", "Ctrl-C"]
)
def test_same_signal_of_an_impatient_person_leaves_at_once(number, seconds, left):
    clock = iter([0.0, seconds])
    with StopRequests(left.put, lambda: next(clock)) as stop:
        send(stop, number, number)
        assert left.get(timeout=60) == number


def test_ctrl_c_that_torchrun_passes_on_is_no_second_request(left, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    clock = iter([0.0, 0.5, 0.6])
    with StopRequests(left.put, lambda: next(clock)) as stop:
        send(stop, signal.SIGINT, signal.SIGINT, signal.SIGTERM)
        left.get(timeout=60)
    assert left.empty()


@pytest.mark.parametrize("number", EXIT_CODES)
def test_signal_leaves_by_an_exception_when_nothing_is_to_be_saved(number):
    with StopRequests() as stop, pytest.raises(SystemExit) as found:
        signal.raise_signal(number)
    assert (found.value.code, stop.code(number)) == (EXIT_CODES[number], EXIT_CODES[number])


def test_native_call_does_not_keep_a_process_that_has_nothing_to_save(left):
    with StopRequests(left.put):
        # Python's handler does not run, as in a call that does not return.
        signal.signal(signal.SIGTERM, lambda *_: None)
        signal.raise_signal(signal.SIGTERM)
        assert left.get(timeout=60) == signal.SIGTERM


@pytest.mark.parametrize("number", [*EXIT_CODES, signal.SIGHUP])
def test_earlier_handlers_are_put_back(number, lightning):
    before = signal.getsignal(number)
    lightning("verify", "--ckpt_path", "nowhere")
    assert signal.getsignal(number) == before


def test_lost_terminal_is_a_request_under_torchrun_alone(monkeypatch):
    with StopRequests() as alone:
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
        with StopRequests() as under_torchrun:
            assert [stop.code(signal.SIGHUP) for stop in (alone, under_torchrun)] == [0, 129]


# How a process ends

LAST = """
import atexit, sys, cli
class Late:
    def __del__(self): print("late")
def command(argv):
    sys.late = Late()
    atexit.register(print, "clean-up")
cli.COMMANDS["verify"] = command
sys.argv[1:] = ["verify"]
sys.exit(cli.main())
"""


def test_process_is_gone_right_after_its_clean_up():
    # What Python does then took seven seconds on a busy machine.
    ended = subprocess.run(
        [sys.executable, "-c", LAST], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert (ended.returncode, ended.stdout) == (0, "clean-up\n"), ended.stderr


# Time limit


@pytest.fixture
def budgeted():
    """Stop signals of a training with 10 s, of which so many are over at the next step edge."""

    def after(seconds: float) -> Any:
        requests = StopRequests()
        requests.began = 0.0  # training starts later
        callback = StopSignals(requests, lambda: seconds)
        callback.on_train_start(stand_in(max_seconds=10.0), NO_MODULE)
        return callback

    return after


def test_run_leaves_with_zero_when_its_time_is_up(budgeted, capsys):
    trainer = stand_in()
    with pytest.raises(SystemExit) as stop:
        budgeted(10.0).on_train_batch_end(trainer, NO_MODULE, None, None, 5)
    assert (stop.value.code, trainer.checkpoint_callbacks[0].steps) == (0, [2])
    assert "time is up: saved at step 2 of 20" in capsys.readouterr().err


def test_run_with_time_left_goes_on(budgeted):
    trainer = stand_in()
    budgeted(9.0).on_train_batch_end(trainer, NO_MODULE, None, None, 5)
    assert trainer.checkpoint_callbacks[0].steps == []
