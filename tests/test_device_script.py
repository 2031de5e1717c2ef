"""The script for a lent card, run on a CPU: its paths work before a card is there."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
PEERS = {"ours": "torch", "hf-compiled": "accelerate", "litgpt": "litgpt"}


def run(out: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"OUT": str(out), "PYTHON": sys.executable, "OMP_NUM_THREADS": "1"}
    command = ["bash", "benchmarks/device.sh", *words]
    return subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, env=environment, check=False
    )


@pytest.mark.slow
def test_dry_run_takes_every_path(tmp_path: Path):
    done = run(tmp_path, "--dry")
    lines = [json.loads(line) for line in (tmp_path / "device.jsonl").read_text().splitlines()]
    assert done.returncode == 0, [line for line in lines if "error" in line]
    by_name = {line["name"]: line for line in lines}
    assert len(by_name) == len(lines) == 14
    for line in lines:
        assert not line.keys() & {"error", "left_out"}
        if line["name"].startswith("resume"):
            assert line["verdict"] == "drill: 2 kills, 0 differing bits"
        elif package := PEERS.get(line["name"].partition(",")[0]):
            # Most are an extra; one that is missing is named.
            if importlib.util.find_spec(package):
                assert line["tokens_per_sec"] > 0
            else:
                assert package in line["not_measured"]
        elif line["name"] not in ("card", "loss parity"):
            assert line["throughput/tokens_per_sec"] > 0
    parity = [line for name, line in by_name["loss parity"].items() if name.startswith("cpu ")]
    for loss, norm in parity[1:]:
        assert loss == pytest.approx(parity[0][0], rel=1e-3)
        assert norm == pytest.approx(parity[0][1], rel=2e-2)


@pytest.mark.slow
def test_what_no_time_is_left_for_is_named(tmp_path: Path):
    assert run(tmp_path, "--dry", "--minutes", "0").returncode == 0
    lines = [json.loads(line) for line in (tmp_path / "device.jsonl").read_text().splitlines()]
    assert all(line["left_out"] == "no time was left" for line in lines)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA device is there")
def test_without_a_card_it_says_so(tmp_path: Path):
    done = run(tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith("error: no CUDA device is found; --dry runs the same paths")
    assert not (tmp_path / "device.jsonl").exists()
