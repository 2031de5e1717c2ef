"""Figures of a finished small run, for README and RESULTS.md.

    python benchmarks/small_run.py runs/small corpora/python-32k

Prints first loss, validation loss and bits per byte over the whole validation file, the bits per
byte of `xz -9e` on the same text, median tokens/s, peak memory, and how many of 20 samples
of 200 tokens at temperature 0.8 Python's `tokenize` accepts.
"""

import csv
import io
import json
import lzma
import statistics
import sys
import tokenize
from pathlib import Path

import numpy as np
import torch

from callbacks.checkpoint.files import read_newest
from data.text.tokenizer import TextTokenizer
from data.tokens.memmap import TokenStream, open_token_file
from data.windows import Windows
from lm.evaluate import bits_per_byte
from lm.generate import generate
from lm.loss import cross_entropy_sum, shift
from lm.model import LM
from lm.trained import from_checkpoint


def accepted(text: str) -> bool:
    """Whether the tokenizer of Python's own library reads the text without an error.

    The sample may stop inside a bracket, a string or a block: only the cut last line and what is
    open at the end are forgiven.
    """
    whole = text[: text.rfind("\n") + 1]
    try:
        for _ in tokenize.generate_tokens(io.StringIO(whole).readline):
            pass
    except tokenize.TokenError as error:
        return "EOF in multi-line" in str(error)
    except (IndentationError, SyntaxError):
        return False
    return True


def validation(model: LM, corpus: Path, seq_len: int) -> tuple[float, float]:
    """Nats a token and bits a byte over all windows of val.bin, in fp32."""
    meta = json.loads((corpus / "meta.json").read_text(encoding="utf-8"))
    file = open_token_file(corpus / "val.bin", meta["dtype"])
    lengths = torch.tensor(meta["token_bytes"])
    windows = Windows(TokenStream([file]), seq_len, order="fixed")
    total = torch.zeros(3, dtype=torch.float64)
    for first in range(0, windows.epoch_size, 8):
        batch = windows.__getitems__(range(first, min(first + 8, windows.epoch_size)))
        ids, targets = shift(batch["input_ids"], batch["labels"])
        loss = cross_entropy_sum(model.model(ids), model.head_weight, targets)
        total += torch.tensor([loss, targets.numel(), lengths[targets].sum()])
    loss, count, n_bytes = total.tolist()
    return loss / count, bits_per_byte(loss, int(n_bytes))


def xz_bits_per_byte(corpus: Path, tokenizer: TextTokenizer) -> float:
    """Of `xz -9e` over the validation text, documents one after another."""
    meta = json.loads((corpus / "meta.json").read_text(encoding="utf-8"))
    ids = np.fromfile(corpus / "val.bin", "<u2" if meta["dtype"] == "uint16" else "<u4")
    text = tokenizer.decode(ids[ids != tokenizer.eos_id].tolist()).encode("utf-8")
    assert len(text) == meta["val"]["bytes"]
    return 8 * len(lzma.compress(text, preset=9 | lzma.PRESET_EXTREME)) / len(text)


@torch.inference_mode()
def main(run: Path, corpus: Path) -> None:
    path, checkpoint = read_newest(run, print)
    trained = from_checkpoint(checkpoint, path)
    config, model = trained.config, trained.model().eval()
    tokenizer = TextTokenizer.load(run / "tokenizer.json")
    with (run / "metrics.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    record = json.loads((run / "run.json").read_text(encoding="utf-8"))
    loss, bits = validation(model, corpus, config.max_seq_len)
    rates = [float(r["throughput/tokens_per_sec"]) for r in rows if r["throughput/tokens_per_sec"]]
    texts = []
    for seed in range(20):
        ids = generate(
            model, [tokenizer.eos_id], max_new_tokens=200, temperature=0.8, top_k=None, top_p=None,
            seed=seed, eos_id=tokenizer.eos_id, n_tokens=tokenizer.size,
        )  # fmt: skip
        texts.append(tokenizer.decode(list(ids)))
    print(f"commit {record['commit']}, {record['contract']['device']}, {record['versions']}")
    print(f"steps {checkpoint['global_step']}, starts {len(record['starts'])}")
    print(f"first loss {float(rows[0]['train/loss']):.4f}")
    print(f"validation loss {loss:.4f}, {bits:.4f} bits per byte (all of val.bin, fp32)")
    print(f"xz -9e {xz_bits_per_byte(corpus, tokenizer):.4f} bits per byte")
    print(f"tokens/s median {statistics.median(rates):,.0f}")
    print(f"peak memory {max(float(r['memory/peak_gib'] or 0) for r in rows):.2f} GiB")
    print(f"tokenize accepts {sum(map(accepted, texts))} of {len(texts)} samples")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
