"""The ledger against its published values."""

import json
from dataclasses import replace
from typing import Any

import pytest
from conftest import Lightning, RunYaml

from lm.model import ModelConfig
from lm.optim import OptimConfig
from lm.plan import RunPlan, ledger

BASE = RunPlan(
    config=ModelConfig(
        vocab_size=32000, d_model=1536, n_layers=18, n_heads=12, n_kv_heads=4, ffn_dim=4096,
        max_seq_len=2048,
    ),
    optim=OptimConfig(lr=3e-4, warmup=0.02),
    micro_batch_size=8,
    accumulate=16,
    devices=4,
    total_tokens=10_000_000_000,
    save_every=95,
    kept_files=4,
    peak_flops=312e12,
)  # fmt: skip


def test_batch_arithmetic_of_the_base_run():
    plan = ledger(BASE)
    assert plan["tokens_per_micro_batch"] == 16_384
    assert plan["tokens_per_device_step"] == 262_144
    assert plan["tokens_per_step"] == 1_048_576
    assert (plan["max_steps"], plan["warmup_steps"]) == (9_537, 190)
    assert ledger(replace(BASE, devices=1))["max_steps"] == 38_147


@pytest.mark.parametrize(
    ("hours", "tokens_per_s", "percent"),
    [
        (8, "347,222", "83.8"),
        (12, "231,481", "55.9"),
        (17, "163,399", "39.5"),
        (24, "115,741", "27.9"),
        (36, "77,160", "18.6"),
        (67, "41,459", "10.0"),
    ],
)
def test_hours_come_to_their_published_share(hours: int, tokens_per_s: str, percent: str):
    [row] = [row for row in ledger(BASE)["hours_to_mfu"] if row["hours"] == hours]
    assert f"{row['tokens_per_s']:,.0f}" == tokens_per_s
    assert f"{100 * row['mfu_6n']:.1f}" == percent


def test_seventeen_hours_are_forty_eight_percent_in_full():
    [row] = [row for row in ledger(BASE)["hours_to_mfu"] if row["hours"] == 17]
    assert f"{100 * row['mfu']:.0f}" == "48"


def test_memory_and_files_of_the_base_run():
    plan = ledger(BASE)
    assert f"{plan['static_bytes'] / 1e9:.1f}" == "8.0"
    assert f"{plan['checkpoint_bytes'] / 1e9:.2f}" == "6.03"
    assert plan["warnings"] == []


def test_rates_are_shown_at_the_published_steps():
    rates = {step: f"{value:.3e}" for step, value in ledger(BASE)["lr"].items()}
    assert rates == {
        0: "1.579e-06", 95: "1.516e-04", 189: "3.000e-04", 190: "3.000e-04", 2384: "2.649e-04",
        4768: "1.693e-04", 7152: "7.110e-05", 9536: "3.000e-05",
    }  # fmt: skip


def test_unknown_peak_leaves_the_shares_open():
    rows = ledger(replace(BASE, peak_flops=None))["hours_to_mfu"]
    assert {row["mfu"] for row in rows} == {row["mfu_6n"] for row in rows} == {None}


def changed(**changes: Any) -> RunPlan:
    return replace(BASE, **changes)


@pytest.mark.parametrize(
    ("run", "part"),
    [
        (changed(config=replace(BASE.config, vocab_size=32001)), "no multiple of 64: 32064"),
        (changed(tokenizer_size=20_000), "far above the tokenizer's 20000 ids"),
        (changed(config=replace(BASE.config, head_dim=12)), "heads of 12 do not fit flash"),
        (changed(data_tokens=2_000_000_000), "5.0 passes over the data"),
        (changed(val_tokens=2048 * 3 + 1), "3 validation windows for 4 devices"),
        (changed(save_every=1000), "10.5% of the run: a kill can cost that much; 95 is 1 %"),
        (changed(free_bytes=20 * 10**9), "checkpoints need 30.1 GB and 20.0 GB are free"),
    ],
)
def test_plan_warns_of_what_will_go_wrong(run: RunPlan, part: str):
    assert [line for line in ledger(run)["warnings"] if part in line]


@pytest.mark.parametrize(
    ("run", "part"),
    [
        (changed(max_steps=5), "exactly one of"),
        (changed(total_tokens=None), "exactly one of"),
        (changed(total_tokens=None, epochs=1.0), "the data is not prepared"),
        (changed(optim=OptimConfig(warmup=9537)), "must be smaller than max_steps"),
    ],
)
def test_plan_that_makes_no_run_is_refused(run: RunPlan, part: str):
    with pytest.raises(ValueError, match=part):
        ledger(run)


def test_epochs_are_counted_in_windows():
    run = changed(total_tokens=None, epochs=2.0, data_tokens=2048 * 512 * 3 + 1)
    assert run.steps == 6


# Command


def test_command_plans_base_anywhere(lightning: Lightning):
    code, out, err = lightning("plan", "--config", "configs/base.yaml", "--trainer.devices", 1)
    assert code == 0, err
    assert "38,147 steps" in out
    assert "502,193,664" in out


def test_command_prints_json_for_scripts(lightning: Lightning, run_yaml: RunYaml):
    code, out, err = lightning("plan", "--json", "--config", run_yaml())
    assert code == 0, err
    plan = json.loads(out)
    assert plan["max_steps"] == 6
    assert plan["epochs"] == pytest.approx(6 * 32 / 7219, rel=0.05)
    assert list(plan["hours_to_mfu"][0]) == ["hours", "tokens_per_s", "mfu_6n", "mfu"]


@pytest.mark.parametrize(("devices", "sequences"), [("auto", 2), (3, 6), ([0, 1], 4)])
def test_devices_are_counted_as_they_are_asked_for(
    lightning: Lightning, run_yaml: RunYaml, devices: object, sequences: int
):
    overrides = {"trainer.devices": devices, "trainer.accelerator": "cpu"}
    _, out, _ = lightning("plan", "--json", "--config", run_yaml(overrides))
    assert json.loads(out)["tokens_per_step"] == sequences * 16
