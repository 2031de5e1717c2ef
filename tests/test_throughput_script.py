"""The comparison of trainers, as a script that others read the JSON of."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.slow
def test_throughput_script_compares_what_is_there_and_names_what_is_not(corpus: Path):
    words = ["--preset", "mini", "--rounds", "1", "--steps", "12", "--data", str(corpus), "--json"]
    words += ["--cases", "ours,bare,loop,plain,nanogpt=/no/such/checkout"]
    command = [sys.executable, "benchmarks/throughput.py", *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    result = json.loads(done.stdout)
    assert result["systems"].keys() == {"ours", "bare", "loop", "plain", "plain (memory kept)"}
    for figures in result["systems"].values():
        assert figures.keys() == {"tokens_per_s", "flops_per_s", "peak_rss_bytes"}
        assert min(figures.values()) > 0
    ours, loop = result["systems"]["ours"], result["systems"]["loop"]
    assert result["ours_vs_loop"] == pytest.approx(ours["tokens_per_s"] / loop["tokens_per_s"])
    share = ours["flops_per_s"] / result["peak_flops_per_s"]
    assert result["ours_vs_peak"] == pytest.approx(share)
    # Nothing is made up for a peer that is not there.
    assert not result.keys() & {"ours_vs_best_peer", "ours_rss_vs_leanest_peer"}
    assert result["not_measured"].keys() == {
        f"nanogpt=/no/such/checkout, {memory}" for memory in ("shipped", "kept")
    }
    assert "No such file or directory" in result["not_measured"]["nanogpt=/no/such/checkout, kept"]


@pytest.mark.slow
def test_all_own_loops_learn_the_same(corpus: Path):
    losses = {}
    shape = {"vocab_size": 320, "d_model": 32, "n_layers": 2, "n_heads": 2, "n_kv_heads": 1}
    shape |= {"ffn_dim": 48, "seq_len": 16, "micro_batch": 2, "accumulate": 2, "bf16": False}
    for name in ("bare", "loop", "plain"):
        words = [name, json.dumps(shape), "kept", str(corpus), "unused"]
        command = [sys.executable, "benchmarks/systems.py", *words]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
        losses[name] = json.loads(done.stdout)["losses"]
    assert losses["bare"] == pytest.approx(losses["plain"], rel=1e-4)
    assert losses["loop"] == pytest.approx(losses["plain"], rel=1e-4)
    assert losses["plain"][-1] < losses["plain"][0]
