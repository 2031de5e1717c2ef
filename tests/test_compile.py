"""Compiled runs: how often they compile, and what happens where that fails."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import RunYaml

from lm.softmax import find_compiler

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_compiler() is None, reason="no C++ compiler is on the path"),
]
# Outside of these tests' own shape checks, which the compiler would trace.
PROGRAM = """
import json, sys
import cli
import lm.compile
lm.compile.COMPILE_FLOPS = 0
code = cli.main(sys.argv[1:])
from torch._dynamo.utils import counters
print(json.dumps([code, counters["stats"].get("unique_graphs", 0)]))
"""


# A compiler that can do the forward pass only.
ONE_WAY = """
import torch._inductor.compile_fx as inductor
whole = inductor._compile_fx_inner
def forward_only(*words, **settings):
    if settings.get("is_backward"):
        raise RuntimeError("no kernel for that")
    return whole(*words, **settings)
inductor._compile_fx_inner = forward_only
"""


def run(path: Path, before: str = "", **environment: str) -> tuple[int, int, str]:
    """Exit code, graphs compiled, and stderr of a run in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-c", before + PROGRAM, "fit", "--config", str(path)],
        capture_output=True,
        text=True,
        env=os.environ | environment,
        check=True,
    )
    code, graphs = json.loads(done.stdout.splitlines()[-1])
    return code, graphs, done.stderr


@pytest.mark.parametrize(
    "more", [{}, {"model.config.n_experts": 2, "trainer.precision": "bf16-mixed"}]
)
def test_training_validation_and_samples_take_two_graphs(run_yaml: RunYaml, more: dict[str, Any]):
    settings = {
        "model.compile": True,
        "trainer.max_steps": 10,
        "samples.prompts": ["def f(", "x"],
        "samples.every_n_steps": 4,
        "samples.max_new_tokens": 5,
    }
    code, graphs, err = run(run_yaml(settings | more))
    assert code == 0, err
    # One for training and one without gradients, for validation.
    assert graphs == 2


def test_auto_goes_on_uncompiled_where_compiling_fails(run_yaml: RunYaml, tmp_path: Path):
    settings = {"model.compile": "auto"}
    broken = {"CXX": "/bin/false", "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")}
    code, _, err = run(run_yaml(settings), **broken)
    assert code == 0, err
    assert err.count("compile: failed, so the run is not compiled: ") == 1
    assert "done: 6 steps" in err
    assert "Traceback" not in err


def test_auto_goes_on_uncompiled_where_the_backward_pass_cannot_be_compiled(
    run_yaml: RunYaml, tmp_path: Path
):
    cache = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")}
    code, _, err = run(run_yaml({"model.compile": "auto"}), before=ONE_WAY, **cache)
    assert code == 0, err
    assert err.count("compile: failed, so the run is not compiled: ") == 1
    assert "no kernel for that" in err
    assert "done: 6 steps" in err
    assert "Traceback" not in err


def test_what_was_asked_for_fails_with_the_way_out(run_yaml: RunYaml, tmp_path: Path):
    settings = {"model.compile": True}
    broken = {"CXX": "/bin/false", "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")}
    code, _, err = run(run_yaml(settings), **broken)
    assert code == 1
    assert "torch.compile failed: --model.compile false runs without" in err
