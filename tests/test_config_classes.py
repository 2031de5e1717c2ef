"""Values that name classes and their arguments: one line says what is wrong with them."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import Lightning, RunYaml

LOGGERS = "lightning.pytorch.loggers."
CALLBACKS = "lightning.pytorch.callbacks."
OF_LOGGER = "it must be the class path of a Logger or a list of them or true or false or null"
OF_CALLBACK = "it must be the class path of a Callback or a list of them or null"


def of(path: str, **arguments: object) -> dict:
    """A class as a configuration names it."""
    return {"class_path": path, "init_args": arguments}


def refusal(lightning: Lightning, config: Path) -> str:
    code, _, err = lightning("fit", "--config", config)
    assert code == 2
    assert "Traceback" not in err
    return err.splitlines()[-1]


@pytest.mark.parametrize(
    ("key", "value", "text"),
    [
        (
            "logger",
            of(f"{LOGGERS}CSVLogger"),
            f"trainer.logger is {LOGGERS}CSVLogger: it needs save_dir; give that below init_args "
            "(--trainer.logger.help CLASS shows all)",
        ),
        (
            "callbacks",
            [of(f"{CALLBACKS}EarlyStopping")],
            f"trainer.callbacks is {CALLBACKS}EarlyStopping: it needs monitor; give that below "
            "init_args (--trainer.callbacks.help CLASS shows all)",
        ),
        (
            "logger",
            of("nope.Logger"),
            "trainer.logger is nope.Logger: No module named 'nope'; check its spelling, or install "
            "its package",
        ),
        (
            "logger",
            of(f"{LOGGERS}WandBLogger"),
            f"trainer.logger is {LOGGERS}WandBLogger: module 'lightning.pytorch.loggers' has no "
            "attribute 'WandBLogger'; check its spelling, or install its package",
        ),
        ("logger", of("dict"), f"trainer.logger is dict: {OF_LOGGER}"),
        ("logger", 3, f"trainer.logger is 3: {OF_LOGGER}"),
        ("callbacks", "os", f"trainer.callbacks is os: {OF_CALLBACK}"),
        (
            "callbacks",
            of(f"{CALLBACKS}LearningRateMonitor", logging_interval="abc"),
            "trainer.callbacks: logging_interval is abc: it must be one of step, epoch or null",
        ),
        (
            "callbacks",
            [of(f"{CALLBACKS}EarlyStopping", monitor="val/loss", mode="abc")],
            f"trainer.callbacks is {CALLBACKS}EarlyStopping: `mode` can be min, max, got abc",
        ),
        (
            "strategy",
            of("DDPStrategy", timeout="abc"),
            "trainer.strategy: timeout is abc: it must be a duration such as 0:30:00 or null",
        ),
        (
            "plugins",
            of("lightning.pytorch.plugins.HalfPrecision"),
            "trainer.plugins is HalfPrecision: the precision is that of trainer.precision; leave "
            "the plugin out",
        ),
        (
            "profiler",
            "xla",
            "trainer.profiler is xla: it must be one of simple, advanced, pytorch, null, or the "
            "class path of a Profiler",
        ),
        (
            "max_time",
            {"hours": "a"},
            "trainer.max_time is {'hours': 'a'}: it must be a duration as DD:HH:MM:SS or a mapping "
            "of names, each to a whole number (int) or null",
        ),
        ("min_steps", -1, "trainer.min_steps is -1: it must be 0 or more; leave it out"),
    ],
)
def test_wrong_class_is_told_in_one_line(
    lightning: Lightning, run_yaml: RunYaml, key: str, value: object, text: str
):
    assert refusal(lightning, run_yaml({f"trainer.{key}": value})) == f"error: {text}"


def test_class_whose_package_is_missing_is_told_with_the_package(
    lightning: Lightning, run_yaml: RunYaml
):
    config = run_yaml({"trainer.logger": of(f"{LOGGERS}MLFlowLogger")})
    assert refusal(lightning, config) == (
        f"error: trainer.logger is {LOGGERS}MLFlowLogger: it needs mlflow>=1.0.0; "
        "pip install 'mlflow>=1.0.0'"
    )


def test_callback_that_watches_an_unknown_metric_ends_without_traceback(
    lightning: Lightning, run_yaml: RunYaml
):
    stopping = of(f"{CALLBACKS}EarlyStopping", monitor="nope")
    line = refusal(lightning, run_yaml({"trainer.callbacks": [stopping]}))
    assert "metric `nope` which is not available" in line
    assert "`val/loss`" in line


@pytest.mark.parametrize("value", ["1", "true"])
def test_variables_of_jsonargparse_change_nothing(
    lightning: Lightning, run_yaml: RunYaml, monkeypatch: pytest.MonkeyPatch, value: str
):
    monkeypatch.setenv("JSONARGPARSE_DEBUG", value)
    monkeypatch.setenv("JSONARGPARSE_DEFAULT_ENV", value)
    line = refusal(lightning, run_yaml({"trainer.nope": 1}))
    assert line.startswith("error: trainer.nope is not a known key")


@pytest.mark.parametrize(("program", "dies"), [("lightning", True), ("pytest", False)])
def test_interrupt_during_the_imports_of_the_program_leaves_no_traceback(program: str, dies: bool):
    code = f"import sys; sys.argv = [{program!r}]; import cli, signal, os; os.kill(os.getpid(), 2)"
    done = subprocess.run([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True)
    assert done.returncode == -signal.SIGINT
    assert ("KeyboardInterrupt" not in done.stderr) == dies


@pytest.mark.parametrize("ckpt_path", ["best", "nowhere", os.devnull])
def test_refused_start_leaves_no_folder(
    lightning: Lightning, run_yaml: RunYaml, tmp_path: Path, ckpt_path: str
):
    root = tmp_path / "runs" / "new"
    refusal(lightning, run_yaml({"ckpt_path": ckpt_path, "trainer.default_root_dir": str(root)}))
    assert not root.parent.exists()


def test_run_folder_that_is_a_file_is_refused(
    lightning: Lightning, run_yaml: RunYaml, tmp_path: Path
):
    (tmp_path / "notes").write_text("")
    config = run_yaml({"trainer.default_root_dir": str(tmp_path / "notes")})
    assert refusal(lightning, config) == (
        f"error: trainer.default_root_dir is {tmp_path}/notes: {tmp_path}/notes is no folder; "
        "give another"
    )


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("gone", "does not exist; give last, best, a run folder or a file"),
        ("folder", "holds no checkpoint (step-….ckpt); give last, best, a run folder or a file"),
        ("notes.txt", "is no checkpoint; give last, best, a run folder or a file"),
    ],
)
def test_path_without_checkpoint_is_refused_with_the_choices(
    lightning: Lightning, run_yaml: RunYaml, tmp_path: Path, name: str, text: str
):
    (tmp_path / "folder").mkdir()
    (tmp_path / "notes.txt").write_text("x")
    line = refusal(lightning, run_yaml({"ckpt_path": str(tmp_path / name)}))
    assert line == f"error: ckpt_path {tmp_path / name} {text}"


def test_file_of_another_format_is_named(lightning: Lightning, tmp_path: Path):
    file = tmp_path / "run.toml"
    file.write_text("[trainer]")
    assert refusal(lightning, file) == (
        f"error: --config {file} is a .toml file: YAML and JSON alone are read; write it as YAML, "
        "one key: value a line, as in configs/"
    )
