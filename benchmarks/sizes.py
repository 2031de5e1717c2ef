"""How time and memory of a step grow with each size of the model and the batch.

    python benchmarks/sizes.py [--rounds 2] [--record]

`lightning fit` in fresh processes; one size is halved and doubled, the others stay. The exponent is
that of a power law through the two ends; that of the arithmetic stands beside it. Time that grows
faster than its arithmetic would be a fault. Run it on an idle machine.
"""

import argparse
import dataclasses
import math
import statistics
import sys
from typing import Any

from record import record
from shape import Shape
from throughput import CORPORA, ROOT, flops, measure

MIDDLE = Shape(tied=True, micro_batch=4)


def resized(name: str, factor: float) -> Shape:
    """The middle shape with one size changed; a width takes heads and feed-forward along."""
    names = ("d_model", "n_heads", "n_kv_heads", "ffn_dim") if name == "d_model" else (name,)
    values = {each: int(factor * getattr(MIDDLE, each)) for each in names}
    return dataclasses.replace(MIDDLE, **values)


def exponent(ends: list[float]) -> float:
    """Of a power law through the values at half and at double size."""
    return math.log(ends[-1] / ends[0]) / math.log(4)


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--sizes", help="some of them, with commas between; unset: all")
    parser.add_argument("--record", action="store_true", help="put the table into RESULTS.md")
    options = parser.parse_args()
    tokens = ROOT / "corpora" / CORPORA["small"]
    lines = [
        "| size | values | tokens/s | peak MB | exponent of time | of its FLOPs | of memory |",
        "|---|---|---|---|---|---|---|",
    ]
    # A larger vocabulary than the corpus' costs the same; a smaller one could not read it.
    all_sizes = {
        "d_model": (0.5, 1, 2),
        "n_layers": (0.5, 1, 2),
        "seq_len": (0.5, 1, 2),
        "micro_batch": (0.5, 1, 2),
        "vocab_size": (1, 2, 4),
    }
    wanted = options.sizes.split(",") if options.sizes else list(all_sizes)
    for name, factors in ((name, all_sizes[name]) for name in wanted):
        shapes = [resized(name, factor) for factor in factors]
        results: list[list[dict[str, Any]]] = [[] for _ in shapes]
        for _ in range(options.rounds):
            for shape, taken in zip(shapes, results, strict=True):
                got = measure("ours", shape, "shipped", tokens)
                if isinstance(got, str):
                    raise SystemExit(f"{name} {getattr(shape, name)}: {got}")
                taken.append(got)
                print(f"{name} {getattr(shape, name)}: {got['seconds']:.3f} s", file=sys.stderr)
        seconds = [statistics.median(one["seconds"] for one in taken) for taken in results]
        peaks = [statistics.median(one["peak_bytes"] for one in taken) for taken in results]
        work = [float(flops(shape) * shape.tokens_per_step) for shape in shapes]
        rates = [shape.tokens_per_step / s for shape, s in zip(shapes, seconds, strict=True)]
        lines.append(
            f"| {name} | {', '.join(str(getattr(shape, name)) for shape in shapes)} "
            f"| {', '.join(f'{rate:.0f}' for rate in rates)} "
            f"| {', '.join(f'{peak / 1e6:.0f}' for peak in peaks)} "
            f"| {exponent(seconds):.2f} | {exponent(work):.2f} | {exponent(peaks):.2f} |"
        )
    text = "\n".join(lines)
    print(text)
    if options.record:
        record("Cost against size", text)


if __name__ == "__main__":
    main()
