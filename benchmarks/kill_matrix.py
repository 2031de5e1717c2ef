"""The fire drill over ranks, accumulation and workers; prints the table for RESULTS.md.

    python benchmarks/kill_matrix.py [--kills 17] [--ranks 1 2 4] [--steps 12]

Exits with 1 when a run differs in a bit or could not go on.
"""

import argparse
import random
import shutil
import sys
import tempfile
from itertools import product
from pathlib import Path

from callbacks.drill import drill, plan_kills

ROOT = Path(__file__).resolve().parent.parent


def arguments(ranks: int, accumulate: int, workers: int, steps: int) -> list[str]:
    """Options of `lightning fit` for one cell of the matrix, on the tiny configuration."""
    several = ["--trainer.strategy=ddp"] if ranks > 1 else []
    return [
        f"--config={ROOT / 'configs' / 'tiny.yaml'}",
        "--trainer.accelerator=cpu",
        f"--trainer.devices={ranks}",
        *several,
        f"--trainer.accumulate_grad_batches={accumulate}",
        f"--data.num_workers={workers}",
        "--data.micro_batch_size=2",
        f"--trainer.max_steps={steps}",
        f"--trainer.val_check_interval={steps // 3}",
        "--trainer.limit_val_batches=4",
        "--trainer.log_every_n_steps=1",
        "--checkpoint.every_n_steps=2",
        "--model.config.dropout=0.1",
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--kills", type=int, default=17, help="in each cell")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--accumulate", type=int, nargs="+", default=[1, 3])
    parser.add_argument("--workers", type=int, nargs="+", default=[0, 2])
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    draw = random.Random(options.seed)
    print("| ranks | accumulate | workers | kills | by moment | differing bits |")
    print("|---|---|---|---|---|---|", flush=True)
    total = different = 0
    for ranks, accumulate, workers in product(options.ranks, options.accumulate, options.workers):
        root = Path(tempfile.mkdtemp(prefix="kill-matrix-", dir=ROOT / "runs"))
        plan = plan_kills(options.kills, draw, accumulates=accumulate > 1, validates=True)
        fit = arguments(ranks, accumulate, workers, options.steps)
        starts, found, bits = drill(fit, root, plan, draw, lambda line: None)
        kills = [start.moment.split(":")[0].split(",")[0] for start in starts if start.code]
        by_moment = ", ".join(f"{kills.count(name)} {name}" for name in dict.fromkeys(kills))
        cell = (ranks, accumulate, workers, len(kills), by_moment, bits)
        print(f"| {' | '.join(map(str, cell))} |", flush=True)
        for line in found[:3]:
            print(f"  {line}", flush=True)
        total, different = total + len(kills), different + bits
        shutil.rmtree(root)
    print(f"\n{total} kills, {different} differing bits")
    return int(different > 0)


if __name__ == "__main__":
    (ROOT / "runs").mkdir(exist_ok=True)
    sys.exit(main())
