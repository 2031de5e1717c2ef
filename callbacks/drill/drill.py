"""The fire drill: a run that is killed and resumed against one that is not, bit for bit."""

import contextlib
import csv
import math
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from callbacks.checkpoint.files import checkpoints, read_newest
from callbacks.drill.kill_points import MOMENTS, VARIABLE
from callbacks.processes import parent
from callbacks.run.folder import lock

# Names in the folder of a drill: its runs, and what tells that the folder is a drill's.
RUNS = ("whole", "killed", "elastic")
MARK = ".drill"
# Figures of a row that are times and sizes of a process, not of the run.
OF_THE_PROCESS = ("throughput/", "time/", "memory/")
Say = Callable[[str], None]
# Relative difference of a loss under another split: rounding, and other masks of dropout.
SPLIT_LOSS = 0.02
# The last is the scaler of losses, which runs in fp16 have.
COMPARED = ("state_dict", "optimizer_states", "lr_schedulers", "LMDataModule", "MixedPrecision")


@dataclass(frozen=True, kw_only=True)
class Start:
    """One start of the run that is killed."""

    moment: str
    code: int
    resumed_from: str
    last_step: str


@contextlib.contextmanager
def claim(root: Path) -> Iterator[None]:
    """Hold the folder of a drill, without the runs of an earlier drill; all else in it stays.

    Raises:
        ValueError: another drill is at work there, or no drill made the folder.
    """
    owned = not os.path.lexists(root) or (root / MARK).is_file()
    # An interrupted call leaves nothing but the files of its lock.
    if not owned and not (
        root.is_dir() and all(path.name.startswith(".lock") for path in root.iterdir())
    ):
        raise ValueError(
            f"{root} is there already, and no drill made it; move it away, or give another "
            "trainer.default_root_dir"
        )
    with lock(root):
        (root / MARK).write_text("The next drill removes the runs beside this file.\n", "utf-8")
        for run in (root / name for name in RUNS):
            if run.is_symlink():
                run.unlink()
            elif run.exists():
                shutil.rmtree(run)
        yield


def rows(run: Path) -> list[dict[str, str]]:
    """metrics.csv without what differs between two processes."""
    with (run / "metrics.csv").open(encoding="utf-8", newline="") as file:
        return [
            {name: value for name, value in row.items() if not name.startswith(OF_THE_PROCESS)}
            for row in csv.DictReader(file)
        ]


def differences(one: Any, other: Any, where: str = "") -> Iterator[tuple[str, int]]:
    """Places where two nested containers differ, and in how many bits of a tensor."""
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        if one.shape != other.shape or one.dtype != other.dtype:
            yield where, 8 * max(one.nbytes, other.nbytes)
            return
        # Bits, not values: 0.0 equals -0.0, and NaN nothing.
        bits = one.flatten().view(torch.uint8) ^ other.flatten().view(torch.uint8)
        if bits.any():
            yield where, sum(int((bits >> place & 1).sum()) for place in range(8))
    elif isinstance(one, dict) and isinstance(other, dict) and one.keys() == other.keys():
        for key in one:
            yield from differences(one[key], other[key], f"{where}.{key}".lstrip("."))
    elif isinstance(one, list | tuple) and isinstance(other, list | tuple):
        if len(one) != len(other):
            yield where, 1
        for i, (left, right) in enumerate(zip(one, other, strict=False)):
            yield from differences(left, right, f"{where}[{i}]")
    elif one != other:
        yield where, 1


def run_to_the_end(command: list[str], moment: str, seconds: float, say: Say) -> Start:
    """Start the run with a kill ahead: at a moment inside it, or after so many seconds.

    Raises:
        RuntimeError: the run ended in another way.
    """
    environment = {name: value for name, value in os.environ.items() if name != VARIABLE}
    environment[parent.DRILL] = str(os.getpid())
    if moment not in ("random", ""):
        environment[VARIABLE] = moment
    lines: list[str] = []
    with subprocess.Popen(
        command, env=environment, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        reader = threading.Thread(target=watch, args=(process.stderr, lines, say))
        reader.start()
        try:
            process.wait(seconds if moment == "random" else None)
        except subprocess.TimeoutExpired:
            moment = f"random, after {seconds:.1f} s"
        finally:
            # The other processes of the run too, also where a signal ends the drill.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            code = process.wait()
            reader.join()
    if code not in (0, -signal.SIGKILL):
        raise RuntimeError(f"the run could not go on (exit code {code}): {' '.join(lines[-3:])}")
    text = "\n".join(lines)
    resumed = re.findall(r"resuming from .* at step (\d+)", text)
    steps = re.findall(r"^step +(\d+)/", text, flags=re.MULTILINE)
    return Start(
        moment=moment,
        code=code,
        resumed_from=f"step {resumed[-1]}" if resumed else "step 0",
        last_step=steps[-1] if steps else "-",
    )


def watch(stream: Iterable[str], lines: list[str], say: Say) -> None:
    """Collect a run's lines and pass on its steps."""
    for line in stream:
        lines.append(line.rstrip("\n"))
        if line.startswith("step "):
            say(lines[-1].split(" · ")[0])


def plan_kills(kills: int, draw: random.Random, accumulates: bool, validates: bool) -> list[str]:
    """Moments of the kills: each named one in turn, every eighth at random."""
    possible = [
        moment
        for moment in MOMENTS
        if (accumulates or moment != "inside accumulation")
        and (validates or moment != "during validation")
    ]
    cycle = [*possible, "random"]
    plan = []
    for kill in range(kills):
        moment = cycle[kill % len(cycle)]
        if moment != "random":
            # Parts of a file and micro-batches are many. Every other kill lets a save pass first:
            # runs get ahead, and two kills fall between two saves too.
            most = {"inside accumulation": 9, "while writing": 9}.get(moment, 1)
            moment += f":{draw.randint(1, most)}"
            if (kill % len(cycle) + kill // len(cycle)) % 2 == 0 and not moment.startswith(
                "start-up"
            ):
                moment += ":after a save"
        plan.append(moment)
    return plan


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Result of a drill."""

    starts: list[Start]
    found: list[tuple[str, int]]
    """Places that differ from the uninterrupted run, with the number of differing bits."""

    @property
    def kills(self) -> int:
        """Starts that ended by the kill that was planned for them."""
        return sum(start.code != 0 for start in self.starts)

    @property
    def bits(self) -> int:
        """Differing bits in all."""
        return sum(bits for _, bits in self.found)


def drill(
    arguments: list[str], root: Path, plan: list[str], draw: random.Random, say: Say
) -> Outcome:
    """Run once without interruption, then with kills until all are done.

    A run that comes to its end before the last kill is compared, and another one is begun.

    Args:
        arguments: Of `lightning fit`, without the run folder.
        root: Folder for the runs, taken by `claim`.
        plan: From `plan_kills`.
        draw: Source of the random times.
        say: Told of the progress, in one line.

    Raises:
        RuntimeError: a run ended in another way than by a kill or at its end.
    """
    command = [sys.executable, "-m", "cli", "fit", *arguments, "--trainer.default_root_dir"]
    whole, killed = root / "whole", root / "killed"
    began = time.monotonic()
    run_to_the_end([*command, str(whole)], "", 0.0, lambda line: say(f"in peace, {line}"))
    whole_seconds = time.monotonic() - began
    starts, waiting = list[Start](), list(plan)
    while True:
        moment = waiting[0] if waiting else ""
        number = len(starts) + 1
        start = run_to_the_end(
            [*command, str(killed)],
            moment,
            draw.uniform(0.0, whole_seconds),
            lambda line, number=number: say(f"start {number}, {line}"),
        )
        starts.append(start)
        if start.code:
            waiting.pop(0)
        elif waiting and moment != "random" and start.resumed_from == "step 0":
            # A whole run never came to it: the first time will do, else it is left out.
            waiting[:1] = [first] if (first := f"{moment.split(':')[0]}:1") != moment else []
        if start.code == 0:
            found = compare(whole, killed)
            if found or not waiting:
                return Outcome(starts=starts, found=found)
            shutil.rmtree(killed)


def other_split(micro_batch_size: int, accumulate: int, devices: int) -> tuple[int, int, int]:
    """The same sequences a step in another split, on one device where there are several.

    Raises:
        ValueError: one sequence a step cannot be split.
    """
    each = micro_batch_size * accumulate
    if devices > 1:
        return micro_batch_size, accumulate * devices, 1
    sizes = [size for size in range(each, 0, -1) if each % size == 0 and size != micro_batch_size]
    if not sizes:
        raise ValueError("--elastic: a step of one sequence has no other split; enlarge the batch")
    return sizes[0], each // sizes[0], 1


def elastic(
    arguments: list[str], root: Path, split: tuple[int, int, int], say: Say
) -> tuple[int, int, int, float]:
    """Kill a run after its first save, go on under another split, compare with the run in peace.

    Returns the step of the change, the steps in all, those that trained on other samples, and the
    largest relative difference of a loss.
    """
    run = root / "elastic"
    command = [sys.executable, "-m", "cli", "fit", *arguments, f"--trainer.default_root_dir={run}"]
    before = run_to_the_end(
        command, "before retention:1", 0.0, lambda line: say(f"elastic, {line}")
    )
    micro_batch_size, accumulate, devices = split
    other = [
        f"--data.micro_batch_size={micro_batch_size}",
        f"--trainer.accumulate_grad_batches={accumulate}",
        f"--trainer.devices={devices}",
        "--trainer.strategy=auto",
    ]
    start = run_to_the_end([*command, *other], "", 0.0, lambda line: say(f"elastic, {line}"))
    pairs = list(zip(rows(root / "whole"), rows(run), strict=True))
    changed_at = int(start.resumed_from.split()[-1])
    if before.code == 0 or not 0 < changed_at < len(pairs):
        raise RuntimeError(
            f"--elastic: the first save is at the run's end (step {changed_at} of {len(pairs)}): "
            "no step is left for another split; save sooner by checkpoint.every_n_steps"
        )
    losses = [(float(one["train/loss"]), float(two["train/loss"])) for one, two in pairs]
    apart = [abs(one - other) / one for one, other in losses]
    return (
        changed_at,
        len(pairs),
        sum(one["data/rows_crc32"] != other["data/rows_crc32"] for one, other in pairs),
        max(apart) if all(map(math.isfinite, apart)) else math.nan,
    )


def compare(whole: Path, killed: Path) -> list[tuple[str, int]]:
    """Differences of two finished runs: rows first, then final weights and moments."""
    found = []
    left, right = rows(whole), rows(killed)
    if len(left) != len(right):
        found.append((f"metrics.csv: {len(left)} rows and {len(right)}", 1))
    for one, other in zip(left, right, strict=False):
        for name in sorted(one.keys() | other.keys()):
            if (here := one.get(name)) != (there := other.get(name)):
                found.append((f"step {one['step']} {name}: {here} and {there}", 1))
    final = [read_newest(run, print)[1] for run in (whole, killed)]
    for key in COMPARED:
        found += differences(final[0].get(key), final[1].get(key), key)
    if [step for step, _ in checkpoints(whole)] != [step for step, _ in checkpoints(killed)]:
        found.append(("the steps of the kept checkpoints", 1))
    return found
