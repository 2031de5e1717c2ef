"""What several test files need: a small prepared corpus, a run's YAML, the command line."""

import contextlib
import random
import resource
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import cli
from data.prepare import prepare

# Tiny tensors gain nothing from threads, and those wait in vain where the machine is busy.
torch.set_num_threads(1)

Lightning = Callable[..., tuple[int, str, str]]
"""Runs one command line and returns its exit code, stdout and stderr."""

RunYaml = Callable[..., Path]
"""Writes a run's YAML with overrides by dotted key."""

VOCAB_SIZE = 300
N_DOCUMENTS = {"train": 54, "val": 6}
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


def source_text(seed: int) -> str:
    """A few functions of about 500 characters, always the same for a seed."""
    draw = random.Random(seed)
    words = ("alpha", "beta", "gamma", "delta", "count", "total", "index", "value")
    lines = []
    for i in range(6):
        a, b, c = draw.sample(words, 3)
        lines += [f"def {a}_{i}({b}, {c}):", f"    return {b} + {draw.randrange(99)} * {c}", ""]
    return "\n".join(lines)


def document_names() -> list[str]:
    """Names whose hashes put `N_DOCUMENTS` of them into each split."""
    names: dict[str, list[str]] = {"train": [], "val": []}
    number = 0
    while any(len(names[split]) < count for split, count in N_DOCUMENTS.items()):
        name = f"stdlib/module{number}.py"
        split = names["val" if prepare.is_validation(name) else "train"]
        split.append(name)
        number += 1
    return sorted(name for split, count in N_DOCUMENTS.items() for name in names[split][:count])


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A prepared folder: about 60 small Python files, ids below 300, both splits."""
    folder = tmp_path_factory.mktemp("corpus")
    sources = []
    for number, name in enumerate(document_names()):
        path = folder / "sources" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source_text(number), encoding="utf-8")
        sources.append((name, path))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prepare, "python_files", lambda _: sources)
        prepare.prepare_corpus("stdlib", folder / "prepared", VOCAB_SIZE, progress=False)
    return folder / "prepared"


def nest(flat: dict[str, Any]) -> dict[str, Any]:
    """Dotted keys as nested mappings; a key whose value is `...` is left out."""
    nested: dict[str, Any] = {}
    for key, value in flat.items():
        *sections, name = key.split(".")
        place = nested
        for section in sections:
            place = place.setdefault(section, {})
        if value is not ...:
            place[name] = value
    return nested


@pytest.fixture
def run_yaml(corpus: Path, tmp_path: Path) -> RunYaml:
    """Factory of a minimal run: `run_yaml({"trainer.max_steps": 4, "ckpt_path": None})`.

    An override of `...` leaves the key out; `name` is the file's name, for a second one.
    """
    defaults = {
        "seed_everything": 1337,
        "model.compile": False,
        "model.config.vocab_size": 320,
        "model.config.d_model": 16,
        "model.config.n_layers": 2,
        "model.config.n_heads": 2,
        "model.config.ffn_dim": 24,
        "data.path": str(corpus),
        "data.seq_len": 16,
        "data.micro_batch_size": 2,
        "trainer.accelerator": "cpu",
        "trainer.devices": 1,
        "trainer.precision": "32-true",
        "trainer.max_steps": 6,
        "trainer.accumulate_grad_batches": 1,
        "trainer.val_check_interval": 3,
        "trainer.limit_val_batches": 2,
        "trainer.log_every_n_steps": 1,
        "trainer.default_root_dir": str(tmp_path / "run"),
        "checkpoint.every_n_steps": 2,
        # Else each start measures this CPU for a second.
        "throughput.peak_tflops": 1.0,
        "ckpt_path": "last",
    }

    def write(overrides: dict[str, Any] | None = None, name: str = "run.yaml") -> Path:
        path = tmp_path / name
        path.write_text(yaml.safe_dump(nest(defaults | (overrides or {}))), encoding="utf-8")
        return path

    return write


@pytest.fixture(autouse=True)
def signals_reach_this_process() -> Iterator[None]:
    """Fail a test that leaves signals blocked: later programs would not hear them."""
    yield
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == set()


@pytest.fixture
def lightning(capsys: pytest.CaptureFixture[str]) -> Iterator[Lightning]:
    """Run the command line in this process: `code, out, err = lightning("fit", ...)`."""
    before = {number: signal.getsignal(number) for number in SIGNALS}

    def run(*argv: object) -> tuple[int, str, str]:
        capsys.readouterr()
        code = cli.main([str(word) for word in argv])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    yield run
    for number, handler in before.items():
        signal.signal(number, handler)


def cut_back(root: Path, step: int) -> None:
    """Leave the folder as a kill just after the save of that step leaves it."""
    for path in (root / "checkpoints").iterdir():
        if int(path.stem.split("-")[1]) > step:
            path.unlink()
    (root / "weights.safetensors").unlink(missing_ok=True)  # written at the end alone


def page(root: Path) -> EventAccumulator:
    """What TensorBoard reads of a run."""
    return EventAccumulator(str(root / "tensorboard")).Reload()


@contextlib.contextmanager
def full_disk(size: int) -> Iterator[None]:
    """No file can grow past a size."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
