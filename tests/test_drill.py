"""The fire drill: what it finds, what it covers, and that runs pass it."""

import random
from pathlib import Path

import pytest
import torch
from conftest import Lightning, RunYaml

from callbacks.drill import differences, plan_kills
from callbacks.moments import MOMENTS


def found(one: object, other: object) -> list[tuple[str, int]]:
    return list(differences(one, other))


def test_equal_containers_do_not_differ():
    nested = {"a": [torch.ones(3), (1, "x")], "b": None}
    assert found(nested, {"a": [torch.ones(3), (1, "x")], "b": None}) == []


def test_single_flipped_bit_is_found_and_counted():
    one = torch.arange(12.0).view(3, 4)
    other = one.clone()
    other.view(torch.int32)[2, 3] ^= 1
    assert found({"w": one}, {"w": other}) == [("w", 1)]


@pytest.mark.parametrize(
    ("one", "other", "where"),
    [
        ({"a": {"b": 1}}, {"a": {"b": 2}}, "a.b"),
        ({"a": [1, 2]}, {"a": [1]}, "a"),
        ({"a": torch.ones(2)}, {"a": torch.ones(3)}, "a"),
        ({"a": torch.ones(2)}, {"a": torch.ones(2).double()}, "a"),
        ({"a": 1}, {"b": 1}, ""),
    ],
)
def test_every_kind_of_difference_is_found(one: object, other: object, where: str):
    assert [place for place, bits in found(one, other) if bits > 0] == [where]


def test_drill_covers_every_moment_in_turn_and_random_times():
    plan = plan_kills(8, random.Random(0), accumulates=True, validates=True)
    assert {moment.split(":")[0] for moment in plan} == {*MOMENTS, "random"}


def test_moment_that_the_run_does_not_have_is_not_planned():
    plan = plan_kills(20, random.Random(0), accumulates=False, validates=False)
    moments = {moment.split(":")[0] for moment in plan}
    assert moments == {*MOMENTS, "random"} - {"inside accumulation", "during validation"}


@pytest.mark.slow
def test_run_killed_at_every_moment_ends_with_the_same_bits(
    lightning: Lightning, run_yaml: RunYaml, tmp_path: Path
):
    overrides = {
        "trainer.accumulate_grad_batches": 3,
        "trainer.max_steps": 40,
        "model.config.dropout": 0.1,
        "checkpoint.every_n_steps": 4,
    }
    code, out, err = lightning("drill", "--config", run_yaml(overrides), "--kills", 8)
    assert code == 0, err
    assert out.splitlines()[-1] == "drill: 8 kills, 0 differing bits"
    assert sorted(path.name for path in (tmp_path / "run-drill").iterdir()) == ["killed", "whole"]


def test_number_of_kills_must_be_one(lightning: Lightning, run_yaml: RunYaml):
    code, _, err = lightning("drill", "--config", run_yaml(), "--kills", 0)
    assert code == 2
    assert err == "error: --kills is 0: must be at least 1\n"


# lightning verify


def test_verify_says_of_each_file_whether_it_is_whole(
    lightning: Lightning, run_yaml: RunYaml, tmp_path: Path
):
    lightning("fit", "--config", run_yaml({"checkpoint.every_n_steps": 3}))
    code, out, _ = lightning("verify", "--ckpt_path", tmp_path / "run")
    names = [f"{tmp_path}/run/checkpoints/step-0000000{step}.ckpt" for step in (6, 3)]
    assert (code, out.splitlines()) == (0, [f"{name}: whole" for name in names])


def test_verify_fails_on_a_damaged_file_and_says_why(
    lightning: Lightning, run_yaml: RunYaml, tmp_path: Path
):
    lightning("fit", "--config", run_yaml({"checkpoint.every_n_steps": 3}))
    newest = tmp_path / "run" / "checkpoints" / "step-00000006.ckpt"
    newest.write_bytes(newest.read_bytes()[:2000])
    code, out, err = lightning("verify", "--ckpt_path", tmp_path / "run")
    assert code == 1
    assert out.startswith(f"{newest}: truncated or corrupt at 2000 bytes")
    assert err == "error: 1 of 2 checkpoints are damaged\n"


def test_verify_of_nothing_is_refused(lightning: Lightning, tmp_path: Path):
    code, _, err = lightning("verify", "--ckpt_path", tmp_path)
    assert (code, err) == (
        2,
        f"error: {tmp_path} holds no checkpoint; give a run folder or a file\n",
    )
