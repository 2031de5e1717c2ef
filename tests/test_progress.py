"""The console line, the loggers' figures, and ends that are mistakes."""

import io
import math
import re
from types import SimpleNamespace
from typing import Any, cast

import pytest
from lightning.pytorch import Callback

from callbacks.progress import (
    Progress,
    console_line,
    duration,
    refuse_old_name,
    validation_line,
)

METRICS = {
    "train/loss": 2.34567,
    "optim/lr": 3e-4,
    "optim/grad_norm": 0.98765,
    "throughput/tokens_per_sec": 12345.6,
    "time/eta_s": 3900.0,
    "memory/peak_gib": 1.5,
}


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


class Recorder:
    """A logger that keeps what it was given."""

    def __init__(self) -> None:
        self.rows: list[tuple[int, dict[str, float]]] = []
        self.resumed: list[int] = []

    def log_metrics(self, metrics: dict[str, float], step: int) -> None:
        self.rows.append((step, dict(metrics)))

    def resume_at(self, step: int) -> None:
        self.resumed.append(step)


class Stopwatch:
    """A callback with a figure of its own."""

    def step_metrics(self, trainer: Any) -> dict[str, float]:
        return {"time/eta_s": 7.0}


def stand_in(**changes: Any) -> Any:
    """What Progress asks of a Trainer."""
    values = {
        "global_step": 0,
        "max_steps": 20,
        "log_every_n_steps": 5,
        "accumulate_grad_batches": 1,
        "callbacks": [],
        "loggers": [],
        "is_global_zero": True,
        "should_stop": False,
        "state": SimpleNamespace(fn="fit"),
        "default_root_dir": "runs/a",
        "fast_dev_run": 0,
        "datamodule": SimpleNamespace(step_metrics=lambda: {"data/rows_crc32": 77}),
    }
    return SimpleNamespace(**values | changes)


def module(loss: float) -> Any:
    validation = {"val/loss": loss + 1, "val/perplexity": 9.0}
    return SimpleNamespace(step_metrics=lambda: {"train/loss": loss}, validation_metrics=validation)


def end_step(progress: Progress, trainer: Any, step: int, loss: float) -> None:
    trainer.global_step = step
    batch_idx = step * trainer.accumulate_grad_batches - 1
    progress.on_train_batch_end(trainer, module(loss), None, None, batch_idx)


class OldStopwatch(Callback):
    """A callback whose method for metrics has its old name."""

    def step_figures(self, trainer: Any) -> dict[str, float]:
        return {"time/eta_s": 7.0}


def test_old_name_of_the_method_for_metrics_is_refused():
    with pytest.raises(ValueError, match="OldStopwatch") as refusal:
        refuse_old_name([OldStopwatch()])
    assert str(refusal.value) == (
        "trainer.callbacks has OldStopwatch with a method step_figures: the method for metrics is "
        "step_metrics; rename it to step_metrics"
    )


# Lines


def test_console_line_holds_the_figures_in_a_fixed_order():
    assert console_line(40, 2000, METRICS | {"val/loss": 2.5}) == (
        "step   40/2000 · loss 2.3457 · val loss 2.5000 · lr 3.00e-04 · grad norm 0.988 · "
        "12,346 tokens/s · 1 h 05 min left"
    )


def test_console_line_leaves_out_what_is_absent():
    assert console_line(1, 6, {"train/loss": 5.0}) == "step 1/6 · loss 5.0000"


def test_console_line_tells_of_skipped_steps():
    figures = {"train/loss": float("nan"), "optim/skipped_steps": 3}
    assert console_line(4, 6, figures) == "step 4/6 · loss nan · skipped 3"


def test_validation_line_holds_the_validation_metrics():
    figures = {
        "val/loss": 2.0,
        "val/perplexity": 7.389,
        "val/bits_per_byte": 0.9,
        "train/eval_loss": 1.5,
    }
    assert validation_line(figures) == (
        "val loss 2.0000 · perplexity 7.39 · 0.9000 bits per byte · training data in evaluation "
        "mode 1.5000"
    )


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.2, "0 s"),
        (45, "45 s"),
        (59.9, "60 s"),
        (60, "1 min"),
        (719, "12 min"),
        (3599, "1 h 00 min"),
        (11100, "3 h 05 min"),
        (360000, "100 h 00 min"),
    ],
)
def test_duration_is_told_in_the_unit_people_would_use(seconds, text):
    assert duration(seconds) == text


# Console


def test_terminal_line_updates_in_place_and_covers_a_longer_one():
    stream = Terminal()
    progress, trainer = Progress(stream), stand_in()
    end_step(progress, trainer, 5, 10.0)
    end_step(progress, trainer, 10, 9.0)
    assert stream.getvalue() == "\rstep  5/20 · loss 10.0000\rstep 10/20 · loss 9.0000 "


def test_validation_stays_on_the_terminal_under_the_passing_line():
    stream = Terminal()
    progress, trainer = Progress(stream), stand_in()
    end_step(progress, trainer, 5, 2.0)
    progress.on_validation_end(trainer, module(2.0))
    assert stream.getvalue() == (
        "\rstep  5/20 · loss 2.0000\nstep 5 · val loss 3.0000 · perplexity 9.00\n"
    )


def test_elsewhere_each_line_is_plain():
    stream = io.StringIO()
    progress, trainer = Progress(stream), stand_in()
    end_step(progress, trainer, 5, 2.0)
    end_step(progress, trainer, 10, 1.0)
    assert stream.getvalue() == "step  5/20 · loss 2.0000\nstep 10/20 · loss 1.0000\n"


def test_last_validation_loss_stays_in_the_line():
    stream = io.StringIO()
    progress, trainer = Progress(stream), stand_in(global_step=4)
    progress.on_validation_end(trainer, module(2.0))
    end_step(progress, trainer, 5, 1.0)
    assert stream.getvalue().endswith("step  5/20 · loss 1.0000 · val loss 3.0000\n")


def test_evaluation_is_told_at_the_step_of_its_checkpoint():
    stream = io.StringIO()
    progress, trainer = Progress(stream), stand_in(state=SimpleNamespace(fn="validate"))
    progress.on_load_checkpoint(trainer, module(2.0), {"global_step": 15})
    progress.on_validation_end(trainer, module(2.0))
    assert stream.getvalue() == "step 15 · val loss 3.0000 · perplexity 9.00\n"


WITHOUT = (
    "no sample of the validation has a target, so there is no validation loss; raise "
    "trainer.limit_val_batches or prepare other validation data"
)


def test_validation_without_a_target_is_one_warning_in_a_run():
    stream = io.StringIO()
    progress, trainer = Progress(stream), stand_in(global_step=4)
    progress.on_validation_end(trainer, cast(Any, SimpleNamespace(validation_metrics={})))
    end_step(progress, trainer, 5, 1.0)
    assert stream.getvalue() == f"warning: step 4: {WITHOUT}\nstep  5/20 · loss 1.0000\n"


def test_evaluation_without_a_target_is_an_error():
    progress, trainer = Progress(io.StringIO()), stand_in(state=SimpleNamespace(fn="validate"))
    with pytest.raises(RuntimeError, match=re.escape(WITHOUT)):
        progress.on_validation_end(trainer, cast(Any, SimpleNamespace(validation_metrics={})))


@pytest.mark.parametrize(
    ("perplexity", "text"),
    [(9.99e8, "999000000.00"), (math.exp(690), "4.6e+299"), (math.inf, "inf")],
)
def test_perplexity_of_a_loss_that_ran_away_stays_short(perplexity: float, text: str):
    figures = {"val/loss": 2.0, "val/perplexity": perplexity}
    assert validation_line(figures) == f"val loss 2.0000 · perplexity {text}"


@pytest.mark.parametrize("error", [RuntimeError(), KeyboardInterrupt()])
def test_error_text_starts_on_a_line_of_its_own(error):
    stream = Terminal()
    progress, trainer = Progress(stream), stand_in()
    end_step(progress, trainer, 5, 2.0)
    progress.on_exception(trainer, module(2.0), error)
    assert stream.getvalue() == "\rstep  5/20 · loss 2.0000\n"


def test_only_the_first_process_writes_to_the_console():
    stream = io.StringIO()
    progress, trainer = Progress(stream), stand_in(is_global_zero=False)
    end_step(progress, trainer, 5, 2.0)
    progress.on_validation_end(trainer, module(2.0))
    assert stream.getvalue() == ""


# Logging


@pytest.mark.parametrize(
    ("step", "logged"), [(1, True), (4, False), (5, True), (12, False), (13, True)]
)
def test_first_every_nth_and_last_step_are_logged(step, logged):
    recorder = Recorder()
    progress = Progress(io.StringIO())
    end_step(progress, stand_in(max_steps=13, loggers=[recorder]), step, 2.0)
    assert recorder.rows == [(step, {"train/loss": 2.0})] * logged


def test_micro_batch_inside_a_step_logs_nothing():
    recorder = Recorder()
    trainer = stand_in(global_step=5, accumulate_grad_batches=3, loggers=[recorder])
    Progress(io.StringIO()).on_train_batch_end(trainer, module(2.0), None, None, 15)
    assert recorder.rows == []


def test_figures_of_other_callbacks_join_the_row():
    recorder = Recorder()
    trainer = stand_in(loggers=[recorder], callbacks=[Stopwatch(), object()])
    end_step(Progress(io.StringIO()), trainer, 5, 2.0)
    assert recorder.rows == [(5, {"train/loss": 2.0, "time/eta_s": 7.0})]


@pytest.mark.parametrize(("command", "n_rows"), [("fit", 1), ("validate", 0)])
def test_validation_is_logged_only_within_a_fit(command, n_rows):
    recorder = Recorder()
    trainer = stand_in(loggers=[recorder], state=SimpleNamespace(fn=command))
    Progress(io.StringIO()).on_validation_end(trainer, module(2.0))
    assert len(recorder.rows) == n_rows


def test_loggers_are_told_where_the_run_resumes():
    recorder = Recorder()
    trainer = stand_in(global_step=6, loggers=[recorder, object()])
    Progress(io.StringIO()).on_train_start(trainer, module(2.0))
    assert recorder.resumed == [6]


# Ends


@pytest.mark.parametrize(
    ("end", "text"),
    [
        (20, "done: 20 steps in runs/a\n"),
        (9, "stopped at step 9 of 20; the same command goes on\n"),
    ],
)
def test_end_of_training_is_told_in_one_line(end, text):
    stream = io.StringIO()
    progress, trainer = Progress(stream), stand_in(global_step=6)
    progress.on_train_start(trainer, module(2.0))
    trainer.global_step = end
    progress.on_fit_end(trainer, module(2.0))
    assert stream.getvalue() == text


def test_first_start_says_where():
    stream = io.StringIO()
    Progress(stream).on_train_start(stand_in(global_step=0), module(2.0))
    assert stream.getvalue() == "starting at step 0 in runs/a\n"


def test_run_that_was_finished_before_says_so():
    stream = io.StringIO()
    Progress(stream).on_fit_end(stand_in(global_step=20), module(2.0))
    assert stream.getvalue() == "finished at step 20 of 20\n"


def test_run_that_is_past_its_end_says_so():
    stream = io.StringIO()
    Progress(stream).on_fit_end(stand_in(global_step=21), module(2.0))
    assert stream.getvalue() == (
        "the run is at step 21, past its last step 20: nothing is left to train and no file is "
        "changed; raise trainer.max_steps to go on\n"
    )


def test_data_that_ends_before_the_run_is_an_error():
    trainer = stand_in(global_step=12)
    with pytest.raises(RuntimeError, match=r"^the data ended at step 12 of 20$"):
        Progress(io.StringIO()).on_train_epoch_end(trainer, module(2.0))


@pytest.mark.parametrize("changes", [{"global_step": 20}, {"global_step": 3, "should_stop": True}])
def test_epoch_that_ends_with_the_run_or_a_stop_is_none(changes):
    Progress(io.StringIO()).on_train_epoch_end(stand_in(**changes), module(2.0))
