"""metrics.csv and the TensorBoard stream: each step once, over kills and resumes."""

import csv
import errno
import time
from pathlib import Path
from typing import Any

import pytest
from conftest import page

from callbacks.metrics_csv import MetricsCSV
from callbacks.tensorboard import SeamlessTensorBoard


def log_steps(logger: MetricsCSV | SeamlessTensorBoard, steps: range, loss: float = 0.5) -> None:
    for step in steps:
        logger.log_metrics({"loss": loss + step}, step)
    logger.save()


def content(root: Path) -> str:
    return (root / "metrics.csv").read_text(encoding="utf-8")


# metrics.csv


def test_figures_of_one_step_share_a_row(tmp_path):
    logger = MetricsCSV(tmp_path)
    logger.log_metrics({"loss": 2.5}, 1)
    logger.log_metrics({"val/loss": 3.5}, 1)
    logger.save()
    assert content(tmp_path) == "step,loss,val/loss\n1,2.5,3.5\n"


def test_row_is_on_disk_once_a_later_step_is_logged(tmp_path):
    logger = MetricsCSV(tmp_path)
    logger.log_metrics({"loss": 2.5}, 1)
    assert not logger.path.exists()
    logger.log_metrics({"loss": 1.5}, 2)
    assert content(tmp_path) == "step,loss\n1,2.5\n"


def test_end_of_a_run_puts_the_last_row_on_disk(tmp_path):
    logger = MetricsCSV(tmp_path)
    logger.log_metrics({"loss": 2.5}, 1)
    logger.finalize("success")
    logger.finalize("success")
    assert content(tmp_path) == "step,loss\n1,2.5\n"


def test_new_figure_adds_a_column_and_leaves_it_empty_before(tmp_path):
    logger = MetricsCSV(tmp_path)
    log_steps(logger, range(1, 3))
    logger.log_metrics({"loss": 3.5, "val/loss": 4.0}, 3)
    logger.save()
    assert content(tmp_path) == "step,loss,val/loss\n1,1.5,\n2,2.5,\n3,3.5,4.0\n"


def test_absent_figure_leaves_its_column_empty(tmp_path):
    logger = MetricsCSV(tmp_path)
    logger.log_metrics({"loss": 1.5, "lr": 0.1}, 1)
    logger.log_metrics({"lr": 0.2}, 2)
    logger.save()
    assert content(tmp_path) == "step,loss,lr\n1,1.5,0.1\n2,,0.2\n"


def test_resume_drops_the_rows_past_its_step_and_goes_on_under_one_header(tmp_path):
    log_steps(MetricsCSV(tmp_path), range(1, 6))
    resumed = MetricsCSV(tmp_path)
    resumed.resume_at(3)
    log_steps(resumed, range(4, 6), loss=0.25)
    assert content(tmp_path) == "step,loss\n1,1.5\n2,2.5\n3,3.5\n4,4.25\n5,5.25\n"


def test_row_not_yet_on_disk_is_forgotten_by_a_resume(tmp_path):
    logger = MetricsCSV(tmp_path)
    logger.log_metrics({"loss": 9.5}, 9)
    logger.resume_at(0)
    log_steps(logger, range(1, 2))
    assert content(tmp_path) == "step,loss\n1,1.5\n"


@pytest.mark.parametrize("torn", ["3", "3,", "3,2.", "30,0.1", ","])
def test_torn_last_line_is_dropped_by_a_resume(tmp_path, torn):
    log_steps(MetricsCSV(tmp_path), range(1, 3))
    with (tmp_path / "metrics.csv").open("a", encoding="utf-8") as file:
        file.write(torn)
    resumed = MetricsCSV(tmp_path)
    resumed.resume_at(40)
    log_steps(resumed, range(3, 4))
    assert content(tmp_path) == "step,loss\n1,1.5\n2,2.5\n3,3.5\n"


@pytest.mark.parametrize("text", ["", "st", "step,loss", "step,loss\n"])
def test_file_without_a_whole_row_is_started_anew(tmp_path, text):
    (tmp_path / "metrics.csv").write_text(text, encoding="utf-8")
    resumed = MetricsCSV(tmp_path)
    resumed.resume_at(5)
    log_steps(resumed, range(6, 7))
    assert content(tmp_path) == "step,loss\n6,6.5\n"


def test_resumed_run_keeps_the_columns_of_the_file(tmp_path):
    first = MetricsCSV(tmp_path)
    first.log_metrics({"loss": 1.5, "val/loss": 2.5}, 1)
    first.save()
    resumed = MetricsCSV(tmp_path)
    resumed.resume_at(1)
    log_steps(resumed, range(2, 3))
    assert content(tmp_path) == "step,loss,val/loss\n1,1.5,2.5\n2,2.5,\n"


@pytest.mark.parametrize(
    ("figures", "text"),
    [
        ({"val/loss": 7.5}, "step,loss,val/loss\n1,1.5,\n2,2.5,7.5\n3,3.5,\n"),
        ({"loss": 7.5}, "step,loss\n1,1.5\n2,7.5\n3,3.5\n"),
        ({"loss": 7.5, "lr": 0.1}, "step,loss,lr\n1,1.5,\n2,7.5,0.1\n3,3.5,\n"),
    ],
)
def test_figures_logged_again_for_the_last_step_on_disk_join_its_row(tmp_path, figures, text):
    log_steps(MetricsCSV(tmp_path), range(1, 4))
    resumed = MetricsCSV(tmp_path)
    resumed.resume_at(2)
    resumed.log_metrics(figures, 2)
    log_steps(resumed, range(3, 4))
    assert content(tmp_path) == text


def test_figures_logged_after_their_row_was_saved_join_it(tmp_path):
    logger = MetricsCSV(tmp_path)
    log_steps(logger, range(1, 3))
    logger.log_metrics({"val/loss": 7.5}, 2)
    log_steps(logger, range(3, 4))
    assert content(tmp_path) == "step,loss,val/loss\n1,1.5,\n2,2.5,7.5\n3,3.5,\n"


@pytest.mark.parametrize("later", [{"loss": 3.5}, {"loss": 3.5, "lr": 0.1}])
def test_rows_that_find_no_room_are_written_when_there_is_some(tmp_path, capsys, later):
    logger = MetricsCSV(tmp_path)
    log_steps(logger, range(1, 2))
    logger.path.rename(tmp_path / "aside")
    logger.path.mkdir()  # nothing can be written under that name
    log_steps(logger, range(2, 3))
    assert f"warning: 1 rows not written to {logger.path} yet: " in capsys.readouterr().err
    logger.path.rmdir()
    (tmp_path / "aside").rename(logger.path)
    logger.log_metrics(later, 3)
    logger.finalize("success")
    assert [line.split(",")[:2] for line in content(tmp_path).splitlines()[1:]] == [
        ["1", "1.5"], ["2", "2.5"], ["3", "3.5"],
    ]  # fmt: skip


def test_half_a_row_on_a_full_disk_is_taken_back(tmp_path, monkeypatch):
    class Half(csv.DictWriter):
        def writerow(self, rowdict: Any) -> Any:
            self.writer.writerow(["2", ""])
            raise OSError(errno.ENOSPC, "No space left on device")

    logger = MetricsCSV(tmp_path)
    log_steps(logger, range(1, 2))
    with monkeypatch.context() as patch:
        patch.setattr(csv, "DictWriter", Half)
        log_steps(logger, range(2, 3))
    assert content(tmp_path) == "step,loss\n1,1.5\n"
    logger.finalize("success")
    assert content(tmp_path) == "step,loss\n1,1.5\n2,2.5\n"


def test_hyperparameters_leave_no_file(tmp_path):
    logger = MetricsCSV(tmp_path)
    logger.log_hyperparams({"lr": 0.1})
    logger.save()
    assert (logger.name, logger.version, list(tmp_path.iterdir())) == ("csv", "", [])


# TensorBoard


def scalars(root: Path) -> list[tuple[int, float]]:
    """Steps and values as the page shows them."""
    return [(event.step, event.value) for event in page(root).Scalars("loss")]


def started_tensorboard(root: Path, step: int) -> SeamlessTensorBoard:
    logger = SeamlessTensorBoard(root)
    logger.resume_at(step)
    return logger


def test_page_shows_each_step_once_after_a_resume(tmp_path):
    first = started_tensorboard(tmp_path, 0)
    log_steps(first, range(1, 6))
    resumed = started_tensorboard(tmp_path, 3)
    log_steps(resumed, range(4, 7), loss=0.25)
    first.finalize("failed")
    resumed.finalize("success")
    expected = [(1, 1.5), (2, 2.5), (3, 3.5), (4, 4.25), (5, 5.25), (6, 6.25)]
    assert scalars(tmp_path) == expected


@pytest.mark.parametrize(
    ("clocks", "expected"),
    [
        ((9000, 1000), [1.0, 2.25, 3.25, 4.25]),
        ((9000, 9007, 1000), [1.0, 2.25, 3.5, 4.5, 5.5]),
        ((1000, 9000, 1007), [1.0, 2.25, 3.5, 4.5, 5.5]),
        ((9000, 9000), [1.0, 2.25, 3.25, 4.25]),
    ],
    ids=["set back", "set back after two starts", "ahead in one start", "two starts in a second"],
)
def test_page_shows_each_step_once_whatever_the_clock_does(tmp_path, monkeypatch, clocks, expected):
    for start, seconds in enumerate(clocks):
        monkeypatch.setattr(time, "time", lambda now=1.7e9 + seconds: now)
        logger = started_tensorboard(tmp_path, start)
        log_steps(logger, range(start + 1, start + 4), loss=start / 4)
        logger.finalize("success")
    assert scalars(tmp_path) == list(enumerate(expected, 1))


def test_no_event_file_is_made_before_the_position_is_known(tmp_path):
    logger = SeamlessTensorBoard(tmp_path)
    assert logger.experiment is None
    logger.save()
    assert list(tmp_path.rglob("events*")) == []


def test_saved_figures_are_readable_while_the_run_goes_on(tmp_path):
    logger = started_tensorboard(tmp_path, 0)
    log_steps(logger, range(1, 3))
    shown = scalars(tmp_path)
    logger.finalize("success")
    assert shown == [(1, 1.5), (2, 2.5)]
