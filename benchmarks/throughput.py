"""How many tokens a second each trainer learns from, on one model, in one run.

    python benchmarks/throughput.py [--cases ours,bare,loop,plain,hf,hf-compiled,litgpt]
        [--rounds 3] [--preset small|mini] [--tied] [--accumulate 1] [--precision bf16|fp32]
        [--json] [--record]

Every system runs in fresh processes that take turns, `--rounds` times, as it ships and with freed
memory kept by the allocator (what ours does by itself), on the same tokens; all but nanoGPT, which
draws its own, in the same order.
Medians over rounds, with the least and the most. `make bench-env` installs the peers. Run it on an
idle machine.

  ours         lightning fit: logs, figures, warnings, clip and schedule on
  bare         the same kernels in a loop without Lightning
  loop         the fastest sound hand-written loop (yardstick.py), kept as it is
  plain        a loop as articles write it (yardstick.py)
  hf           Hugging Face's Trainer on its Llama; hf-compiled: with torch_compile
  litgpt       litgpt's pretraining, which always compiles
  nanogpt=PATH, minimind=PATH
               the training script of a checkout, compiled; on a CPU both compute in fp32
"""

import argparse
import dataclasses
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from record import record
from shape import Shape

from lm.flops import flops_per_token

ROOT = Path(__file__).resolve().parent.parent
PRESETS = {
    "small": Shape(),
    # A tenth of the parameters: what a trainer costs by itself shows here.
    "mini": Shape(
        vocab_size=4096, d_model=128, n_layers=2, ffn_dim=344, seq_len=128, warm_steps=20, steps=200
    ),
}
CORPORA = {"small": "python-32k", "mini": "stdlib-2k"}
OWN = ("ours", "bare", "loop", "plain")
LOOPS = ("bare", "loop")
"""Without a shipped form: they always keep freed memory, as ours does."""


def flops(shape: Shape) -> int:
    """FLOPs of a token, counted alike for all systems."""
    return flops_per_token(shape.model_config, shape.seq_len)


def matmul_limit(shape: Shape) -> float:
    """FLOP/s of the fastest matrix product among those of the model, of about a second each."""
    import torch

    kind = torch.bfloat16 if shape.bf16 else torch.float32
    rows, dim = shape.micro_batch * shape.seq_len, shape.d_model
    best = 0.0
    for m, k, n in (
        (rows, dim, shape.ffn_dim),
        (rows, shape.ffn_dim, dim),
        (shape.ffn_dim, rows, dim),
        (1024, dim, shape.vocab_size),
        (2048, 2048, 2048),
    ):
        left, right, out = (
            torch.ones(size, dtype=kind) for size in ((m, k), (k, n), (m, n))
        )  # fmt: skip
        end = time.perf_counter() + 1
        while (began := time.perf_counter()) < end:
            torch.mm(left, right, out=out)
            best = max(best, 2 * m * k * n / (time.perf_counter() - began))
    return best


def measure(
    name: str, shape: Shape, allocator: str, tokens: Path, timeout: float | None = None
) -> dict[str, Any] | str:
    """What one process of a system gives, or why it gave nothing."""
    (ROOT / "runs").mkdir(exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="throughput-", dir=ROOT / "runs"))
    words = [
        sys.executable,
        str(ROOT / "benchmarks" / "systems.py"),
        name,
        json.dumps(dataclasses.asdict(shape)),
        allocator,
        str(tokens),
        str(folder),
    ]
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    try:
        done = subprocess.run(
            words, cwd=ROOT, capture_output=True, text=True, env=environment, timeout=timeout
        )
    finally:
        shutil.rmtree(folder)
    if done.returncode == 0:
        return json.loads(done.stdout.splitlines()[-1])
    lines = done.stderr.strip().splitlines() or ["no word"]
    return lines[-1][:200]


def cases(names: list[str]) -> list[tuple[str, str]]:
    """Each system with each allocator that it is measured under."""
    taken = []
    for name in names:
        if name == "ours":
            taken.append((name, "shipped"))
        elif name in LOOPS:
            taken.append((name, "kept"))
        else:
            taken += [(name, "shipped"), (name, "kept")]
    return taken


def spread(values: list[float], form: str = ".0f") -> str:
    middle = statistics.median(values)
    return f"{middle:{form}} ({min(values):{form}}–{max(values):{form}})"


def ratios(
    rates: dict[tuple[str, str], list[float]], limit: float, per_token: int
) -> dict[str, list[float]]:
    """Ours against the others, a ratio for each round; what was not measured is left out."""
    ours = rates[("ours", "shipped")]
    groups: dict[str, list[list[float]]] = {
        "ours_vs_best_peer": [],
        "ours_vs_best_peer_equal_allocator": [],
        "ours_vs_loop": [],
        "ours_vs_bare": [],
        "ours_vs_plain": [],
    }
    for (name, allocator), values in rates.items():
        if name not in OWN:
            kept = "_equal_allocator" if allocator == "kept" else ""
            groups[f"ours_vs_best_peer{kept}"].append(values)
        elif name != "ours" and (name in LOOPS or allocator == "shipped"):
            groups[f"ours_vs_{name}"].append(values)
    found = {
        name: [own / max(others) for own, *others in zip(ours, *group, strict=True)]
        for name, group in groups.items()
        if group
    }
    return found | {"ours_vs_peak": [rate * per_token / limit for rate in ours]}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=str(__doc__), formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cases", default="ours,bare,loop,plain,hf,hf-compiled,litgpt")
    parser.add_argument("--preset", choices=PRESETS, default="small")
    parser.add_argument("--tied", action="store_true")
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--micro_batch", type=int)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--precision", choices=("bf16", "fp32"), default="bf16")
    parser.add_argument("--data", type=Path, help="prepared folder; unset: that of the preset")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    parser.add_argument("--record", action="store_true", help="put the tables into RESULTS.md")
    options = parser.parse_args()
    given = {
        "tied": options.tied,
        "accumulate": options.accumulate,
        "bf16": options.precision == "bf16",
        **({"micro_batch": options.micro_batch} if options.micro_batch else {}),
        **({"steps": options.steps} if options.steps else {}),
    }
    shape = dataclasses.replace(PRESETS[options.preset], **given)
    data = options.data or ROOT / "corpora" / CORPORA[options.preset]
    if not (data / "train.bin").is_file():
        raise SystemExit(f"{data} holds no train.bin: lightning prepare makes it")
    results: dict[tuple[str, str], list[dict[str, Any]]] = {}
    missing: dict[tuple[str, str], str] = {}
    limits = []
    for number in range(options.rounds):
        limits.append(matmul_limit(shape))
        for case in cases(options.cases.split(",")):
            if case in missing:
                continue
            got = measure(case[0], shape, case[1], data)
            if isinstance(got, str):
                missing[case] = got
                results.pop(case, None)
                continue
            results.setdefault(case, []).append(got)
            rate = shape.tokens_per_step / got["seconds"]
            print(f"round {number + 1}: {case[0]}, {case[1]}: {rate:.0f}", file=sys.stderr)
    limit, per_token = max(limits), flops(shape)
    rates = {
        case: [shape.tokens_per_step / one["seconds"] for one in ones]
        for case, ones in results.items()
    }
    peaks = {
        case: statistics.median(one["peak_bytes"] for one in ones) for case, ones in results.items()
    }
    medians = {case: statistics.median(values) for case, values in rates.items()}
    found = ratios(rates, limit, per_token) if ("ours", "shipped") in rates else {}
    lean = [peak for case, peak in peaks.items() if case[0] not in OWN]
    if lean and found:
        found["ours_rss_vs_leanest_peer"] = [peaks[("ours", "shipped")] / min(lean)]
    if options.json:
        systems = {
            name if allocator == "shipped" or name in LOOPS else f"{name} (memory kept)": {
                "tokens_per_s": medians[name, allocator],
                "flops_per_s": medians[name, allocator] * per_token,
                "peak_rss_bytes": peaks[name, allocator],
            }
            for name, allocator in results
        }
        middle = {name: statistics.median(values) for name, values in found.items()}
        not_measured = {f"{name}, {kind}": why for (name, kind), why in missing.items()}
        facts = {"systems": systems, "peak_flops_per_s": limit, "not_measured": not_measured}
        print(json.dumps(facts | middle, indent=1))
        return
    lines = [
        ", ".join(f"{key} {value}" for key, value in dataclasses.asdict(shape).items()) + ".",
        "",
        f"{per_token / 1e6:.1f} MFLOP a token; the fastest matrix product of these shapes: "
        f"{limit / 1e12:.2f} TFLOP/s. {options.rounds} rounds; medians (least–most).",
        "",
        "| system | memory | tokens/s | GFLOP/s | of the limit | peak MB | losses |",
        "|---|---|---|---|---|---|---|",
    ]
    for case, values in rates.items():
        speed = medians[case] * per_token
        losses = results[case][0]["losses"]
        first_last = f"{losses[0]:.4f} … {losses[-1]:.4f}" if losses else "–"
        lines.append(
            f"| {case[0]} | {case[1]} | {spread(values)} | {speed / 1e9:.0f} | {speed / limit:.1%} "
            f"| {peaks[case] / 1e6:.0f} | {first_last} |"
        )
    lines += [
        f"| {name} | {kind} | not measured: {why} | | | | |"
        for (name, kind), why in missing.items()
    ]
    lines += ["", "| ratio in a round | median (least–most) |", "|---|---|"]
    lines += [f"| {name} | {spread(values, '.3f')} |" for name, values in found.items()]
    print("\n".join(lines))
    if options.record:
        record(f"Throughput, {options.preset}", "\n".join(lines))


if __name__ == "__main__":
    main()
