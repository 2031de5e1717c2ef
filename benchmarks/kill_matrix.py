"""The fire drill over ranks, accumulation and workers.

    python benchmarks/kill_matrix.py [--kills 17] [--ranks 1 2 4] [--steps 12] [--record]

Prints a table, and with --record puts it into RESULTS.md. Exits with 1 when a run differs in a bit
or could not go on.
"""

import argparse
import random
import shutil
import sys
import tempfile
from itertools import product
from pathlib import Path

from record import record

from callbacks.drill.drill import drill, plan_kills

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
    parser.add_argument("--record", action="store_true", help="put the table into RESULTS.md")
    options = parser.parse_args()
    draw = random.Random(options.seed)
    lines: list[str] = []

    def say(line: str) -> None:
        lines.append(line)
        print(line, flush=True)

    say("| ranks | accumulate | workers | kills | by moment | differing bits |")
    say("|---|---|---|---|---|---|")
    kills = bits = stuck = 0
    for ranks, accumulate, workers in product(options.ranks, options.accumulate, options.workers):
        root = Path(tempfile.mkdtemp(prefix="kill-matrix-", dir=ROOT / "runs"))
        plan = plan_kills(options.kills, draw, accumulates=accumulate > 1, validates=True)
        fit = arguments(ranks, accumulate, workers, options.steps)
        try:
            outcome = drill(fit, root, plan, draw, lambda line: None)
        except RuntimeError as error:
            stuck += 1
            say(f"| {ranks} | {accumulate} | {workers} | | {error} | |")
            continue
        names = [start.moment.split(":")[0].split(",")[0] for start in outcome.starts if start.code]
        by_moment = ", ".join(f"{names.count(name)} {name}" for name in dict.fromkeys(names))
        cell = (ranks, accumulate, workers, outcome.kills, by_moment, outcome.bits)
        say(f"| {' | '.join(map(str, cell))} |")
        for where, count in outcome.found[:3]:
            say(f"  {where}: {count} bits")
        kills, bits = kills + outcome.kills, bits + outcome.bits
        stuck += outcome.kills < options.kills
        shutil.rmtree(root)
    say(f"\n{kills} kills, {bits} differing bits, {stuck} runs that could not go on")
    if options.record:
        record("Kill matrix", "\n".join(lines))
    return int(bits > 0 or stuck > 0)


if __name__ == "__main__":
    (ROOT / "runs").mkdir(exist_ok=True)
    sys.exit(main())
