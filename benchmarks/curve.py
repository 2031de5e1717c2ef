"""Whether `lightning fit` learns as a plain loop does: losses of the same 200 steps.

    python benchmarks/curve.py [--steps 200] [--record]

Shape and data of small.yaml, bf16. Beside the distance of ours to the plain loop stands that of the
hand-written loop to it: what kernels alone make of the same arithmetic.
"""

import argparse
import sys

from record import record
from shape import Shape
from throughput import CORPORA, ROOT, measure


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--record", action="store_true", help="put the result into RESULTS.md")
    options = parser.parse_args()
    shape = Shape(tied=True, micro_batch=4, steps=options.steps - Shape().warm_steps)
    losses: dict[str, list[float]] = {}
    for name, allocator in (("ours", "shipped"), ("loop", "kept"), ("plain", "kept")):
        got = measure(name, shape, allocator, ROOT / "corpora" / CORPORA["small"])
        if isinstance(got, str):
            raise SystemExit(f"{name}: {got}")
        losses[name] = got["losses"]
        print(f"{name}: {got['losses'][-1]:.4f}", file=sys.stderr)
    # Ours logs the first step and each tenth.
    steps = [1, *range(10, options.steps + 1, 10)]
    by_step = {
        name: values if len(values) == len(steps) else [values[step - 1] for step in steps]
        for name, values in losses.items()
    }
    apart = {
        name: [abs(a - b) for a, b in zip(by_step[name], by_step["plain"], strict=True)]
        for name in ("ours", "loop")
    }
    lines = ["| steps | plain loop | ours | hand-written loop |", "|---|---|---|---|"]
    for i in range(0, len(steps), 4):
        row = [f"{by_step[name][i]:.4f}" for name in ("plain", "ours", "loop")]
        lines.append(f"| {steps[i]} | {' | '.join(row)} |")
    mean = {name: sum(values) / len(values) for name, values in apart.items()}
    lines += [
        "",
        f"Mean distance to the plain loop over {len(steps)} steps: ours {mean['ours']:.4f} (at "
        f"most {max(apart['ours']):.4f}), hand-written {mean['loop']:.4f} (at most "
        f"{max(apart['loop']):.4f}) nats.",
    ]
    text = "\n".join(lines)
    print(text)
    if options.record:
        record("Losses beside a plain loop", text)


if __name__ == "__main__":
    main()
