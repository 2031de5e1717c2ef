"""Check that a refactoring changes no number: train with two versions of the code and compare bits.

    python benchmarks/same_bits.py BEFORE [AFTER] [--steps 60] [--configs tiny small jsonl moe]

BEFORE and AFTER are commits; without AFTER the working tree is used. Each configuration is trained
three times: by the old code, by the new code, and by the new code from a checkpoint that the old
code wrote halfway. metrics.csv (without timings), weights, optimizer and schedule must be equal.
Prints a table. Exits with 1 when a bit differs.
"""

import argparse
import contextlib
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
CORPUS_FOLDER = ROOT / "corpora" / "stdlib-2k"
# Shapes that fit a laptop, all on the corpus of configs/tiny.yaml.
CORPUS = ["--data.path=corpora/stdlib-2k", "--data.corpus=stdlib", "--model.config.vocab_size=2048"]
SHORT = {
    "tiny": ["--model.config.dropout=0.1"],
    "small": [*CORPUS, "--data.seq_len=256"],
    "jsonl": [
        *(*CORPUS, "--data.epochs=null", "--data.micro_batch_size=2", "--model.config.n_layers=2"),
        "--trainer.accumulate_grad_batches=2",
    ],
    "moe": ["--data.num_workers=1"],
}


@contextlib.contextmanager
def checkout(commit: str | None) -> Iterator[Path]:
    """A folder with the code of a commit, or the working tree."""
    if commit is None:
        yield ROOT
        return
    with tempfile.TemporaryDirectory(prefix="same-bits-") as folder:
        git = ["git", "-C", str(ROOT), "worktree"]
        subprocess.run([*git, "add", "--quiet", "--detach", folder, commit], check=True)
        try:
            yield Path(folder)
        finally:
            subprocess.run([*git, "remove", "--force", folder], check=True)


def train(code: Path, name: str, run: Path, steps: int) -> None:
    """Train a shipped configuration with the code in a folder."""
    options = [
        *(f"--config=configs/{name}.yaml", *SHORT[name], f"--trainer.max_steps={steps}"),
        *("--model.compile=false", "--trainer.log_every_n_steps=1", "--data.val_sequences=8"),
        *(f"--trainer.val_check_interval={steps // 3}", f"--trainer.default_root_dir={run}"),
        *(f"--checkpoint.every_n_steps={steps // 2}", "--checkpoint.every_minutes=null"),
    ]
    command = [sys.executable, "-m", "cli", "fit", *options]
    if not (corpus := code / "corpora" / CORPUS_FOLDER.name).exists():
        corpus.parent.mkdir(exist_ok=True)
        corpus.symlink_to(CORPUS_FOLDER)
    done = subprocess.run(command, cwd=code, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(command)} in {code}:\n{done.stderr}")


def main() -> int:
    from callbacks.drill.drill import compare

    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("before", help="commit of the code to compare with")
    parser.add_argument("after", nargs="?", help="commit of the changed code; unset: working tree")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--configs", nargs="+", default=[*SHORT], choices=[*SHORT])
    options = parser.parse_args()
    if not CORPUS_FOLDER.exists():
        prepare = [sys.executable, "-m", "cli", "prepare", "--config=configs/tiny.yaml"]
        subprocess.run(prepare, cwd=ROOT, check=True)
    differing = 0
    print("| configuration | differing bits | resumed from the old checkpoint |\n|---|---|---|")
    with (
        checkout(options.before) as old,
        checkout(options.after) as new,
        tempfile.TemporaryDirectory(prefix="same-bits-runs-") as runs,
    ):
        for name in options.configs:
            before, after, resumed = (
                Path(runs) / name / which for which in ("before", "after", "resumed")
            )
            train(old, name, before, options.steps)
            shutil.copytree(before, resumed)
            halfway = options.steps // 2
            for path in (resumed / "checkpoints").iterdir():
                if path.name != f"step-{halfway:08d}.ckpt":
                    path.unlink()
            train(new, name, after, options.steps)
            train(new, name, resumed, options.steps)
            found = [compare(before, other) for other in (after, resumed)]
            for where, bits in [*found[0][:5], *found[1][:5]]:
                print(f"  {where}: {bits}")
            sums = [sum(bits for _, bits in places) for places in found]
            print(f"| {name} | {sums[0]} | {sums[1]} |", flush=True)
            differing += sum(sums)
    return min(differing, 1)


if __name__ == "__main__":
    sys.exit(main())
