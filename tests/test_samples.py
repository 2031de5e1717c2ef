"""Samples along the way: they show the model and disturb nothing."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import Lightning, RunYaml, page
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from callbacks.drill.drill import compare
from callbacks.samples import PromptSamples

SAMPLES = {
    "samples.prompts": ["def alpha(", ""],
    "samples.every_n_steps": 2,
    "samples.max_new_tokens": 5,
}


def text(events: EventAccumulator, tag: str, place: int) -> str:
    return events.Tensors(f"{tag}/text_summary")[place].tensor_proto.string_val[0].decode("utf-8")


def test_each_prompt_is_continued_at_each_interval(
    lightning: Lightning, run_yaml: RunYaml, tmp_path: Path
):
    code, _, err = lightning("fit", "--config", run_yaml(SAMPLES))
    assert code == 0, err
    events = page(tmp_path / "run")
    steps = [event.step for event in events.Tensors("samples/def alpha(/text_summary")]
    assert steps == [2, 4, 6]
    assert text(events, "samples/def alpha(", 0).startswith("    def alpha(")


def test_samples_change_no_bit_of_the_run(lightning: Lightning, run_yaml: RunYaml, tmp_path: Path):
    other = {"trainer.default_root_dir": str(tmp_path / "other"), "model.config.dropout": 0.1}
    lightning("fit", "--config", run_yaml(SAMPLES | {"model.config.dropout": 0.1}))
    lightning("fit", "--config", run_yaml(other))
    assert compare(tmp_path / "run", tmp_path / "other") == []


def test_run_without_prompts_writes_none(lightning: Lightning, run_yaml: RunYaml, tmp_path: Path):
    lightning("fit", "--config", run_yaml({"samples.every_n_steps": 2}))
    assert not [tag for tag in page(tmp_path / "run").Tags()["tensors"] if "samples" in tag]


@pytest.mark.slow
def test_compiled_run_samples_without_compiling_for_each_length(run_yaml: RunYaml):
    config = run_yaml(SAMPLES | {"model.compile": True, "samples.max_new_tokens": 30})
    program = Path(sys.executable).with_name("lightning")
    environment = os.environ | {"TORCH_LOGS": "recompiles"}
    run = subprocess.run(
        [program, "fit", "--config", config],
        env=environment, capture_output=True, text=True, check=True,
    )  # fmt: skip
    # Training and validation; thirty lengths would be far more.
    assert run.stderr.count("Recompiling function") <= 4


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"every_n_steps": 0}, "samples.every_n_steps is 0: must be at least 1"),
        ({"max_new_tokens": 0}, "samples.max_new_tokens is 0: must be at least 1"),
        ({"temperature": -1.0}, "samples.temperature is -1.0: must be 0 or above"),
    ],
)
def test_setting_out_of_range_is_refused(options: dict, text: str):
    with pytest.raises(ValueError, match="samples") as refusal:
        PromptSamples(**options)
    assert str(refusal.value) == text
