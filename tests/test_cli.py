"""The command line: what it refuses, how it says so, and what it prints."""

import errno
import os
import re
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import Lightning, RunYaml

import cli
from callbacks.config.options import whole_number
from callbacks.config.values import load_yaml, read_config
from callbacks.ddp import check_port
from callbacks.run.precision import has_bf16


def refusal(lightning: Lightning, *argv: object) -> str:
    """The one error line of a command that a user got wrong."""
    code, out, err = lightning(*argv)
    assert code == 2, err
    assert out == ""
    assert "Traceback" not in err
    lines = err.splitlines()
    assert [line for line in lines if line.startswith("error: ")] == lines[-1:]
    return lines[-1]


def test_help_lists_every_command_with_its_purpose(lightning: Lightning):
    code, out, _ = lightning("--help")
    assert code == 0
    for name, run in cli.COMMANDS.items():
        assert f"  {name:<10}{(run.__doc__ or '').splitlines()[0]}" in out


@pytest.mark.parametrize("command", ["", *cli.COMMANDS])
def test_help_fits_a_terminal_of_80_columns(
    lightning: Lightning, monkeypatch: pytest.MonkeyPatch, command: str
):
    monkeypatch.setenv("COLUMNS", "80")
    code, out, _ = lightning(*command.split(), "--help")
    assert code == 0
    assert [line for line in out.splitlines() if len(line) > 80] == []


def test_no_command_is_a_mistake(lightning: Lightning):
    code, out, _ = lightning()
    assert code == 2
    assert out.startswith("usage: lightning COMMAND")


@pytest.mark.parametrize(
    ("argv", "hint"),
    [
        (["fitt"], "fitt is not a command; did you mean fit?"),
        (["--config", "x.yaml", "fit"], "--config is not a command; the command comes first"),
    ],
)
def test_unknown_command_is_named(lightning: Lightning, argv: list[str], hint: str):
    assert hint in refusal(lightning, *argv)


def test_help_of_fit_shows_unit_and_rule_of_a_field(lightning: Lightning):
    code, out, _ = lightning("fit", "--help")
    assert code == 0
    assert "--model.config.d_model D_MODEL" in out
    assert "Width of the residual stream." in out
    assert "--data.total_tokens" in out


# Keys


@pytest.mark.parametrize(
    ("overrides", "parts"),
    [
        (
            {"model.optim.learning_rat": 1e-3},
            ["model.optim.learning_rat is not a known key", "did you mean model.optim.lr?"],
        ),
        (
            {"model.config.d_modl": 8},
            ["model.config.d_modl is not", "did you mean model.config.d_model?"],
        ),
        ({"lr": 1e-3}, ["lr is not a known key", "lr belongs at model.optim.lr"]),
        ({"optimizer.lr": 1e-3}, ["lr belongs at model.optim.lr"]),
        ({"trainer.seq_len": 8}, ["seq_len belongs at data.seq_len"]),
        ({"modle.config.d_model": 8}, ["d_model belongs at model.config.d_model"]),
        ({"trainer.zzz": 8}, ["trainer.zzz is not a known key", "keys of trainer"]),
    ],
)
def test_unknown_key_of_a_file_is_named_with_its_place(
    lightning: Lightning, run_yaml: RunYaml, overrides: dict, parts: list[str]
):
    line = refusal(lightning, "fit", "--config", run_yaml(overrides))
    for part in parts:
        assert part in line


def test_unknown_option_of_the_command_line_is_named(lightning: Lightning, run_yaml: RunYaml):
    line = refusal(lightning, "fit", "--config", run_yaml(), "--model.config.d_modl", 4)
    assert "did you mean model.config.d_model?" in line


def test_unknown_key_is_refused_by_prepare_too(lightning: Lightning, run_yaml: RunYaml):
    line = refusal(lightning, "prepare", "--config", run_yaml({"data.seq_length": 8}))
    assert "did you mean data.seq_len?" in line


def test_key_written_twice_names_both_values_and_the_line(lightning: Lightning, tmp_path: Path):
    path = tmp_path / "twice.yaml"
    path.write_text("data:\n  seq_len: 16\n  seq_len: 32\n", encoding="utf-8")
    line = refusal(lightning, "fit", "--config", path)
    assert f"{path}: key 'seq_len' is written twice, with 16 and 32" in line
    assert "line 3" in line


def test_missing_file_is_named(lightning: Lightning, tmp_path: Path):
    line = refusal(lightning, "fit", "--config", tmp_path / "none.yaml")
    assert f"--config {tmp_path / 'none.yaml'} does not exist" in line


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("a: [1", "line 1"),
        ("word", "holds no keys"),
        ("model: [1, 2]", "model is [1, 2]; it is a section"),
        ("data:\n  [1, 2]: 3", "line 2"),
        ("\tdata: 3", "line 1"),
    ],
)
def test_file_that_is_no_configuration_is_refused(
    lightning: Lightning, tmp_path: Path, text: str, part: str
):
    path = tmp_path / "broken.yaml"
    path.write_text(text, encoding="utf-8")
    line = refusal(lightning, "fit", "--config", path)
    assert str(path) in line
    assert part in line


@pytest.mark.parametrize(
    ("overrides", "parts"),
    [
        ({"model.config.max_seq_len": 99}, ["max_seq_len is 99", "data.seq_len (16)"]),
        ({"data.vocab_size": 99}, ["data.vocab_size is 99", "model.config.vocab_size (320)"]),
        ({"model.seed": 9}, ["model.seed is 9", "seed_everything (1337)"]),
    ],
)
def test_linked_key_with_another_value_is_refused(
    lightning: Lightning, run_yaml: RunYaml, overrides: dict, parts: list[str]
):
    line = refusal(lightning, "fit", "--config", run_yaml(overrides))
    for part in parts:
        assert part in line


def test_linked_key_on_the_command_line_is_refused(lightning: Lightning, run_yaml: RunYaml):
    line = refusal(lightning, "fit", "--config", run_yaml(), "--model.config.max_seq_len", 99)
    assert "data.seq_len" in line


# Values


@pytest.mark.parametrize("value", ["3e-4", "3.0e-4", "0.0003", "3E-4"])
def test_number_with_exponent_is_a_number_in_a_file(value: str):
    assert load_yaml(f"model:\n  optim:\n    lr: {value}\n")["model"]["optim"]["lr"] == 3e-4


@pytest.mark.parametrize("value", ["1e3", "1E+3", "1000"])
def test_whole_number_with_exponent_is_whole_in_a_file(value: str):
    steps = load_yaml(f"trainer:\n  max_steps: {value}\n")["trainer"]["max_steps"]
    assert steps == 1000
    assert type(steps) is int


@pytest.mark.parametrize(
    ("text", "plain"),
    [
        ("1e3", "1000"),
        ("3e-4", "3e-4"),
        ("1.5e9", "1500000000"),
        ("1.2345e3", "1.2345e3"),
        ("runs/1e3", "runs/1e3"),
    ],
)
def test_whole_number_with_exponent_is_whole_on_the_command_line(text: str, plain: str):
    assert whole_number(text) == plain


@pytest.mark.parametrize(
    ("overrides", "parts"),
    [
        ({"model.optim.lr": "fast"}, ["lr", "fast", "float"]),
        ({"trainer.max_steps": 10.5}, ["max_steps", "10.5", "int"]),
        ({"trainer.precision": "fp8"}, ["precision", "fp8", "bf16-mixed"]),
        ({"trainer.accumulate_grad_batches": 2.5}, ["accumulate_grad_batches", "2.5"]),
        ({"model.config.d_model": 30, "model.config.n_heads": 4}, ["30", "4", "divisible"]),
        ({"model.config.d_model": 6, "model.config.n_heads": 2}, ["head_dim is 3", "even"]),
        ({"model.optim.warmup": 1.0}, ["warmup is 1.0", "below 1"]),
        ({"model.optim.warmup": 6}, ["warmup is 6", "max_steps is 6", "smaller"]),
        ({"data.epochs": 2}, ["given 2 times", "trainer.max_steps 6", "data.epochs 2"]),
        ({"trainer.max_steps": ...}, ["is not given: give exactly one of", "data.total_tokens"]),
        ({"trainer.max_steps": 0}, ["max_steps is 0", "at least 1"]),
        ({"trainer.limit_train_batches": 4}, ["limit_train_batches", "max_steps"]),
        ({"trainer.strategy": "fsdp"}, ["fsdp", "ddp"]),
        ({"trainer.precision": "16-mixed"}, ["16-mixed", "GPU", "bf16-mixed"]),
        ({"data.seq_len": 100000}, ["100000", "needs at least 100001"]),
        ({"model.config.vocab_size": 200}, ["vocab_size is 200", "has 300 ids", "at least 300"]),
        ({"data.path": "nowhere", "data.corpus": ...}, ["nowhere", "lacks train.bin", "prepare"]),
        ({"seed_everything": "yes"}, ["seed_everything", "int"]),
        ({"seed_everything": -1}, ["seed_everything", "-1"]),
        ({"data.seq_len": 0}, ["data.seq_len is 0"]),
        ({"data.corpus": "prose"}, ["data.corpus is prose", "python", "stdlib"]),
        ({"data.total_tokens": 1.5}, ["data.total_tokens is 1.5", "int"]),
        (
            {"trainer.accelerator": "cuda"},
            ["trainer.accelerator is cuda: this machine has none", "pass auto or cpu"],
        ),
        ({"trainer.precision": 7}, ["precision is 7", "bf16-mixed"]),
        ({"trainer.limit_val_batches": 0.5}, ["limit_val_batches is 0.5"]),
        ({"model.optim": 3}, ["model.optim", "3"]),
    ],
)
def test_value_against_a_rule_is_refused_before_any_work(
    lightning: Lightning, run_yaml: RunYaml, tmp_path: Path, overrides: dict, parts: list[str]
):
    line = refusal(lightning, "fit", "--config", run_yaml(overrides))
    for part in parts:
        assert part in line
    assert not (tmp_path / "run" / "checkpoints").exists()
    assert not (tmp_path / "run" / "metrics.csv").exists()


# Port of several processes


@pytest.fixture
def busy_port() -> Iterator[str]:
    """A port of this machine that another program listens on."""
    with socket.socket() as listener:
        listener.bind(("", 0))
        listener.listen()
        yield str(listener.getsockname()[1])


def test_busy_port_is_refused_for_several_processes_before_any_work(
    lightning: Lightning,
    run_yaml: RunYaml,
    busy_port: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
):
    monkeypatch.setenv("MASTER_PORT", busy_port)
    line = refusal(lightning, "fit", "--config", run_yaml({"trainer.devices": 2}))
    reason = OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))
    assert line == (
        f"error: MASTER_PORT is {busy_port}, where the processes of this run cannot meet "
        f"({reason}); unset it, and a free port is taken, or give another"
    )
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("port", ["soon", "70000", "-1", ""])
@pytest.mark.parametrize("node", ["0", "1"])
def test_port_that_is_none_is_refused(port: str, node: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("MASTER_PORT", port)
    monkeypatch.setenv("NODE_RANK", node)
    with pytest.raises(ValueError, match="MASTER_PORT") as refused:
        check_port()
    assert str(refused.value) == (
        f"MASTER_PORT is {port!r}: it must be a number below 65536, of a free port on the first "
        "node; set it so, or unset it for a run on one machine"
    )


def test_interface_that_this_machine_lacks_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "none0")
    with pytest.raises(ValueError, match=r"^GLOO_SOCKET_IFNAME is none0: .* lo.*; set it to one"):
        check_port()


def test_empty_address_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("MASTER_ADDR", "")
    with pytest.raises(ValueError, match=r"^MASTER_ADDR is empty: it must be .*; set it, or unset"):
        check_port()


@pytest.mark.parametrize("overrides", [{}, {"trainer.devices": "auto"}], ids=str)
def test_one_process_needs_no_port(
    lightning: Lightning,
    run_yaml: RunYaml,
    busy_port: str,
    monkeypatch: pytest.MonkeyPatch,
    overrides: dict,
):
    monkeypatch.setenv("MASTER_PORT", busy_port)
    code, _, err = lightning("fit", "--config", run_yaml(overrides))
    assert code == 0, err


@pytest.mark.parametrize("port", [None, "0"])
def test_port_that_is_free_or_not_given_is_accepted(
    port: str | None, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.delenv("MASTER_PORT", raising=False)
    if port is not None:
        monkeypatch.setenv("MASTER_PORT", port)
    check_port()


@pytest.mark.parametrize("variable", ["LOCAL_RANK", "SLURM_PROCID", "NODE_RANK", "GROUP_RANK"])
def test_port_that_the_first_process_listens_on_is_no_mistake_of_the_second(
    variable: str, busy_port: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("MASTER_PORT", busy_port)
    monkeypatch.setenv(variable, "1")
    check_port()


def test_section_without_keys_is_no_section():
    text = "checkpoint:\nmodel:\n  optim:\n  compile: false\nckpt_path:\n"
    keys = {"checkpoint": None, "model.optim": None, "model.compile": bool, "ckpt_path": str | None}
    assert read_config(text, keys) == {"model": {"compile": False}, "ckpt_path": None}


def test_anchors_and_merges_are_yaml_too():
    text = "a: &a {x: 1, y: 2}\nb:\n  <<: *a\n  y: 3\n"
    assert load_yaml(text)["b"] == {"x": 1, "y": 3}


@pytest.mark.parametrize("option", ["--trainer.max_step", "--data.seq", "--conf"])
def test_shortened_key_is_no_key(lightning: Lightning, run_yaml: RunYaml, option: str):
    line = refusal(lightning, "fit", "--config", run_yaml(), option, 1)
    assert f"{option.removeprefix('--')} is not a known key" in line


@pytest.mark.parametrize("argv", [["--config"], ["--config="]])
def test_config_without_a_file_is_refused(lightning: Lightning, argv: list[str]):
    assert "--config names no file" in refusal(lightning, "fit", *argv)


def test_refused_start_leaves_the_configuration_of_the_run(
    lightning: Lightning, run_yaml: RunYaml, tmp_path: Path
):
    lightning("fit", "--config", run_yaml())
    before = (tmp_path / "run" / "config.yaml").read_bytes()
    refusal(lightning, "fit", "--config", run_yaml({"model.config.d_model": 32}))
    assert (tmp_path / "run" / "config.yaml").read_bytes() == before


def test_bug_of_ours_keeps_its_traceback(lightning: Lightning, monkeypatch: pytest.MonkeyPatch):
    def broken(argv: list[str]) -> None:
        """Break."""
        int("x")  # a ValueError that nobody raised on purpose

    monkeypatch.setitem(cli.COMMANDS, "broken", broken)
    code, _, err = lightning("broken")
    assert code == 1
    assert "Traceback" in err


# What a run prints and leaves


def test_run_prints_its_steps_and_leaves_its_folder(
    lightning: Lightning, run_yaml: RunYaml, tmp_path: Path
):
    code, _, err = lightning("fit", "--config", run_yaml())
    assert code == 0, err
    lines = err.splitlines()
    assert f"starting at step 0 in {tmp_path / 'run'}" in lines
    assert lines[-1] == f"done: 6 steps in {tmp_path / 'run'}"
    assert sum("val loss" in line and "bits per byte" in line for line in lines) == 2
    names = {path.name for path in (tmp_path / "run").iterdir()}
    assert names >= {"config.yaml", "checkpoints", "tensorboard", "metrics.csv", "run.json"}


def test_run_says_what_it_is_before_its_first_step(lightning: Lightning, run_yaml: RunYaml):
    overrides = {"trainer.precision": "auto", "trainer.accumulate_grad_batches": 3}
    _, _, err = lightning("fit", "--config", run_yaml(overrides))
    data, parameters, batch, *_ = err.splitlines()
    assert re.fullmatch(
        r"data: .*/train\.bin \(uint16\): 7,219 tokens in 451 windows of 16 .*", data
    )
    # 320 × 16 embedded; a layer has 4 × 16 × 16 in attention, 3 × 16 × 24 in its MLP, 2 norms.
    assert parameters == (
        "9,552 parameters: 9,472 in 15 tensors with weight decay 0.1, "
        "80 in 5 tensors with weight decay 0"
    )
    precision = "bf16-mixed" if has_bf16("cpu") else "32-true"
    assert batch == (
        f"cpu, precision {precision} (auto), 2 × 3 × 1 = 6 sequences (96 tokens) a step, 6 steps, "
        "not compiled (model.compile is false)"
    )


def test_console_holds_nothing_of_the_libraries(lightning: Lightning, run_yaml: RunYaml):
    _, out, err = lightning("fit", "--config", run_yaml())
    assert out == ""
    for word in ("GPU available", "Tip", "litlogger", "Warning", "Seed set", "LOCAL_RANK"):
        assert word not in err


def test_saved_configuration_starts_the_same_run(
    lightning: Lightning, run_yaml: RunYaml, tmp_path: Path
):
    lightning("fit", "--config", run_yaml())
    saved = tmp_path / "run" / "config.yaml"
    other = ["--trainer.default_root_dir", tmp_path / "again"]
    code, _, err = lightning("fit", "--config", saved, *other)
    assert code == 0, err
    first, second = (tmp_path / name / "metrics.csv" for name in ("run", "again"))
    columns = [path.read_text(encoding="utf-8").split(",")[:3] for path in (first, second)]
    assert columns[0] == columns[1]


def test_new_run_in_a_used_folder_is_refused(lightning: Lightning, run_yaml: RunYaml):
    lightning("fit", "--config", run_yaml())
    line = refusal(lightning, "fit", "--config", run_yaml({"ckpt_path": None}))
    assert "already holds checkpoints (step 6)" in line
    assert "--ckpt_path last" in line


def test_finished_run_says_so_and_is_no_error(lightning: Lightning, run_yaml: RunYaml):
    lightning("fit", "--config", run_yaml())
    code, _, err = lightning("fit", "--config", run_yaml())
    assert code == 0
    assert err.splitlines()[-1] == "finished at step 6 of 6"


def test_dry_run_works_beside_a_run(lightning: Lightning, run_yaml: RunYaml):
    lightning("fit", "--config", run_yaml())
    code, _, err = lightning("fit", "--config", run_yaml({"trainer.fast_dev_run": 2}))
    assert code == 0, err


def test_users_callback_watches_the_validation_loss(lightning: Lightning, run_yaml: RunYaml):
    path = "lightning.pytorch.callbacks.EarlyStopping"
    stops_at_once = {"monitor": "val/loss", "stopping_threshold": 99.0}
    callbacks = [{"class_path": path, "init_args": stops_at_once}]
    code, _, err = lightning("fit", "--config", run_yaml({"trainer.callbacks": callbacks}))
    assert code == 0, err
    assert err.splitlines()[-1] == "stopped at step 3 of 6; the same command goes on"


def test_dry_run_leaves_nothing(lightning: Lightning, run_yaml: RunYaml, tmp_path: Path):
    code, _, err = lightning("fit", "--config", run_yaml({"trainer.fast_dev_run": 2}))
    assert code == 0, err
    assert "step 2/2" in err
    assert not (tmp_path / "run").exists()


def test_validate_prints_the_figures_of_the_newest_checkpoint(
    lightning: Lightning, run_yaml: RunYaml
):
    _, _, trained = lightning("fit", "--config", run_yaml())
    code, out, err = lightning("validate", "--config", run_yaml())
    assert code == 0, err
    last = [line for line in trained.splitlines() if line.startswith("step 6 · val loss")]
    assert [line for line in (out + err).splitlines() if "val loss" in line] == last


def test_validate_on_nothing_is_refused(lightning: Lightning, run_yaml: RunYaml):
    config = run_yaml({"trainer.limit_val_batches": 0})
    assert "limit_val_batches is 0: there is nothing" in refusal(
        lightning, "validate", "--config", config
    )


def test_validate_without_checkpoint_is_refused(lightning: Lightning, run_yaml: RunYaml):
    assert "holds no checkpoint" in refusal(lightning, "validate", "--config", run_yaml())


def test_validate_does_not_touch_the_curve(lightning: Lightning, run_yaml: RunYaml, tmp_path: Path):
    lightning("fit", "--config", run_yaml())
    before = (tmp_path / "run" / "metrics.csv").read_bytes()
    lightning("validate", "--config", run_yaml())
    assert (tmp_path / "run" / "metrics.csv").read_bytes() == before
