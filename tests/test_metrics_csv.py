"""metrics.csv and the TensorBoard stream: each step once, over kills and resumes."""

import csv
import errno
import os
import time
from pathlib import Path
from typing import Any

import pytest
from conftest import full_disk, page

from callbacks.loggers.metrics_csv import MetricsCSV
from callbacks.loggers.tensorboard import SeamlessTensorBoard


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


@pytest.mark.parametrize("later", [{"loss": 4.5}, {"loss": 4.5, "lr": 0.1}])
def test_rows_that_find_no_room_are_written_when_there_is_some(tmp_path, capsys, later):
    logger = MetricsCSV(tmp_path)
    log_steps(logger, range(1, 2))
    with full_disk(logger.path.stat().st_size + 2):
        log_steps(logger, range(2, 4))
    assert capsys.readouterr().err == (
        f"warning: metrics.csv cannot be written: [Errno 27] File too large: '{logger.path}'; the "
        "run goes on, and its rows wait in memory until that is mended\n"
    )
    logger.log_metrics(later, 4)
    logger.finalize("success")
    assert [line.split(",")[:2] for line in content(tmp_path).splitlines()[1:]] == [
        ["1", "1.5"], ["2", "2.5"], ["3", "3.5"], ["4", "4.5"],
    ]  # fmt: skip


def test_the_newest_rows_wait_and_the_others_are_counted(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("callbacks.loggers.metrics_csv.MOST_ROWS", 3)
    logger = MetricsCSV(tmp_path)
    with full_disk(3):
        log_steps(logger, range(1, 8))
    logger.finalize("success")
    assert [line.split(",")[0] for line in content(tmp_path).splitlines()] == [
        *("step", "5", "6", "7")
    ]
    assert capsys.readouterr().err.splitlines()[-1] == (
        f"warning: 4 rows are missing in {logger.path}"
    )


def test_rows_that_never_find_room_are_counted_at_the_end(tmp_path, capsys):
    logger = MetricsCSV(tmp_path)
    with full_disk(3):
        log_steps(logger, range(1, 4))
        logger.finalize("success")
    assert capsys.readouterr().err.splitlines()[1:] == [
        f"warning: 3 rows are missing in {logger.path}"
    ]


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


# Files that another program changed

ROWS = "step,loss,val/loss\n1,1.5,\n2,2.5,0.25\n"
NO_STEP = "line 1: no column is called step in "
POINTS = "step,loss\n1.0,1.5\n2.0,2.5\n"
SPREADSHEETS = {
    "semicolons": (ROWS.replace(",", ";"), NO_STEP + "'step;loss;val/loss'"),
    "tabs": (ROWS.replace(",", "\t"), NO_STEP + r"'step\tloss\tval/loss'"),
    "no header": (ROWS.partition("\n")[2], NO_STEP + "'1,1.5,'"),
    "title": ("my run\n" + ROWS, NO_STEP + "'my run'"),
    "renamed step": (ROWS.replace("step", "Step"), NO_STEP + "'Step,loss,val/loss'"),
    "steps with a point": (POINTS, "line 2: step is '1.0', no whole number"),
    "decimal commas": ('step,loss\n1,"1,5"\n2,"2,5"\n', "line 2: loss is '1,5', no number"),
    "one name twice": (ROWS.replace("val/loss", "loss"), "line 1: two columns have one name"),
    "emptied": ("", "it has no row"),
    "rows deleted": ("step,loss\n", "it has no row"),
    "open quote": ('step,"loss\n1,1.5\n', "line 2: unexpected end of data"),
}


def aside(root: Path) -> Path:
    return root / "metrics.csv.set-aside"


@pytest.mark.parametrize(("text", "fault"), SPREADSHEETS.values(), ids=SPREADSHEETS)
def test_file_of_another_program_is_set_aside_and_the_run_goes_on(tmp_path, capsys, text, fault):
    path = tmp_path / "metrics.csv"
    path.write_text(text, encoding="utf-8", newline="")
    resumed = MetricsCSV(tmp_path)
    resumed.resume_at(2)
    log_steps(resumed, range(3, 4))
    assert capsys.readouterr().err == (
        f"warning: {path} is not as a run leaves it ({fault}): set aside as {aside(tmp_path)}; 0 "
        "rows of it go on in a new one\n"
    )
    assert aside(tmp_path).read_bytes() == text.encode()
    assert content(tmp_path) == "step,loss\n3,3.5\n"


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        (ROWS + "# good so far\n", "line 4: 1 values for 3 columns"),
        ("step,loss,val/loss\n# warm-up\n1,1.5,\n2,2.5,0.25\n", "line 2: 1 values for 3 columns"),
        (ROWS + "\n", "line 4: 0 values for 3 columns"),
        (ROWS + "2,7.5,\n", "line 4: step 2 is there twice"),
        (ROWS + "3,3.5,#NAME?\n", "line 4: val/loss is '#NAME?', no number"),
        (ROWS + "3,3.5,", "its last line has no end"),
    ],
    ids=["note behind", "note inside", "empty line", "row twice", "no number", "no last line end"],
)
def test_rows_beside_a_line_that_is_none_go_on(tmp_path, capsys, text, fault):
    (tmp_path / "metrics.csv").write_text(text, encoding="utf-8", newline="")
    resumed = MetricsCSV(tmp_path)
    resumed.resume_at(4)
    assert f"({fault}): set aside" in capsys.readouterr().err
    assert content(tmp_path) == ROWS
    assert aside(tmp_path).read_text(encoding="utf-8") == text


@pytest.mark.parametrize(
    "content_now",
    [
        ("\ufeff" + ROWS).encode(),
        ROWS.replace("\n", "\r\n").encode(),
        ROWS.replace("\n", "\r").encode(),
        b'"step","loss","val/loss"\n"1","1.5",\n"2","2.5","0.25"\n',
        b"step,loss,val/loss\n2,2.5,0.25\n1,1.5,\n",
    ],
    ids=["byte order mark", "CRLF", "CR", "quotes", "newest first"],
)
def test_other_ways_to_write_the_same_rows_lose_none(tmp_path, capsys, content_now):
    (tmp_path / "metrics.csv").write_bytes(content_now)
    resumed = MetricsCSV(tmp_path)
    resumed.resume_at(2)
    assert (content(tmp_path), capsys.readouterr().err) == (ROWS, "")


def test_columns_in_another_order_keep_it(tmp_path):
    (tmp_path / "metrics.csv").write_text("loss,step\n1.5,1\n", encoding="utf-8")
    resumed = MetricsCSV(tmp_path)
    resumed.resume_at(1)
    log_steps(resumed, range(2, 3))
    assert content(tmp_path) == "loss,step\n1.5,1\n2.5,2\n"


@pytest.mark.parametrize(
    "content_now", ["step,loss\n1,1.5\n".encode("utf-16"), b"step,\xe4\n1,1.5\n"]
)
def test_file_in_another_encoding_is_set_aside(tmp_path, capsys, content_now):
    (tmp_path / "metrics.csv").write_bytes(content_now)
    MetricsCSV(tmp_path).resume_at(2)
    assert "codec can't decode byte" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.csv.set-aside"]


@pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo], ids=["folder", "pipe"])
def test_what_is_no_file_is_set_aside(tmp_path, capsys, make):
    make(tmp_path / "metrics.csv")
    aside(tmp_path).touch()  # an earlier one, which stays
    logger = MetricsCSV(tmp_path)
    logger.resume_at(2)
    log_steps(logger, range(3, 4))
    assert "(it is no file): set aside as" in capsys.readouterr().err
    names = ["metrics.csv", "metrics.csv.set-aside", "metrics.csv.set-aside-1"]
    assert sorted(path.name for path in tmp_path.iterdir()) == names


@pytest.mark.parametrize(
    ("text", "now"),
    [
        ("step;loss\n1;1.5\n2;2.5\n", "step,loss\n3,3.5\n"),
        ("loss,step\n1.5,1\n2.5,2\n", "loss,step\n1.5,1\n2.5,2\n3.5,3\n"),
        ("step,loss\r\n1,1.5\r\n", "step,loss\n1,1.5\n3,3.5\n"),
        ("step,loss\n1,1.5\n9,9.5\n", "step,loss\n1,1.5\n3,3.5\n"),
        ("", "step,loss\n3,3.5\n"),
    ],
    ids=["semicolons", "other order", "CRLF", "later rows", "emptied"],
)
def test_file_changed_while_the_run_goes_on_is_read_again(tmp_path, text, now):
    logger = MetricsCSV(tmp_path)
    log_steps(logger, range(1, 3))
    logger.path.write_text(text, encoding="utf-8", newline="")
    log_steps(logger, range(3, 4))
    assert content(tmp_path) == now


def test_file_removed_while_the_run_goes_on_is_begun_anew(tmp_path):
    logger = MetricsCSV(tmp_path)
    log_steps(logger, range(1, 3))
    logger.path.unlink()
    log_steps(logger, range(3, 5))
    assert content(tmp_path) == "step,loss\n3,3.5\n4,4.5\n"


def test_resume_leaves_a_file_that_is_right_untouched(tmp_path):
    log_steps(MetricsCSV(tmp_path), range(1, 3))
    before = (tmp_path / "metrics.csv").stat()
    MetricsCSV(tmp_path).resume_at(2)
    after = (tmp_path / "metrics.csv").stat()
    assert (before.st_ino, before.st_mtime_ns) == (after.st_ino, after.st_mtime_ns)


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
