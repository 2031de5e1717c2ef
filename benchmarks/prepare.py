"""How fast text becomes token files, against the tokenizer alone, and in how much memory.

    python benchmarks/prepare.py [--pairs 5] [--mb 20] [--small 50] [--large 200] [--record]

Each figure is the median over fresh processes that take turns: one that prepares a JSONL file of
Python source end to end, one that only encodes its texts, read before, in the same batches. The
peak memory is that of `lightning prepare` on a small and a large input. Run it on an idle machine.
"""

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from record import record

from data.prepare.corpus import python_files, read_source
from data.prepare.vocabulary import train_bpe

ROOT = Path(__file__).resolve().parent.parent
ENDS = """
import sys, time
from pathlib import Path
from data.prepare.prepare import Settings, prepare_files
source, tokenizer, output, workers = sys.argv[1:]
began = time.perf_counter()
settings = Settings(tokenizer=tokenizer, val_fraction=0.05)
meta = prepare_files([source], Path(output), settings, workers=int(workers), progress=False)
seconds = time.perf_counter() - began
status = Path("/proc/self/status").read_text()
print(sum(meta[split]["bytes"] for split in ("train", "val")) / 1e6 / seconds)
print(int(status.split("VmHWM:")[1].split()[0]) / 1024)
"""
BARE = """
import json, os, sys, time
source, tokenizer, _, workers = sys.argv[1:]
os.environ["RAYON_NUM_THREADS"] = workers
from tokenizers import Tokenizer
from data.prepare.encode import BATCH_BYTES
batches, size = [[]], 0
for line in open(source, encoding="utf-8"):
    if size >= BATCH_BYTES:
        batches.append([])
        size = 0
    batches[-1].append(json.loads(line)["text"])
    size += len(batches[-1][-1].encode())
total = sum(len(text.encode()) for batch in batches for text in batch)
known = Tokenizer.from_file(tokenizer)
known.encode_special_tokens = True
began = time.perf_counter()
for batch in batches:
    known.encode_batch_fast(batch, add_special_tokens=False)
print(total / 1e6 / (time.perf_counter() - began))
"""


def write_rows(path: Path, megabytes: float) -> None:
    """JSONL of so many MB: the Python source of this machine, again and again."""
    texts = [text for _, file in python_files("python") if (text := read_source(file))]
    written = number = 0
    with path.open("wb") as file:
        while written < megabytes * 1e6:
            row = {"text": texts[number % len(texts)], "number": number}
            written += file.write(json.dumps(row, ensure_ascii=False).encode("utf-8") + b"\n")
            number += 1


def measure(script: str, source: Path, tokenizer: Path, workers: int) -> list[float]:
    """What a process of its own prints: MB/s, and for a whole preparation its peak in MB."""
    output = source.parent / "output"
    words = [sys.executable, "-c", script, str(source), str(tokenizer), str(output), str(workers)]
    done = subprocess.run(words, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    shutil.rmtree(output, ignore_errors=True)
    return [float(word) for word in done.stdout.split()]


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--mb", type=float, default=20, help="of input, for speed")
    parser.add_argument("--small", type=float, default=50, help="MB of input, for memory")
    parser.add_argument("--large", type=float, default=200, help="MB of input, for memory")
    parser.add_argument("--record", action="store_true", help="put the table into RESULTS.md")
    options = parser.parse_args()
    (ROOT / "runs").mkdir(exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="prepare-", dir=ROOT / "runs"))
    source, tokenizer = folder / "rows.jsonl", folder / "tokenizer.json"
    write_rows(source, options.mb)
    with source.open(encoding="utf-8") as file:
        train_bpe((json.loads(line)["text"] for line in file), 32_000).save(tokenizer)
    lines = ["| figure | value |", "|---|---|"]
    for workers in (1, 2):
        rates: dict[str, list[float]] = {BARE: [], ENDS: []}
        for _ in range(options.pairs):
            for script, taken in rates.items():
                taken.append(measure(script, source, tokenizer, workers)[0])
        bare, ours = (statistics.median(taken) for taken in rates.values())
        lines.append(
            f"| {options.mb:g} MB on {workers} threads: tokenizer alone, end to end | "
            f"{bare:.2f} MB/s, {ours:.2f} MB/s: {ours / bare:.0%} |"
        )
    for megabytes in (options.small, options.large):
        write_rows(source, megabytes)
        rate, peak = measure(ENDS, source, tokenizer, 2)
        lines.append(f"| peak memory on {megabytes:g} MB | {peak:.0f} MB ({rate:.2f} MB/s) |")
    shutil.rmtree(folder)
    print("\n".join(lines))
    if options.record:
        record("Preparing text", "\n".join(lines))


if __name__ == "__main__":
    main()
