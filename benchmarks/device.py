"""Checks and figures of a CUDA card, most important first, each a line of JSON as it comes.

    python benchmarks/device.py --out FOLDER [--dry] [--minutes 8]

What fails is a line too, and the next begins; what does not fit in the minutes is left out and said
so. `--dry` runs the same paths on a CPU with toy shapes, to prove the script and nothing else.
FOLDER gets device.jsonl alone; token files and runs lie in a temporary folder meanwhile.
"""

import argparse
import csv
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from shape import Shape
from throughput import measure

from lm.config import ModelConfig
from lm.model import LM

ROOT = Path(__file__).resolve().parent.parent
GPT2_SMALL = {"d_model": 768, "n_layers": 12, "n_heads": 12, "ffn_dim": 2048}
MEDIUM = {"d_model": 1024, "n_layers": 24, "n_heads": 16, "ffn_dim": 2816}
BASE = {"d_model": 1536, "n_layers": 18, "n_heads": 12, "n_kv_heads": 4, "ffn_dim": 4096}
LONGEST = 150  # seconds of one item, so that one that hangs leaves time for others
TOY = {"d_model": 32, "n_layers": 2, "n_heads": 2, "ffn_dim": 48}
COMPARED_RUN = GPT2_SMALL | {"seq_len": 1024, "micro_batch": 16, "warm_steps": 10, "steps": 30}
TOY_RUN = TOY | {"seq_len": 16, "micro_batch": 2, "warm_steps": 2, "steps": 2}


class Bench:
    """The card or its stand-in, a token file, and the lines written so far."""

    def __init__(self, work: Path, dry: bool, minutes: float) -> None:
        self.dry, self.work = dry, work
        self.end = time.monotonic() + 60 * minutes
        self.vocab_size = 320 if dry else 32000
        self.tokens = work / "tokens"
        self.tokens.mkdir()
        draw = np.random.default_rng(0)
        for split, count in (("train", 20_000 if dry else 20_000_000), ("val", 5_000)):
            ids = draw.zipf(1.3, count) % self.vocab_size
            ids.astype(np.uint16).tofile(self.tokens / f"{split}.bin")

    def options(self, shape: dict[str, int], seq_len: int, micro_batch: int) -> list[str]:
        """Those of a run of random tokens on this device."""
        shape, seq_len = (TOY, 16) if self.dry else (shape, seq_len)
        words = [f"--model.config.{name}={value}" for name, value in shape.items()]
        return [
            *words,
            f"--model.config.vocab_size={self.vocab_size}",
            f"--data.path={self.tokens}",
            "--data.dtype=uint16",
            f"--data.seq_len={seq_len}",
            f"--data.micro_batch_size={2 if self.dry else micro_batch}",
            f"--trainer.accelerator={'cpu' if self.dry else 'gpu'}",
            "--trainer.devices=1",
            "--trainer.gradient_clip_val=1.0",
        ]

    @property
    def seconds_left(self) -> float:
        return min(max(5.0, self.end - time.monotonic()), LONGEST)

    def compared(self, name: str) -> dict[str, Any]:
        """Figures of a trainer on 12 × 768 at 1024, all on the same tokens by the same clock."""
        sizes: dict[str, Any] = TOY_RUN if self.dry else COMPARED_RUN
        shape = Shape(
            **sizes,
            n_kv_heads=sizes["n_heads"],
            vocab_size=self.vocab_size,
            tied=ModelConfig().tie_embeddings,
            device="cpu" if self.dry else "cuda",
        )
        got = measure(name, shape, "shipped", self.tokens, self.seconds_left)
        if isinstance(got, str):
            return {"not_measured": got}
        return {
            "tokens_per_sec": shape.tokens_per_step / got["seconds"],
            "peak_gib": got["peak_bytes"] / 2**30,
        }

    def run(self, words: list[str]) -> str:
        """Standard output of a command line that ends well."""
        command = [sys.executable, "-m", "cli", *words]
        done = subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, timeout=self.seconds_left
        )
        if done.returncode:
            last = (done.stderr.strip() or done.stdout.strip()).splitlines()[-1:]
            raise RuntimeError(f"{' '.join(words[:1])} ended with {done.returncode}: {last}")
        return done.stdout

    def fit(self, name: str, steps: int, words: list[str]) -> dict[str, float]:
        """Medians of the figures of a run, its first third left out."""
        root = self.work / name
        shutil.rmtree(root, ignore_errors=True)
        steps = 6 if self.dry else steps
        fixed = [
            f"--trainer.max_steps={steps}",
            f"--trainer.log_every_n_steps={max(1, steps // 6)}",
            "--trainer.limit_val_batches=0",
            f"--trainer.default_root_dir={root}",
            "--checkpoint.every_n_steps=1000000",
            "--weights.save_at_end=false",
            *(["--throughput.peak_tflops=1"] if self.dry else []),
        ]
        self.run(["fit", *words, *fixed])
        with (root / "metrics.csv").open() as file:
            rows = list(csv.DictReader(file))
        shutil.rmtree(root)
        found = {"first_loss": float(rows[0]["train/loss"])}
        for key in ("throughput/tokens_per_sec", "throughput/mfu", "memory/peak_gib"):
            values = [float(row[key]) for row in rows[len(rows) // 3 :] if row.get(key)]
            if values:
                found[key] = statistics.median(values)
        return found


def card(bench: Bench) -> dict[str, Any]:
    """What it is."""
    found: dict[str, Any] = {"torch": torch.__version__, "cuda": torch.version.cuda}
    if not bench.dry:
        found["device"] = torch.cuda.get_device_name()
        found["memory_gib"] = torch.cuda.get_device_properties(0).total_memory / 2**30
    return found


def loss_parity(bench: Bench) -> dict[str, Any]:
    """Loss and gradient norm of a first step against fp32 on the CPU."""
    from lm.loss import cross_entropy_sum

    torch.manual_seed(0)
    shape: dict[str, Any] = TOY if bench.dry else {}
    model = LM(ModelConfig(vocab_size=bench.vocab_size, **shape))
    ids = torch.randint(bench.vocab_size, (2, 129), generator=torch.Generator().manual_seed(1))
    found: dict[str, Any] = {}
    devices = [("cpu", torch.float32)]
    devices += [("cpu" if bench.dry else "cuda", kind) for kind in (torch.float32, torch.bfloat16)]
    for device, kind in devices:
        model.to(device).zero_grad()
        inputs, targets = ids[:, :-1].to(device), ids[:, 1:].to(device)
        with torch.autocast(device, kind, enabled=kind != torch.float32):
            loss = cross_entropy_sum(model.model(inputs), model.head_weight, targets)
        (loss / targets.numel()).backward()
        norm = torch.nn.utils.get_total_norm(
            [p.grad for p in model.parameters() if p.grad is not None]
        )
        found[f"{device} {kind}"] = [loss.item() / targets.numel(), norm.item()]
    (loss, norm), *others = found.values()
    if any(abs(a / loss - 1) > 1e-3 or abs(b / norm - 1) > 2e-2 for a, b in others):
        raise RuntimeError(f"loss or gradient norm is another: {found}")
    return found


def drilled(bench: Bench, *words: str) -> dict[str, Any]:
    """The verdict of a drill."""
    root = bench.work / "drilled"
    fixed = [f"--trainer.default_root_dir={root}", "--trainer.max_steps=12"]
    options = bench.options(TOY, 128, 8)
    text = bench.run(["drill", "--kills=2", "--steps=12", *options, *fixed, *words])
    return {"verdict": text.strip().splitlines()[-1]}


def steps_of(bench: Bench) -> Iterator[tuple[str, Callable[[], dict[str, Any]]]]:
    """Names and work, most important first."""
    small = bench.options(GPT2_SMALL, 1024, 16)
    base = bench.options(BASE, 2048, 8)
    compiled = ["--model.compile=false"] if bench.dry else ["--model.compile=true"]
    exact = [] if bench.dry else ["--trainer.deterministic=true"]
    yield "card", lambda: card(bench)
    yield "loss parity", lambda: loss_parity(bench)
    yield "12 × 768 at 1024", lambda: bench.fit("small", 60, [*small, *compiled])
    yield "resume, deterministic", lambda: drilled(bench, *exact)
    for name in ("ours", "hf-compiled", "litgpt"):
        yield f"{name}, 12 × 768", lambda name=name: bench.compared(name)
    yield "12 × 768 deterministic", lambda: bench.fit("exact", 60, [*small, *compiled, *exact])
    yield "base at 2048", lambda: bench.fit("base", 30, [*base, *compiled])
    yield (
        "resume, fp16 scaler",
        lambda: drilled(
            bench, *exact, f"--trainer.precision={'bf16' if bench.dry else '16'}-mixed"
        ),
    )
    yield "12 × 768 eager", lambda: bench.fit("eager", 40, [*small, "--model.compile=false"])
    yield (
        "12 × 768 not fused",
        lambda: bench.fit("foreach", 40, [*small, *compiled, "--model.optim.fused=false"]),
    )
    yield (
        "24 × 1024 at 1024",
        lambda: bench.fit("medium", 40, [*bench.options(MEDIUM, 1024, 8), *compiled]),
    )
    yield (
        "base, activation checkpointing",
        lambda: bench.fit(
            "again", 20, [*base, *compiled, "--model.config.activation_checkpointing=true"]
        ),
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--dry", action="store_true", help="toy shapes on a CPU")
    parser.add_argument("--minutes", type=float, default=8.0)
    options = parser.parse_args()
    if not options.dry and not torch.cuda.is_available():
        print("error: no CUDA device is found; --dry runs the same paths on a CPU", file=sys.stderr)
        return 2
    options.out.mkdir(parents=True, exist_ok=True)
    failed = 0
    with (
        tempfile.TemporaryDirectory() as work,
        (options.out / "device.jsonl").open("w", encoding="utf-8") as file,
    ):
        bench = Bench(Path(work), options.dry, options.minutes)
        for name, work in steps_of(bench):
            began = time.monotonic()
            line: dict[str, Any] = {"name": name}
            if began > bench.end:
                line["left_out"] = "no time was left"
            else:
                try:
                    line |= work()
                except Exception as error:
                    line["error"], failed = f"{type(error).__name__}: {error}", failed + 1
            line["seconds"] = round(time.monotonic() - began, 1)
            file.write(json.dumps(line) + "\n")
            file.flush()
            print(json.dumps(line), flush=True)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
