"""State that is not finite: refused by name at save, load and end; sound files stay."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Lightning, RunYaml

from callbacks.checkpoint.files import checkpoints, read_checkpoint, read_newest, write_checkpoint
from callbacks.checkpoint.recovery import after_non_finite
from lm.finite import NonFiniteError, few, is_finite, non_finite
from lm.optim import lower_rate

WEIGHT = "state_dict.net.model.norm.weight"
MOMENT = "optimizer_states.0.state.1.exp_avg_sq"


def spoil(path: Path, name: str = WEIGHT, value: float = math.nan) -> Path:
    """Put a bad number into a tensor of a checkpoint that was written before."""
    checkpoint = torch.load(path, weights_only=True)
    place: Any = checkpoint
    *sections, last = name.split(".") if name == MOMENT else name.split(".", 1)
    for section in sections:
        place = place[int(section) if section.isdecimal() else section]
    place[last].view(-1)[3] = value
    torch.save(checkpoint, path)
    return path


@pytest.fixture
def run(lightning: Lightning, run_yaml: RunYaml, tmp_path: Path) -> Path:
    """A finished run with the checkpoints of steps 3 (the best), 4 and 6."""
    assert lightning("fit", "--config", run_yaml())[0] == 0
    return tmp_path / "run"


def refused(lightning: Lightning, *argv: object) -> str:
    code, _, err = lightning(*argv)
    assert code != 0
    return err.splitlines()[-1]


def test_names_of_tensors_with_nan_or_infinity_are_found():
    large = torch.full((3,), 3e38)  # finite, and its sum is not
    state = {"a": [torch.tensor([1.0, math.nan])], "b": large, "c": {"d": torch.tensor(-math.inf)}}
    assert list(non_finite(state | {"e": torch.arange(5), "f": math.nan})) == ["a.0", "c.d"]


def test_only_the_first_names_are_listed():
    assert few(["a", "b", "c"], 2) == "a, b and 1 more"
    assert few(["a", "b"], 2) == "a, b"


def test_state_that_is_not_finite_is_not_written(tmp_path):
    state = {"net.w": torch.tensor([1.0, math.inf])}
    best = {"callbacks": {"theirs": {"best_model_score": torch.tensor(math.inf)}}}
    path = tmp_path / "step-00000004.ckpt"
    with pytest.raises(NonFiniteError) as refusal:
        write_checkpoint({"global_step": 4, "state_dict": state} | best, path)
    assert str(refusal.value) == (
        "the state after step 4 is not finite: state_dict.net.w; it is not saved"
    )
    write_checkpoint({"global_step": 4, "state_dict": {}} | best, path)
    assert read_checkpoint(path)["global_step"] == 4


@pytest.mark.parametrize("name", [WEIGHT, MOMENT])
def test_newest_checkpoint_with_a_bad_number_is_passed_over(run, name):
    spoil(run / "checkpoints" / "step-00000006.ckpt", name)
    said: list[str] = []
    assert read_newest(run, said.append)[0].name == "step-00000004.ckpt"
    assert said == [
        f"warning: passed over {run}/checkpoints/step-00000006.ckpt: not finite: {name}"
    ]


def test_checkpoint_with_a_bad_number_is_refused_by_name(lightning, run):
    path = spoil(run / "checkpoints" / "step-00000006.ckpt")
    older = run / "checkpoints" / "step-00000004.ckpt"
    assert refused(lightning, "sample", "--ckpt_path", path, "--prompt", "a") == (
        f"error: {path} cannot be used: not finite: {WEIGHT}; the newest intact one is {older}"
    )
    assert lightning("verify", "--ckpt_path", run)[:2] == (
        1,
        f"{path}: not finite: {WEIGHT}\n{older}: whole\n"
        f"{run}/checkpoints/step-00000003.ckpt: whole\n{run}/weights.safetensors: whole\n",
    )


def test_weights_to_begin_with_must_be_finite(lightning, run, run_yaml, tmp_path):
    path = spoil(run / "checkpoints" / "step-00000006.ckpt")
    moved = path.rename(tmp_path / "moved.ckpt")
    other = {"trainer.default_root_dir": str(tmp_path / "other")}
    config = run_yaml(other | {"model.from_weights": str(moved)})
    assert refused(lightning, "fit", "--config", config) == (
        f"error: {moved} cannot be used: not finite: {WEIGHT}; no intact one is beside it"
    )


def test_run_whose_weights_explode_fails_at_every_start_and_its_advice_works(
    lightning, run_yaml, tmp_path
):
    config = run_yaml({"model.optim.lr": 1e18, "model.optim.warmup": 0, "trainer.max_steps": 8})
    code, _, err = lightning("fit", "--config", config)
    again = lightning("fit", "--config", config)
    error, advice = err.splitlines()[-2:]
    assert (code, again[0], again[2].splitlines()[-2:]) == (1, 1, [error, advice])
    assert error.startswith("error: the run ended at step 8; the last 7 updates were skipped")
    assert not (tmp_path / "run" / "weights.safetensors").exists()
    command = advice.split(": lightning ")[1].split()
    assert lightning(*command)[0] == 0
    assert checkpoints(tmp_path / "run-2")[0][0] == 8


def test_advice_names_the_newest_checkpoint_from_before_the_trouble(tmp_path):
    for step in (10, 20, 30):
        write_checkpoint({"state_dict": {}}, tmp_path / "checkpoints" / f"step-{step:08d}.ckpt")
    go_on = "go on from a checkpoint before that, with a lower learning rate: lightning fit "
    assert after_non_finite(tmp_path, 29, 3e-4, 10) == (
        f"{go_on}--config {tmp_path}/config.yaml --ckpt_path "
        f"{tmp_path}/checkpoints/step-00000020.ckpt --model.optim.lr 0.0001"
    )
    # The update of step 10 itself may have broken the weights.
    assert "another run" in after_non_finite(tmp_path, 11, 3e-4, 10)


@pytest.mark.parametrize(("lr", "lower"), [(3e-3, 1e-3), (1e38, 3e-4)])
def test_lower_rate_is_one_that_can_work(lr, lower):
    assert lower_rate(lr) == pytest.approx(lower)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_one_bad_element_is_found_in_any_type(dtype: torch.dtype, bad: float):
    tensor = torch.full((3, 7), torch.finfo(dtype).max, dtype=dtype)
    assert is_finite(tensor)  # though its sum is not
    tensor[2, 5] = bad
    assert not is_finite(tensor)
    assert not is_finite(tensor.T)
