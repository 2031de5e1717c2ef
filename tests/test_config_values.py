# ruff: noqa: E501 - error lines are compared whole
"""Values of configuration keys: one reading in files and on the command line, one line if wrong."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import Lightning, RunYaml

import cli
from callbacks.config.files import nested
from callbacks.config.parser import ALIASES, RunParser, hinted
from callbacks.config.values import (
    PATHS,
    Keys,
    Loader,
    dump_yaml,
    is_plain,
    load_yaml,
    read_config,
    read_word,
    takes_numbers,
    takes_text,
)


@pytest.fixture(scope="module")
def keys() -> Keys:
    """All keys of `lightning fit`."""
    cli.main(["fit", "--config", "nothing.yaml"])
    return {key: hint for key, hint in RunParser.keys.items() if hint is not None}


def outcome(read: Callable[[], Any]) -> Any:
    """What is read, or what is said instead."""
    try:
        return read()
    except ValueError as error:
        return str(error)


def in_file(value: str, key: str, keys: Keys) -> Any:
    return nested(read_config(f"{key}: {value}", keys), key)


def on_line(value: str, key: str, keys: Keys) -> Any:
    read = read_word(value, key, keys[key])
    if takes_text(keys[key]):
        return None if read == "null" else read
    return yaml.load(read, Loader=Loader)


WORDS = (
    *("1e3", "12e3", "1234e56", "0x10", "1_000", "010", "00", "1:30", "2024-01-01", "1.5", "-1"),
    *(
        ".nan",
        "nan",
        "inf",
        "-.inf",
        "1e400",
        "1e30",
        "on",
        "no",
        "true",
        "null",
        "word",
        "a#b",
    ),
)


@pytest.mark.parametrize("word", WORDS)
def test_file_and_command_line_read_a_word_alike(word: str, keys: Keys):
    plain = {key: hint for key, hint in keys.items() if is_plain(hint)}
    assert len(plain) > 80
    files = {key: outcome(lambda key=key: in_file(word, key, keys)) for key in plain}
    lines = {key: outcome(lambda key=key: on_line(word, key, keys)) for key in plain}
    assert files == lines


@pytest.mark.parametrize("word", [word for word in WORDS if word != "null"])
def test_name_stays_as_written(word: str, keys: Keys):
    names = ("tracker.run", "tracker.project", "trainer.default_root_dir", "data.tokenizer")
    assert {in_file(word, key, keys) for key in names} == {word}


@pytest.mark.parametrize(
    "word",
    [".nan", "nan", ".inf", "inf", "-.inf", "1e400", "1e30", "9" * 19, "010", "1:30", "word", ""],
)
def test_number_that_is_none_is_refused_by_every_key(word: str, keys: Keys):
    numbers = [key for key, hint in keys.items() if is_plain(hint) and takes_numbers(hint)]
    numbers.remove("trainer.devices")  # takes texts too
    said = [outcome(lambda key=key: in_file(word or "''", key, keys)) for key in numbers]
    wrong = [key for key, text in zip(numbers, said, strict=True) if f"{key} is" not in str(text)]
    assert wrong == []
    assert len(numbers) > 60


@pytest.mark.parametrize("text", ["true", "[1, 2, 3]", "{a: b}"])
def test_value_of_another_kind_is_refused_by_every_whole_number(text: str, keys: Keys):
    whole = [key for key, hint in keys.items() if hint is int]
    said = [str(outcome(lambda key=key: in_file(text, key, keys))) for key in whole]
    assert [key for key, line in zip(whole, said, strict=True) if not line.endswith("(int)")] == []


def test_no_key_takes_an_empty_text(keys: Keys):
    said = {key: outcome(lambda key=key: in_file("''", key, keys)) for key in keys}
    assert [key for key, line in said.items() if f"{key} is empty" not in str(line)] == []


def test_key_without_a_value_takes_its_default_only_where_that_is_null(keys: Keys):
    said = {key: outcome(lambda key=key: in_file("", key, keys)) for key in keys}
    assert said["model.optim.lr"] == (
        "model.optim.lr is empty: it must be a finite number (float); give it a value, or leave "
        "the key out"
    )
    assert [key for key, got in said.items() if got is not None and "is empty" not in got] == []


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("seed_everything: -1", "seed_everything is -1: it must be a whole number (int) from 0 to 4294967295"),
        ("seed_everything: 010", "seed_everything is 010: a leading zero means base 8 to YAML and nothing to a command line; write the number without it"),
        ("trainer.precision: fp16", "trainer.precision is fp16: it must be one of auto, bf16-mixed, 16-mixed, 32-true, bf16-true, 16-true, 64-true, bf16, 16, 32, 64"),
        ("model.optim.betas: [1]", "model.optim.betas is [1]: it must be a list of 2, each a finite number (float)"),
        ("data.mixture: {a: .nan}", "data.mixture is {'a': nan}: it must be a mapping of names, each to a finite number (float) or null"),
        ("data.rows: on", "data.rows is on: it must be one of split, truncate or null"),
        ("model: [1]", "model is [1]; it is a section: write its keys below it, two spaces in, as in configs/"),
        ("trainer: {max_steps: 3}\ntrainer.max_steps: 4", "trainer.max_steps is written twice, with 3 and 4"),
        ("trainer:\n  default_root_dir:", "trainer.default_root_dir is empty: it must be a text; give it a value, or leave the key out"),
        ("trainer.max_steps: 1e30", "trainer.max_steps is 1e30: it must be finite and below 2^63"),
    ],
)  # fmt: skip
def test_wrong_value_is_named_with_its_rule(text: str, line: str, keys: Keys):
    sections = {key.rsplit(".", 1)[0]: None for key in keys if "." in key}
    assert outcome(lambda: read_config(text, sections | keys)) == line


def test_names_in_lists_and_mappings_stay_as_written(keys: Keys):
    text = "samples.prompts: [2024-01-01, 12e3, on]\ndata.mixture: {12e3: 1, 2024: 2e0}"
    assert read_config(text, keys) == {
        "samples": {"prompts": ["2024-01-01", "12e3", "on"]},
        "data": {"mixture": {"12e3": 1, "2024": 2}},
    }


def test_anchors_and_merges_are_read_by_the_key_they_stand_at(keys: Keys):
    text = "base: &b {run: &r 12e3, offline: true}\ntracker: {<<: *b, run: 1e3}\ntrainer: {max_steps: *r}"
    assert read_config(text, keys | {"tracker": None, "trainer": None}) == {
        "base": {"run": 12000, "offline": True},
        "tracker": {"run": "1e3", "offline": True},
        "trainer": {"max_steps": 12000},
    }


def test_key_of_a_class_refuses_an_empty_text_on_the_command_line(keys: Keys):
    classes = [key for key, hint in keys.items() if not is_plain(hint)]
    said = {key: outcome(lambda key=key: on_line("", key, keys)) for key in classes}
    assert "trainer.callbacks" in said
    assert [key for key, line in said.items() if f"{key} is empty" not in str(line)] == []


@pytest.mark.parametrize("value", ["12e3", "010", "on", "2024-01-01", "1e-05", 1e-05, 1e300, None])
def test_saved_value_is_read_back_the_same(value: Any):
    assert load_yaml(dump_yaml({"init_args": {"a": value}})) == {"init_args": {"a": value}}


def test_value_that_is_not_utf8_is_refused_by_every_key(keys: Keys):
    said = {key: outcome(lambda key=key: on_line("\udcff", key, keys)) for key in keys}
    rule = "is \udcff: it is not UTF-8; give it in UTF-8, or rename the file"
    assert said == {key: f"{key} {rule}" for key in keys}


# Paths


@pytest.mark.parametrize("key", PATHS)
def test_home_folder_of_every_path_is_written_in_full(
    key: str, keys: Keys, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("HOME", "/home/user")
    assert in_file("~/a", key, keys) == on_line("~/a", key, keys) == "/home/user/a"


@pytest.mark.parametrize(
    ("path", "problem"),
    [
        ("''", "is empty: it must name a path; check that the shell variable in it is set, or leave it out"),
        ("' '", "is empty: it must name a path; check that the shell variable in it is set, or leave it out"),
        ("$HOME/a", "is $HOME/a: variables ($HOME) are replaced by a shell only; write the path in full, or give it in double quotes on the command line"),
        ("x/${RUN}", "is x/${RUN}: variables (${RUN}) are replaced by a shell only; write the path in full, or give it in double quotes on the command line"),
        ('"C:\\runs\\a"', "is 'C:\\runs\\x07': a path holds no control characters; remove them (in YAML, a path with backslashes stands in single quotes)"),
        ("s3://a/b", "is s3://a/b: it must be a path on this machine, not a s3:// address; fetch or mount it, and name the local path"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("key", PATHS)
def test_path_that_is_none_is_refused_by_every_key(path: str, problem: str, key: str, keys: Keys):
    assert outcome(lambda: in_file(path, key, keys)) == f"{key} {problem}"


def test_paths_of_a_mixture_follow_the_same_rule(keys: Keys, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HOME", "/home/user")
    assert in_file("{~/a: 1, b: 2}", "data.mixture", keys) == {"/home/user/a": 1, "b": 2}
    assert "data.mixture is empty: it must name a path" in outcome(
        lambda: in_file("{'': 1}", "data.mixture", keys)
    )


def test_everything_of_a_run_is_in_the_home_folder(
    lightning: Lightning, run_yaml: RunYaml, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    overrides = {
        "trainer.default_root_dir": "~/mine",
        "tracker.run": "12e3",
        "trainer.max_steps": 2,
    }
    code, _, err = lightning(
        "fit", "--config", run_yaml(overrides | {"trainer.val_check_interval": 2})
    )
    assert code == 0, err
    names = {path.name for path in (tmp_path / "mine").iterdir()}
    assert names >= {"metrics.csv", "config.yaml", "checkpoints", "tensorboard", "run.json"}
    assert not (tmp_path / "~").exists()


# Names of other trainers


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("learning_rate", "model.optim.lr"),
        ("model.optim.learning_rate", "model.optim.lr"),
        ("batch-size", "data.micro_batch_size"),
        ("max_iters", "trainer.max_steps"),
        ("n_layer", "model.config.n_layers"),
        ("model.hidden_size", "model.config.d_model"),
        ("block_size", "data.seq_len"),
        ("trainer.gradient_accumulation_steps", "trainer.accumulate_grad_batches"),
        ("checkpoint.interval", "checkpoint.every_n_steps"),
        ("validation.freq", "trainer.val_check_interval"),
        ("training.max_norm", "trainer.gradient_clip_val"),
        ("dtype", "trainer.precision"),
        ("throughput.peak", "throughput.peak_tflops"),
        ("optimizer", "model.optim"),
        ("confg", "config"),
    ],
)  # fmt: skip
def test_name_of_other_trainers_leads_to_the_key(lightning: Lightning, given: str, meant: str):
    code, _, err = lightning("fit", f"--{given}", 1)
    assert code == 2
    assert err == f"error: {given} is not a known key; did you mean {meant}?\n"


@pytest.mark.parametrize(
    "given",
    [
        "fsdp",
        "bias",
        "hub_model_id",
        "embedding_lr",
        "model.name",
        "checkpoint.enable",
        "trainer.a",
    ],
)
def test_key_without_a_neighbour_gets_no_false_one(given: str, keys: Keys):
    assert "did you mean" not in hinted(f"Unrecognized arguments: --{given} 1", keys)


@pytest.mark.parametrize(
    ("word", "way"),
    [
        ("b.yaml", "write --config b.yaml, for each file its own --config"),
        ("trainer.max_steps=3", "write --trainer.max_steps=3"),
        ("max_steps", "write --KEY VALUE, with quotes around a value with spaces"),
    ],
)
def test_word_that_no_option_takes_is_named_with_the_way(
    lightning: Lightning, run_yaml: RunYaml, word: str, way: str
):
    code, _, err = lightning("fit", "--config", run_yaml(), word)
    assert (code, err) == (2, f"error: {word} is not an option; {way}\n")


def test_keys_behind_the_names_of_others_exist(keys: Keys):
    assert ALIASES.keys() <= keys.keys()


def test_whole_number_of_a_class_may_have_an_exponent(lightning: Lightning, run_yaml: RunYaml):
    stops = ["--trainer.callbacks=lightning.pytorch.callbacks.EarlyStopping"]
    stops += ["--trainer.callbacks.monitor=val/loss", "--trainer.callbacks.patience=1e3"]
    config = run_yaml({"trainer.fast_dev_run": 1})
    code, _, err = lightning("fit", "--config", config, *stops)
    assert code == 0, err


def test_argument_of_a_class_is_named_with_its_kind(lightning: Lightning, run_yaml: RunYaml):
    stops = [{"class_path": "EarlyStopping", "init_args": {"monitor": 12}}]
    code, _, err = lightning("fit", "--config", run_yaml({"trainer.callbacks": stops}))
    assert code == 2
    assert err == (
        "error: trainer.callbacks: monitor is 12: it must be str; write a text that looks like a "
        "number in quotes\n"
    )
