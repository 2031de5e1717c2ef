"""What watching costs: steps of the small run with all its figures against the same without any.

    python benchmarks/watching.py [--pairs 5] [--steps 60] [--record]

Fresh processes take turns; compared is the time of a step, from the fifth on, logs and all. Run it
on an idle machine.
"""

import argparse
import statistics
import sys

from record import record
from shape import Shape
from throughput import CORPORA, ROOT, measure, spread


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--record", action="store_true", help="put the result into RESULTS.md")
    options = parser.parse_args()
    (ROOT / "runs").mkdir(exist_ok=True)
    shape = Shape(tied=True, micro_batch=4, steps=options.steps)
    seconds: dict[str, list[float]] = {"ours": [], "unwatched": []}
    for _ in range(options.pairs):
        for name, taken in seconds.items():
            got = measure(name, shape, "shipped", ROOT / "corpora" / CORPORA["small"])
            if isinstance(got, str):
                raise SystemExit(f"{name}: {got}")
            taken.append(got["seconds"])
            print(f"{name}: {1e3 * got['seconds']:.1f} ms a step", file=sys.stderr)
    on, off = (statistics.median(taken) for taken in seconds.values())
    ratios = [watched / bare for watched, bare in zip(*seconds.values(), strict=True)]
    text = (
        f"{options.steps} steps of small.yaml, {options.pairs} pairs: {1e3 * on:.1f} ms a step "
        f"with all figures every 10 steps, {1e3 * off:.1f} ms with none; ratio in a pair "
        f"{spread(ratios, '.3f')}."
    )
    print(text)
    if options.record:
        record("Cost of watching", text)


if __name__ == "__main__":
    main()
