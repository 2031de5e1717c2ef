"""TensorBoard's page: laid out once, whatever kills the run."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from conftest import Lightning, RunYaml, page
from tensorboard.backend.event_processing.plugin_event_accumulator import (
    EventAccumulator as ServerAccumulator,  # what the page is served from
)

from callbacks.tensorboard import LAYOUT, SeamlessTensorBoard


def raising(error: Exception) -> Callable[..., None]:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise error

    return fail


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


def test_stream_that_breaks_has_a_gap_and_goes_on(tmp_path: Path, capsys, monkeypatch):
    logger = SeamlessTensorBoard(tmp_path)
    logger.resume_at(0)
    logger.log_metrics({"loss": 1.5}, 1)
    logger.save()
    broken = OSError(28, "No space left on device")
    with monkeypatch.context() as patch:
        patch.setattr(type(logger.experiment), "add_scalar", raising(broken))
        for step in (2, 3):
            logger.log_metrics({"loss": 0.5}, step)
    logger.log_metrics({"loss": 4.5}, 4)
    logger.finalize("success")
    assert capsys.readouterr().err.count("warning: the curves in") == 1
    assert [event.step for event in page(tmp_path).Scalars("loss")] == [1, 4]
