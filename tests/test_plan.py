"""The ledger against its published values."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from conftest import Lightning, RunYaml

from lm.config import ModelConfig, OptimConfig
from lm.plan import RunPlan, ledger
from lm.plan_table import table

BASE = RunPlan(
    config=ModelConfig(
        vocab_size=32000, d_model=1536, n_layers=18, n_heads=12, n_kv_heads=4, ffn_dim=4096,
        max_seq_len=2048,
    ),
    optim=OptimConfig(lr=3e-4, warmup=0.02),
    precision="bf16-mixed",
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
    assert plan.tokens_per_micro_batch == 16_384
    assert plan.tokens_per_device_step == 262_144
    assert plan.tokens_per_step == 1_048_576
    assert (plan.max_steps, plan.warmup_steps) == (9_537, 190)
    assert ledger(replace(BASE, devices=1)).max_steps == 38_147


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
    [row] = [row for row in ledger(BASE).hours_to_mfu if row["hours"] == hours]
    assert f"{row['tokens_per_s']:,.0f}" == tokens_per_s
    assert f"{100 * row['mfu_6n']:.1f}" == percent


def test_seventeen_hours_are_forty_eight_percent_in_full():
    [row] = [row for row in ledger(BASE).hours_to_mfu if row["hours"] == 17]
    assert f"{100 * row['mfu']:.0f}" == "48"


def test_memory_and_files_of_the_base_run():
    plan = ledger(BASE)
    assert f"{plan.static_bytes / 1e9:.1f}" == "8.0"
    assert f"{plan.checkpoint_bytes / 1e9:.2f}" == "6.03"
    assert plan.warnings == []


def test_buckets_of_ddp_are_counted():
    plan = ledger(changed(buckets=True))
    assert plan.static_bytes == 20 * plan.parameters
    assert plan.static_bytes_by_part["buckets of DDP"] == 4 * plan.parameters
    assert "buckets of DDP 2.01)" in table(plan)


@pytest.mark.parametrize(
    ("options", "each"),
    [
        ({}, 16),
        ({"trainer.strategy": "ddp"}, 20),
        ({"trainer.devices": 2}, 20),
        ({"trainer.num_nodes": 3}, 20),
    ],
)
def test_command_counts_buckets_where_ddp_makes_them(
    lightning: Lightning, run_yaml: RunYaml, options: dict[str, Any], each: int
):
    code, out, err = lightning("plan", "--config", run_yaml(options), "--json")
    assert code == 0, err
    assert json.loads(out)["static_bytes"] == each * json.loads(out)["parameters"]


def test_all_parameters_of_a_dense_model_are_active():
    plan = ledger(BASE)
    assert plan.parameters_active == plan.parameters == 502_193_664
    assert "502,193,664, all active" in table(plan)


def test_mixed_precisions_need_the_same_activations_and_fp32_needs_more():
    half, other, single = (
        ledger(replace(BASE, precision=name)).activation_bytes or 0
        for name in ("bf16-mixed", "16-mixed", "32-true")
    )
    assert f"{half / 1e9:.1f}" == "25.9"
    assert half == other < single


def test_files_are_those_that_stay_and_one_more():
    plan = ledger(BASE)
    assert plan.checkpoint_files == 5
    assert plan.checkpoint_bytes_kept == 5 * plan.checkpoint_bytes


def test_files_kept_for_good_are_counted_and_named():
    plan = ledger(replace(BASE, keep_every=950))
    assert (plan.checkpoint_files, plan.checkpoint_files_for_good) == (15, 10)
    assert plan.checkpoint_bytes_kept == 15 * plan.checkpoint_bytes
    line = "at most 15 files (10 of them for good, by checkpoint.keep_every), 90.4 GB, on disk"
    assert line in table(plan)


def test_rates_are_shown_at_the_published_steps():
    rates = {step: f"{value:.3e}" for step, value in ledger(BASE).lr.items()}
    assert rates == {
        0: "1.579e-06", 95: "1.516e-04", 189: "3.000e-04", 190: "3.000e-04", 2384: "2.649e-04",
        4768: "1.693e-04", 7152: "7.110e-05", 9536: "3.000e-05",
    }  # fmt: skip


def test_unknown_peak_leaves_the_shares_open():
    rows = ledger(replace(BASE, peak_flops=None)).hours_to_mfu
    assert {row["mfu"] for row in rows} == {row["mfu_6n"] for row in rows} == {None}


def changed(**changes: Any) -> RunPlan:
    return replace(BASE, **changes)


@pytest.mark.parametrize(
    ("run", "part"),
    [
        (changed(config=replace(BASE.config, vocab_size=32001)), "no multiple of 64: 32064"),
        (changed(tokenizer_size=20_000), "far above the tokenizer's 20000 ids"),
        (changed(tokenizer_size=32_001), "below the tokenizer's 32001 ids: fit refuses it"),
        (changed(config=replace(BASE.config, head_dim=12)), "heads of 12 do not fit flash"),
        (changed(data_tokens=2_000_000_000), "5.0 passes over the data"),
        (changed(val_tokens=2048 * 3 + 1), "3 validation windows for 4 devices"),
        (changed(save_every=1000), "10.5% of the run: a kill can cost that much; 95 is 1 %"),
        (changed(keep_every=100), "keep_every 100 is no multiple of checkpoint.every_n_steps 95"),
        (changed(free_bytes=20 * 10**9), "checkpoints need 30.1 GB and 20.0 GB are free: free"),
        (
            changed(free_bytes=2 * 10**9, held_bytes=6 * 10**9),
            "30.1 GB and 8.0 GB are free, 6.0 GB of it held by this run",
        ),
        (changed(keep_every=95, free_bytes=31 * 10**9), "checkpoints need 632.8 GB and 31.0"),
        (changed(epochs=4.5, total_tokens=None), "4.5 passes over the data"),
    ],
)
def test_plan_warns_of_what_will_go_wrong(run: RunPlan, part: str):
    assert [line for line in ledger(run).warnings if part in line]


@pytest.mark.parametrize(
    "run",
    [
        changed(free_bytes=26 * 10**9, held_bytes=5 * 10**9),
        changed(save_every=1000, save_minutes=10.0),
        changed(keep_every=950),
        changed(tokenizer_size=32_000, data_tokens=2_500_000_000, val_tokens=2048 * 4 + 1),
    ],
)
def test_plan_does_not_warn_of_what_is_right(run: RunPlan):
    assert ledger(run).warnings == []


@pytest.mark.parametrize(
    ("run", "part"),
    [
        (changed(max_steps=5), "exactly one of"),
        (changed(total_tokens=None), "exactly one of"),
        (
            changed(optim=OptimConfig(warmup=9537)),
            r"model\.optim\.warmup is 9537 \(9537 steps\) and max_steps is 9537: warmup must be "
            "smaller than max_steps; shorten it or lengthen the run",
        ),
    ],
)
def test_plan_that_makes_no_run_is_refused(run: RunPlan, part: str):
    with pytest.raises(ValueError, match=part):
        ledger(run)


def test_epochs_are_counted_in_windows():
    run = changed(total_tokens=None, epochs=2.0, data_tokens=2048 * 512 * 3 + 1)
    assert run.steps == 6


def test_part_of_a_window_is_a_step():
    assert changed(total_tokens=None, epochs=0.1, data_tokens=2049).steps == 1


# What is not known

UNPREPARED = "the data is not prepared, or not here"
ON_DATA = [f"vocabulary against the tokenizer: {UNPREPARED}", f"validation windows: {UNPREPARED}"]


def test_plan_of_prepared_data_leaves_nothing_open():
    run = changed(data_tokens=10**10, val_tokens=10**8, tokenizer_size=32_000)
    assert ledger(run).unknown == []


def test_missing_data_leaves_open_what_rests_on_it():
    plan = ledger(BASE)
    assert plan.unknown == [f"epochs over the data: {UNPREPARED}", *ON_DATA]
    assert plan.epochs is None
    assert plan.max_steps == 9_537


def test_length_in_passes_over_missing_data_is_open():
    plan = ledger(changed(total_tokens=None, epochs=2.0, keep_every=95))
    assert plan.unknown == [f"steps, tokens, rates, hours: {UNPREPARED}", *ON_DATA]
    for key in ("max_steps", "tokens", "warmup_steps", "save_every_share", "checkpoint_files"):
        assert getattr(plan, key) is None
    assert (plan.lr, plan.hours_to_mfu, plan.epochs) == ({}, [], 2.0)
    assert plan.static_bytes == ledger(BASE).static_bytes


def test_table_tells_what_is_open():
    lines = table(ledger(changed(total_tokens=None, epochs=2.0, keep_every=95))).splitlines()
    assert "run               2.00 passes over the data" in lines
    assert "checkpoint        6.03 GB a file; saved every 95 steps" in lines
    assert f"unknown: steps, tokens, rates, hours: {UNPREPARED}" in lines
    assert not [line for line in lines if line.startswith(("hours", "learning rate"))]


def test_activations_of_another_precision_are_open():
    plan = ledger(changed(precision="bf16-true"))
    assert plan.activation_bytes is None
    assert [line for line in plan.unknown if line.startswith("activations: they are counted")]
    assert "activations  " not in table(plan)


def test_unknown_peak_says_how_to_give_it():
    [line] = [line for line in ledger(changed(peak_flops=None)).unknown if "MFU" in line]
    assert "give the dense TFLOP/s of one by --throughput.peak_tflops" in line


# Command

KEYS = {
    "parameters", "parameters_active", "parameters_embedding", "flops_per_token",
    "flops_per_token_6n", "tokens_per_micro_batch", "tokens_per_device_step", "tokens_per_step",
    "max_steps", "warmup_steps", "lr", "static_bytes", "activation_bytes", "checkpoint_bytes",
    "hours_to_mfu", "warnings", "unknown",
}  # fmt: skip


def test_command_prints_the_published_table(lightning: Lightning):
    peak = ("--throughput.peak_tflops", 312)
    code, out, err = lightning("plan", "--config", "configs/base.yaml", *peak)
    assert code == 0, err
    lines = out.splitlines()
    start = lines.index("hours                 tokens/s   MFU by 6·N      MFU")
    rows = [line.split() for line in lines[start + 1 : start + 7]]
    assert [row[0] for row in rows] == ["8", "12", "17", "24", "36", "67"]
    assert [row[2] for row in rows] == ["83.8%", "55.9%", "39.5%", "27.9%", "18.6%", "10.0%"]
    assert rows[2][3] == "48.3%"
    assert lines[start + 7].strip() == (
        "by 6·N is the articles' form; MFU is the full form, with attention's own products; "
        "of 4 × 312 TFLOP/s"
    )


def test_command_plans_base_anywhere(lightning: Lightning):
    code, out, err = lightning("plan", "--config", "configs/base.yaml", "--trainer.devices", 1)
    assert code == 0, err
    assert "38,147 steps" in out
    assert "502,193,664" in out


def test_command_prints_json_for_scripts(lightning: Lightning, run_yaml: RunYaml):
    code, out, err = lightning("plan", "--json", "--config", run_yaml())
    assert code == 0, err
    plan = json.loads(out)
    assert plan.keys() >= KEYS
    assert plan["unknown"] == []
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


def test_command_looks_at_the_hours_it_is_given(lightning: Lightning, run_yaml: RunYaml):
    code, out, err = lightning("plan", "--json", "--hours", 0.5, 3, "--config", run_yaml())
    assert code == 0, err
    assert [row["hours"] for row in json.loads(out)["hours_to_mfu"]] == [0.5, 3]
    _, out, _ = lightning("plan", "--config", run_yaml(), "--hours", 0.5, 3)
    words = [line.split()[0] for line in out.splitlines()]
    assert words[words.index("hours") :][:3] == ["hours", "0.5", "3"]


@pytest.mark.parametrize(
    ("hours", "message"),
    [
        ([0], "--hours is 0: must be a number above 0"),
        ([17, -3], "--hours is -3: must be a number above 0"),
        (["nan"], "--hours is nan: it must be a finite number"),
        (["inf"], "--hours is inf: it must be a finite number"),
        (["x"], "--hours is x: it must be a finite number"),
        ([], "argument --hours: expected at least one argument"),
    ],
)
def test_hours_that_are_none_are_refused(
    lightning: Lightning, run_yaml: RunYaml, hours: list[object], message: str
):
    code, out, err = lightning("plan", "--config", run_yaml(), "--hours", *hours)
    assert (code, out) == (2, "")
    assert err.startswith(f"error: {message}")
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"throughput.peak_tflops": 0.0}, "throughput.peak_tflops is 0.0: must be above 0"),
        ({"trainer.log_every_n_steps": 0}, "trainer.log_every_n_steps is 0: it must be at least 1"),
        ({"model.optim.warmup": 6}, "model.optim.warmup is 6 (6 steps) and max_steps is 6"),
        ({"trainer.precision": "16-mixed"}, "trainer.precision is 16-mixed: fp16 needs a GPU"),
    ],
)
def test_plan_refuses_what_a_run_would(
    lightning: Lightning, run_yaml: RunYaml, overrides: dict, message: str
):
    code, out, err = lightning("plan", "--config", run_yaml(overrides))
    assert (code, out) == (2, "")
    assert err.startswith(f"error: {message}")


def test_help_of_plan_shows_its_own_options(lightning: Lightning):
    code, out, _ = lightning("plan", "--help")
    assert code == 0
    assert "--json" in out
    assert "--hours HOURS [HOURS ...]" in out
    assert "lightning fit" in out


@pytest.mark.parametrize("precision", ["auto", "16-mixed"])
def test_gpus_of_the_run_need_not_be_here(lightning: Lightning, run_yaml: RunYaml, precision: str):
    overrides = {"trainer.accelerator": "gpu", "trainer.devices": 5, "trainer.precision": precision}
    code, out, err = lightning("plan", "--json", "--config", run_yaml(overrides))
    assert code == 0, err
    assert json.loads(out)["tokens_per_step"] == 5 * 32


def test_data_that_is_not_prepared_is_no_error(
    lightning: Lightning, run_yaml: RunYaml, tmp_path: Path
):
    overrides = {"data.path": str(tmp_path), "trainer.max_steps": ..., "data.epochs": 2.0}
    code, out, err = lightning("plan", "--json", "--config", run_yaml(overrides))
    assert code == 0, err
    plan = json.loads(out)
    assert plan.keys() >= KEYS
    assert plan["max_steps"] is None
    assert plan["unknown"] == [f"steps, tokens, rates, hours: {UNPREPARED}", *ON_DATA]


def test_broken_meta_is_an_error(lightning: Lightning, run_yaml: RunYaml, tmp_path: Path):
    (tmp_path / "meta.json").write_text("{", encoding="utf-8")
    code, out, err = lightning("plan", "--config", run_yaml({"data.path": str(tmp_path)}))
    assert (code, out) == (2, "")
    assert err.startswith(f"error: {tmp_path / 'meta.json'} is damaged")


def test_checkpoints_that_are_there_are_no_new_need(
    lightning: Lightning, run_yaml: RunYaml, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    (tmp_path / "run" / "checkpoints" / "step-00000002.ckpt").write_bytes(bytes(10**6))
    usage = type("Usage", (), {"free": 0})
    monkeypatch.setattr("shutil.disk_usage", lambda _: usage)
    _, out, _ = lightning("plan", "--json", "--config", run_yaml())
    assert not [line for line in json.loads(out)["warnings"] if "GB are free" in line]


def passes(lightning: Lightning, config: Path) -> Any:
    code, out, err = lightning("plan", "--config", config, "--json")
    assert code == 0, err
    return json.loads(out)["epochs"]


def test_passes_over_rows_count_samples_of_all_sources(
    lightning: Lightning, run_yaml: RunYaml, corpus: Path, tmp_path: Path
):
    shutil.copytree(corpus, tmp_path / "second")
    rows = {"data.rows": "split", "data.seq_len": 64}
    one = passes(lightning, run_yaml(rows))
    both = {str(corpus): 1, str(tmp_path / "second"): 1}
    assert one > 0
    mixed = run_yaml(rows | {"data.path": ..., "data.mixture": both})
    assert passes(lightning, mixed) == pytest.approx(one / 2)


def test_passes_over_rows_without_their_offsets_are_open(
    lightning: Lightning, run_yaml: RunYaml, corpus: Path, tmp_path: Path
):
    (tmp_path / "elsewhere").mkdir()
    shutil.copy(corpus / "meta.json", tmp_path / "elsewhere")
    place = {"data.path": str(tmp_path / "elsewhere")}
    assert passes(lightning, run_yaml(place)) > 0
    assert passes(lightning, run_yaml(place | {"data.rows": "split"})) is None
