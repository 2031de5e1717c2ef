"""Callbacks of users: their state survives or is refused by name; averages stay averages."""

from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import Lightning, RunYaml
from user_callbacks import RICH, Rich

from callbacks.checkpoint.files import checkpoints, read_checkpoint
from callbacks.checkpoint.state import original, plain


def callback(name: str, **options: Any) -> dict[str, Any]:
    return {"trainer.callbacks": [{"class_path": f"user_callbacks.{name}", "init_args": options}]}


def same(left: Any, right: Any) -> bool:
    if isinstance(left, np.ndarray):
        return left.dtype == right.dtype and np.array_equal(left, right)
    return type(left) is type(right) and left == right


def test_state_of_numpy_and_the_standard_library_comes_back_with_its_types(
    lightning: Lightning, run_yaml: RunYaml, tmp_path: Path
):
    assert lightning("fit", "--config", run_yaml(callback("Rich")))[0] == 0
    stored = torch.load(checkpoints(tmp_path / "run")[0][1], weights_only=True)
    longer = run_yaml(callback("Rich") | {"trainer.max_steps": 8})
    assert lightning("fit", "--config", longer)[0] == 0
    loaded = Rich.loaded.pop()
    assert "Rich" in stored["callbacks"]
    assert [name for name in RICH if not same(RICH[name], loaded[name])] == []
    assert loaded["window"].maxlen == 4
    assert loaded["lists"].default_factory is list


@pytest.mark.parametrize(("from_step", "kept"), [(0, []), (4, [3, 2])])
def test_state_that_only_foreign_code_could_make_again_is_refused_by_name(
    lightning: Lightning, run_yaml: RunYaml, tmp_path: Path, from_step: int, kept: list[int]
):
    config = run_yaml(callback("WithEnum", from_step=from_step))
    code, _, err = lightning("fit", "--config", config)
    assert (code, [step for step, _ in checkpoints(tmp_path / "run")]) == (2, kept)
    assert err.splitlines()[-1] == (
        "error: a checkpoint cannot hold callbacks.WithEnum.phase, which is of type "
        "user_callbacks.Phase: only tensors, numbers, text, lists, dicts, numpy arrays, paths, "
        "deques and dates are read back without running code; return one of these from "
        "state_dict() (for an enum its value)"
    )


ITSELF: list[Any] = []
ITSELF.append(ITSELF)


@pytest.mark.parametrize(
    "value",
    [
        *(np.array([object()]), {"a": [lambda: None]}, np.ma.array([1])),
        *({b"": 1}, defaultdict(lambda: 1), ITSELF),
    ],
    ids=["objects", "lambda", "masked", "key", "factory", "itself"],
)
def test_value_that_holds_more_than_plain_ones_is_refused(value: Any):
    with pytest.raises(ValueError, match=r"a checkpoint cannot hold (a key of )?x"):
        plain(value, "x")


@pytest.mark.parametrize("value", [1j, {3, 4}, frozenset({5}), torch.Size([2, 3])])
def test_plain_value_comes_back_with_its_type(value: Any):
    assert same(original(plain(value, "x")), value)


def test_stop_inside_a_validation_on_averaged_weights_changes_nothing(
    lightning: Lightning, run_yaml: RunYaml, tmp_path: Path
):
    whole = run_yaml(callback("Averaging") | {"trainer.default_root_dir": str(tmp_path / "whole")})
    assert lightning("fit", "--config", whole)[0] == 0
    stopped = run_yaml(callback("Averaging", stop_at_step=3))
    code, _, err = lightning("fit", "--config", stopped)
    assert (code, "waits for the end of a validation, because Averaging acts" in err) == (143, True)
    assert lightning("fit", "--config", run_yaml(callback("Averaging")))[0] == 0
    one, other = (
        read_checkpoint(tmp_path / name / "checkpoints" / "step-00000006.ckpt")
        for name in ("whole", "run")
    )
    for key in ("state_dict", "current_model_state"):
        assert all(torch.equal(one[key][name], other[key][name]) for name in one[key])
