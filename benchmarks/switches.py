"""What a switch costs and saves: runs with it against runs without, in turns.

    python benchmarks/switches.py [--rounds 3] [--record]

`lightning fit` in fresh processes on the shape of small.yaml, compiled: activation checkpointing,
normed queries and keys, and experts of the same active size (8, of which a position takes 2). Time
of a step and peak memory, medians with the least and the most of the ratios in a round. Run it on
an idle machine.
"""

import argparse
import statistics
import sys
from typing import Any

from record import record
from shape import Shape
from throughput import CORPORA, ROOT, measure, spread

SWITCHES = ("checkpointed", "normed", "experts")


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--record", action="store_true", help="put the table into RESULTS.md")
    options = parser.parse_args()
    shape, tokens = Shape(tied=True, micro_batch=4, steps=20), ROOT / "corpora" / CORPORA["small"]
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in ("ours", *SWITCHES)}
    for _ in range(options.rounds):
        for name, taken in found.items():
            got = measure(name, shape, "shipped", tokens)
            if isinstance(got, str):
                raise SystemExit(f"{name}: {got}")
            taken.append(got)
            print(f"{name}: {1e3 * got['seconds']:.0f} ms a step", file=sys.stderr)
    lines = [
        "| switch | ms a step | time against none | peak MB | memory against none |",
        "|---|---|---|---|---|",
    ]
    for name, taken in found.items():
        pairs = list(zip(taken, found["ours"], strict=True))
        time, memory = (
            spread([one[key] / plain[key] for one, plain in pairs], ".3f")
            for key in ("seconds", "peak_bytes")
        )
        seconds = statistics.median(one["seconds"] for one in taken)
        peak = statistics.median(one["peak_bytes"] for one in taken)
        label = "none" if name == "ours" else name
        lines.append(f"| {label} | {1e3 * seconds:.0f} | {time} | {peak / 1e6:.0f} | {memory} |")
    text = "\n".join(lines)
    print(text)
    if options.record:
        record("Cost of switches", text)


if __name__ == "__main__":
    main()
