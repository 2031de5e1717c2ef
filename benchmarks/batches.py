"""What a batch costs to make: microseconds of `__getitems__` and its share of a step.

    python benchmarks/batches.py corpora/python-32k --step_ms 370

Windows of the small run, rows of the same documents, both out of 64 files, and a mixture of them.
"""

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
from torch.utils.data import default_convert

from data.loader import StepBatches
from data.mixture import Mixture
from data.rows import Rows
from data.tokens.memmap import TokenFile, TokenStream
from data.tokens.source import open_source
from data.windows import Samples, Windows


def microseconds(samples: Samples, size: int, batches: int = 2000) -> float:
    """Median time of a batch, made as a loader makes it."""
    sampler = StepBatches(
        start=0, max_steps=batches, accumulate=1, rank=0, world_size=1, micro_batch_size=size,
        first_sample=0,
    )  # fmt: skip
    times, numbers = [], iter(sampler)
    for _ in range(batches):
        began = time.perf_counter()
        default_convert(samples.__getitems__(next(numbers)))
        times.append(time.perf_counter() - began)
    return 1e6 * statistics.median(times)


def in_files(stream: TokenStream, folder: Path, count: int) -> TokenStream:
    """The same tokens in so many files."""
    ids = np.empty(stream.n_tokens, dtype=np.int64)
    stream.copy(0, ids)
    files = []
    for number, part in enumerate(np.array_split(ids, count)):
        path = folder / f"train-{number:05}.bin"
        part.astype(stream.files[0].dtype).tofile(path)
        files.append(TokenFile(path, stream.files[0].dtype))
    return TokenStream(files)


def main(path: str, step_ms: float) -> None:
    source = open_source(path, 1 << 32, None, None)
    stream = source.stream("train", 1 << 32)
    docs, specials = source.documents("train")
    with tempfile.TemporaryDirectory() as folder:
        cut = in_files(stream, Path(folder), 64)
        windows = Windows(stream, 512)
        cases: list[tuple[str, Samples, int]] = [
            ("windows of 512", windows, 4),
            ("windows of 512, 64 files", Windows(cut, 512), 4),
            ("rows of 512", Rows(stream, docs, 512, "split", specials), 4),
            ("rows of 512, 64 files", Rows(cut, docs, 512, "split", specials), 4),
            ("rows of 339", Rows(stream, docs, 339, "split", specials), 32),
            ("mixture 3 : 1", Mixture([windows, Windows(cut, 512)], [3, 1], 0, "shuffled"), 4),
            ("mixture 70 : 30", Mixture([windows, Windows(cut, 512)], [70, 30], 0, "shuffled"), 4),
            ("mixture 6999 : 3001", Mixture([windows, Windows(cut, 512)], [6999, 3001], 0,
                                            "shuffled"), 4),
        ]  # fmt: skip
        print(
            f"| samples | a batch of | µs | share of a step of {step_ms:g} ms |\n|---|---|---|---|"
        )
        for name, samples, size in cases:
            took = microseconds(samples, size)
            print(f"| {name} | {size} | {took:.0f} | {took / step_ms / 1e3:.3%} |")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("path", help="prepared folder")
    parser.add_argument("--step_ms", type=float, default=370.0, help="a step of the small run")
    options = parser.parse_args()
    main(options.path, options.step_ms)
