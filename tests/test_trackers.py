"""Experiment trackers: the same run of theirs through kills and resumes, without a network."""

import json
import re
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from conftest import Lightning, RunYaml, cut_back
from lightning.pytorch.loggers import Logger

from callbacks.loggers import trackers
from callbacks.loggers.trackers import run_id


class Fake(Logger):
    """Keeps what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.logged: list[tuple[int | None, dict[str, float]]] = []

    @property
    def name(self) -> str:
        return "fake"

    @property
    def version(self) -> str:
        return "1"

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.logged.append((step, metrics))

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        pass


def refusal(lightning: Lightning, path: Path) -> str:
    code, _, err = lightning("fit", "--config", path)
    assert code == 2, err
    return err.splitlines()[-1]


def test_a_tracker_that_is_not_installed_is_refused_with_the_way_out(
    lightning: Lightning, run_yaml: RunYaml, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(trackers.importlib.util, "find_spec", lambda name: None)
    told = refusal(lightning, run_yaml({"tracker.name": "swanlab"}))
    assert "tracker.name is swanlab, but that package is not installed" in told
    assert "pip install -e '.[swanlab]'" in told


def test_an_unknown_tracker_is_refused(lightning: Lightning, run_yaml: RunYaml):
    assert "tracker.name" in refusal(lightning, run_yaml({"tracker.name": "mlflow"}))


def test_swanlab_gets_a_name_that_it_takes_and_goes_on(
    lightning: Lightning, run_yaml: RunYaml, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """A stand-in that is as strict about names as the package."""
    begun: list[dict[str, Any]] = []

    class SwanLabLogger(Fake):
        def __init__(self, **settings: Any) -> None:
            super().__init__()
            assert re.fullmatch(r"[a-z0-9]{21}", settings["id"])
            begun.append(settings)

    module = types.ModuleType("swanlab.integration.pytorch_lightning")
    cast(Any, module).SwanLabLogger = SwanLabLogger
    for name in ("swanlab", "swanlab.integration"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(trackers.importlib.util, "find_spec", lambda name: name)
    path = run_yaml({"tracker.name": "swanlab", "tracker.offline": True})
    assert lightning("fit", "--config", path)[0] == 0
    cut_back(tmp_path / "run", 4)
    # A start without it does not forget it.
    assert lightning("fit", "--config", path, "--tracker.name", "null")[0] == 0
    cut_back(tmp_path / "run", 4)
    code, _, err = lightning("fit", "--config", path)
    assert code == 0, err
    assert [one["mode"] for one in begun] == ["offline", "offline"]
    assert begun[0]["id"] == begun[1]["id"] == run_id(tmp_path / "run")


def test_nobody_logged_in_is_one_line(
    lightning: Lightning, run_yaml: RunYaml, monkeypatch: pytest.MonkeyPatch
):
    error = type("UsageError", (Exception,), {"__module__": "wandb.errors"})

    def refuse(*_: Any) -> None:
        raise error("No API key configured. Use `wandb login` to log in.")

    monkeypatch.setattr("callbacks.run.lightning_cli.make_logger", refuse)
    code, _, err = lightning("fit", "--config", run_yaml({"tracker.name": "wandb"}))
    assert code == 1
    assert "Traceback" not in err
    assert "error: No API key configured" in err
    assert "tracker.offline true keeps figures here" in err


def test_a_run_keeps_its_name(tmp_path: Path):
    first = run_id(tmp_path)
    assert first != run_id(tmp_path)
    (tmp_path / "run.json").write_text(json.dumps({"tracker_id": first}))
    assert run_id(tmp_path) == first


@pytest.fixture
def wandb_offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    wandb = pytest.importorskip("wandb", reason="its offline mode cannot be tried without it")
    for name in ("WANDB_CACHE_DIR", "WANDB_CONFIG_DIR", "WANDB_DATA_DIR"):
        monkeypatch.setenv(name, str(tmp_path / "wandb-home"))
    monkeypatch.setenv("WANDB_SILENT", "true")
    yield
    wandb.teardown()


@pytest.mark.slow
def test_wandb_offline_goes_on_with_the_same_run(
    lightning: Lightning, run_yaml: RunYaml, tmp_path: Path, wandb_offline: None
):
    path = run_yaml({"tracker.name": "wandb", "tracker.offline": True})
    code, _, err = lightning("fit", "--config", path)
    assert code == 0, err
    root = tmp_path / "run"
    own = json.loads((root / "run.json").read_text())["tracker_id"]
    assert torch.load(root / "checkpoints/step-00000006.ckpt")["tracker_id"] == own
    # Others stay beside it.
    assert (root / "metrics.csv").exists()
    assert list((root / "tensorboard").iterdir())
    cut_back(root, 2)
    code, _, err = lightning("fit", "--config", path)
    assert code == 0, err
    folders = sorted(p.name for p in (root / "wandb").iterdir() if p.name.startswith("offline-run"))
    assert folders
    assert {name.rpartition("-")[2] for name in folders} == {own}


def test_a_checkpoint_knows_the_name_where_run_json_is_lost(
    lightning: Lightning, run_yaml: RunYaml, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    logger = Fake()
    monkeypatch.setattr("callbacks.run.lightning_cli.make_logger", lambda *_: logger)
    code, _, err = lightning("fit", "--config", run_yaml({"tracker.name": "wandb"}))
    assert code == 0, err
    assert [step for step, metrics in logger.logged if "train/loss" in metrics] == [*range(1, 7)]
    root = tmp_path / "run"
    known = json.loads((root / "run.json").read_text())["tracker_id"]
    (root / "run.json").unlink()
    assert run_id(root) == known
