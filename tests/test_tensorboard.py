"""TensorBoard's page: laid out once, whatever kills the run."""

import threading
from pathlib import Path

import pytest
from conftest import Lightning, RunYaml, full_disk, page
from tensorboard.backend.event_processing.plugin_event_accumulator import (
    EventAccumulator as ServerAccumulator,  # what the page is served from
)

from callbacks.loggers.tensorboard import LAYOUT, SeamlessTensorBoard


def test_page_of_a_run_has_plan_layout_and_settings(
    lightning: Lightning, run_yaml: RunYaml, tmp_path: Path
):
    code, _, err = lightning("fit", "--config", run_yaml({"trainer.gradient_clip_val": 1.0}))
    assert code == 0, err
    tags = page(tmp_path / "run").Tags()["tensors"]
    [plan] = page(tmp_path / "run").Tensors("plan/text_summary")
    assert b"learning rate     warm-up of" in plan.tensor_proto.string_val[0]
    assert "custom_scalars__config__" in tags
    plugins = page(tmp_path / "run").summary_metadata
    assert "_hparams_/experiment" in plugins


def test_layout_names_figures_that_a_run_logs(
    lightning: Lightning, run_yaml: RunYaml, tmp_path: Path
):
    lightning("fit", "--config", run_yaml({"trainer.gradient_clip_val": 1.0}))
    shown = {tag for _, tags in LAYOUT["run"].values() for tag in tags}
    assert shown <= set(page(tmp_path / "run").Tags()["scalars"])


def test_settings_add_no_point_to_a_curve(tmp_path: Path):
    logger = SeamlessTensorBoard(tmp_path)
    logger.resume_at(0)
    logger.log_hyperparams({"model.optim.lr": 0.1, "model.optim.betas": [0.9, 0.95]})
    logger.finalize("success")
    assert page(tmp_path).Tags()["scalars"] == []


def test_start_over_at_step_0_shows_its_texts_once(tmp_path: Path):
    for _ in range(2):
        logger = SeamlessTensorBoard(tmp_path, lambda: "a plan\nof two lines")
        logger.resume_at(0)
        logger.finalize("success")
    shown = ServerAccumulator(str(tmp_path / "tensorboard")).Reload()
    [text] = shown.Tensors("plan/text_summary")
    assert text.tensor_proto.string_val[0] == b"    a plan\n    of two lines"


def test_events_that_wait_are_bounded_and_a_gap_is_told(tmp_path: Path, capsys, monkeypatch):
    monkeypatch.setattr("callbacks.loggers.event_file.MOST_BYTES", 1_000)
    logger = SeamlessTensorBoard(tmp_path)
    logger.resume_at(1)
    with full_disk(5):
        for step in range(2, 99):
            logger.log_metrics({"loss": 1.5}, step)
            logger.save()
    logger.finalize("success")
    assert 0 < len(page(tmp_path).Scalars("loss")) < 30
    told = f"warning: the curves in {tmp_path / 'tensorboard'} have gaps"
    assert capsys.readouterr().err.splitlines()[-1] == told


def test_figures_that_find_no_room_are_on_the_page_when_there_is_some(tmp_path: Path, capsys):
    logger = SeamlessTensorBoard(tmp_path)
    logger.resume_at(0)
    logger.log_metrics({"loss": 1.5}, 1)
    logger.save()
    [path] = (tmp_path / "tensorboard").iterdir()
    with full_disk(path.stat().st_size + 5):
        for step in (2, 3):
            logger.log_metrics({"loss": step}, step)
            logger.save()
    assert capsys.readouterr().err == (
        f"warning: TensorBoard's figures cannot be written: [Errno 27] File too large: '{path}'; "
        "the run goes on, and they wait in memory until that is mended\n"
    )
    logger.log_metrics({"loss": 4.5}, 4)
    logger.finalize("success")
    shown = [(event.step, event.value) for event in page(tmp_path).Scalars("loss")]
    assert shown == [(1, 1.5), (2, 2), (3, 3), (4, 4.5)]


def test_figures_that_never_find_room_are_told_at_the_end(tmp_path: Path, capsys):
    (tmp_path / "root").touch()  # so that no folder can be made there
    logger = SeamlessTensorBoard(tmp_path / "root")
    logger.resume_at(3)
    logger.log_metrics({"loss": 1.5}, 4)
    logger.finalize("success")
    lines = capsys.readouterr().err.splitlines()
    assert [line.partition(":")[2].partition(":")[0] for line in lines] == [
        " TensorBoard's figures cannot be written",
        f" the curves in {tmp_path / 'root' / 'tensorboard'} end early",
    ]


def test_file_in_the_place_of_the_folder_is_set_aside(tmp_path: Path, capsys):
    (tmp_path / "tensorboard").write_text("notes", encoding="utf-8")
    logger = SeamlessTensorBoard(tmp_path)
    logger.resume_at(3)
    logger.log_metrics({"loss": 1.5}, 4)
    logger.finalize("success")
    assert "is no folder: set aside as" in capsys.readouterr().err
    assert [event.step for event in page(tmp_path).Scalars("loss")] == [4]


def test_other_files_in_the_folder_are_left_alone(tmp_path: Path):
    folder = tmp_path / "tensorboard"
    folder.mkdir()
    for name in ("events.out.tfevents.notes", "events.out.tfevents.", "hparams.yaml"):
        (folder / name).touch()
    SeamlessTensorBoard(tmp_path).resume_at(3)
    assert len(list(folder.iterdir())) == 3


@pytest.mark.parametrize("name", ["two words", "line\nbreak", "λ", "$HOME", "~", "a::b", "%s"])
def test_folder_of_any_name_has_its_own_curves(tmp_path: Path, name: str):
    logger = SeamlessTensorBoard(tmp_path / name)
    logger.resume_at(0)
    logger.log_metrics({"loss": 1.5}, 1)
    logger.finalize("success")
    assert [event.step for event in page(tmp_path / name).Scalars("loss")] == [1]
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_events_leave_no_thread_behind(tmp_path: Path):
    before = threading.active_count()
    logger = SeamlessTensorBoard(tmp_path)
    logger.resume_at(0)
    logger.log_metrics({"loss": 1.5}, 1)
    assert threading.active_count() == before
