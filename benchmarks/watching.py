"""What watching costs: the small run with all its figures against the same run with none.

    python benchmarks/watching.py [--pairs 5] [--steps 60] [--record]

Fresh processes take turns; the figure is the ratio of median times from the first step to the
last. Run it on an idle machine.
"""

import argparse
import shutil
import statistics
import tempfile
from pathlib import Path

from record import record
from restart import ROOT, fit

# All figures at the small run's own interval, and none.
ON = ["--trainer.log_every_n_steps=10"]
OFF = ["--trainer.log_every_n_steps=1000000", "--trainer.logger=false", "--health.enabled=false"]


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--record", action="store_true", help="put the result into RESULTS.md")
    options = parser.parse_args()
    (ROOT / "runs").mkdir(exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="watching-", dir=ROOT / "runs"))
    seconds: dict[str, list[float]] = {"on": [], "off": []}
    length = [f"--trainer.max_steps={options.steps + 1}", "--trainer.limit_val_batches=0"]
    for _ in range(options.pairs):
        for name, switches in (("on", ON), ("off", OFF)):
            seconds[name].append(fit("small", folder / name, *length, *switches)[1])
            shutil.rmtree(folder / name)
    shutil.rmtree(folder)
    on, off = statistics.median(seconds["on"]), statistics.median(seconds["off"])
    text = (
        f"{options.steps} steps of small.yaml, medians of {options.pairs} pairs: {on:.2f} s with "
        f"all figures every 10 steps, {off:.2f} s with none: {on / off - 1:+.2%}."
    )
    print(text)
    if options.record:
        record("Cost of watching", text)


if __name__ == "__main__":
    main()
