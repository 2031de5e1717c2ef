"""What saving costs a run, and how soon a resumed one trains again.

    python benchmarks/restart.py [--pairs 5] [--record]

Each figure is the median over pairs of fresh processes that take turns: one that saves and one that
does not, one that resumes at step 10 and one at step 100,000. The latter position is made up: the
checkpoint of step 10 with its counters moved. Run it on an idle machine.
"""

import argparse
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from record import record

from callbacks.checkpoint.files import FOLDER, file_name, read_checkpoint, write_checkpoint

ROOT = Path(__file__).resolve().parent.parent
FAR = 100_000
NEVER = 10**9


def fit(config: str, root: Path, *options: str, until: str = "done: ") -> tuple[float, float]:
    """Seconds to the first step's line, and from there to the line that begins so."""
    command = [sys.executable, "-m", "cli", "fit", "--config", f"configs/{config}.yaml"]
    command += ["--trainer.log_every_n_steps=1", f"--trainer.default_root_dir={root}", *options]
    if config == "small":
        command.append("--model.compile=true")  # as its whole run is
    began, first = time.perf_counter(), 0.0
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True) as run:
        assert run.stderr
        for line in run.stderr:
            if line.startswith("step ") and not first:
                first = time.perf_counter()
            if first and line.startswith(until):
                run.kill()
                return first - began, time.perf_counter() - first
    raise RuntimeError(f"the run ended without a line that begins with {until!r}")


def saving(config: str, steps: int, every: int, pairs: int, folder: Path) -> tuple[float, float]:
    """Median seconds of `steps` steps, without a save and with one every so many."""
    seconds: dict[int, list[float]] = {NEVER: [], every: []}
    for _ in range(pairs):
        for interval, taken in seconds.items():
            root = folder / "saving"
            options = [f"--trainer.max_steps={steps + 1}", f"--checkpoint.every_n_steps={interval}"]
            taken.append(fit(config, root, "--trainer.limit_val_batches=0", *options)[1])
            shutil.rmtree(root)
    return statistics.median(seconds[NEVER]), statistics.median(seconds[every])


def moved(checkpoint: dict[str, Any], step: int) -> dict[str, Any]:
    """The checkpoint as if its run had come to another step."""
    was = checkpoint["global_step"]
    loops = checkpoint["loops"]["fit_loop"]
    optimizer = loops["epoch_loop.automatic_optimization.optim_progress"]["optimizer"]
    accumulate = checkpoint["contract"]["trainer.accumulate_grad_batches"]
    for progress, of_a_step in (
        (loops["epoch_loop.batch_progress"], accumulate),
        (loops["epoch_loop.scheduler_progress"], 1),
        (optimizer["step"], 1),
        (optimizer["zero_grad"], 1),
    ):
        for counts in (progress["total"], progress["current"]):
            for key in counts:
                counts[key] += (step - was) * of_a_step
    for schedule in checkpoint["lr_schedulers"]:
        schedule |= {"last_epoch": step, "_step_count": step + 1}
    data = checkpoint["LMDataModule"]
    data |= {"step": step, "samples": data["samples"] // was * step}
    return checkpoint | {"global_step": step}


def first_resumed_step(pairs: int, folder: Path) -> tuple[float, float]:
    """Median seconds from a start to its first step's line, resumed at step 10 and far on."""
    near, far = folder / "near", folder / "far"
    fit("tiny", near, "--trainer.max_steps=10")
    checkpoint = read_checkpoint(near / FOLDER / file_name(10))
    write_checkpoint(moved(checkpoint, FAR), far / FOLDER / file_name(FAR))
    seconds: dict[int, list[float]] = {10: [], FAR: []}
    for _ in range(pairs):
        for (step, taken), root in zip(seconds.items(), (near, far), strict=True):
            until = f"step {step + 1:>6}/"
            taken.append(fit("tiny", root, f"--trainer.max_steps={2 * FAR}", until=until)[0])
    return statistics.median(seconds[10]), statistics.median(seconds[FAR])


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--record", action="store_true", help="put the table into RESULTS.md")
    options = parser.parse_args()
    (ROOT / "runs").mkdir(exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="restart-", dir=ROOT / "runs"))
    without, with_saves = saving("tiny", 100, 1, options.pairs, folder)
    small_without, small_with = saving("small", 40, 10, options.pairs, folder)
    save, step = (small_with - small_without) / 4, small_without / 40
    near, far = first_resumed_step(options.pairs, folder)
    shutil.rmtree(folder)
    lines = [
        "| figure | value |",
        "|---|---|",
        f"| tiny, 100 steps: without a save, saving every step | {without:.2f} s, "
        f"{with_saves:.2f} s: {with_saves / without:.2f} times |",
        f"| small, 40 steps: without a save, with 4 | {small_without:.2f} s, {small_with:.2f} s: "
        f"{save:.2f} s a save |",
        f"| small at its own interval, every 400 steps | {save / (400 * step):+.2%} |",
        f"| start to first step, resumed at step 10, at step {FAR:,} | {near:.2f} s, {far:.2f} s |",
    ]
    print("\n".join(lines))
    if options.record:
        record("Saving and resuming", "\n".join(lines))


if __name__ == "__main__":
    main()
