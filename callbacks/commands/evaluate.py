"""`lightning evaluate`: bits per byte of texts, and tasks of lm-eval."""

import argparse
import math
import sys
from functools import partial
from pathlib import Path

from callbacks.config.options import LineParser, integer, local_path, nonempty
from callbacks.run.trained import (
    TRAINED,
    load_trained,
    read_trained,
    tokenizer_of,
    usable_device,
)


def evaluate(argv: list[str]) -> None:
    """Measure a trained model by bits per byte, or by tasks of lm-eval."""
    parser = LineParser(evaluate)
    add = parser.add_argument
    add("--ckpt_path", required=True, type=local_path, help=TRAINED)
    add(
        "--text",
        nargs="+",
        default=[],
        type=local_path,
        metavar="FILE",
        help="UTF-8 files to evaluate on",
    )
    words = "ids by which the window moves on; unset: half of the context"
    add("--stride", type=integer, metavar="N", help=words)
    add("--tasks", type=nonempty, metavar="A,B", help="tasks of lm-eval, a package to install")
    add("--include_path", type=local_path, metavar="DIR", help="folder of tasks of your own")
    add("--limit", type=integer, metavar="N", help="only so many examples of a task")
    add("--device", default="auto", choices=("auto", "cpu", "cuda", "mps"), help="where to run")
    add("--tokenizer", type=local_path, help="tokenizer.json; unset: the one beside the model")
    options = parser.parse_args(argv)
    if not options.text and not options.tasks:
        raise ValueError("there is nothing to evaluate on: give --text FILES or --tasks NAMES")
    for file in options.text:
        if not Path(file).is_file():
            raise ValueError(f"--text {file} is no file; name UTF-8 text")

    if options.tasks:
        from lm.hub.tasks import require_lm_eval

        require_lm_eval()
    if options.text:
        evaluate_texts(options)
    if options.tasks:
        from lm.hub.tasks import run_tasks

        device = usable_device(options.device)
        trained = read_trained(Path(options.ckpt_path))
        tokenizer = tokenizer_of(trained, options.tokenizer)
        names = options.tasks.split(",")
        folder, limit = options.include_path, options.limit
        print(run_tasks(trained, tokenizer, names, folder, limit, device))


def evaluate_texts(options: argparse.Namespace) -> None:
    """Print the bits per byte of each text, and of all texts together."""
    from data.system.threads import in_thread
    from data.text.text_loss import TextLoss
    from lm.evaluate import bits_per_byte, loss_of_text

    model, tokenizer, start = load_trained(options.ckpt_path, options.device, options.tokenizer)
    half = max(1, model.config.max_seq_len // 2)
    stride = half if options.stride is None else options.stride
    results: dict[str, list[float]] = {}
    for file in options.text:
        try:
            text = Path(file).read_bytes().decode("utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"--text {file} is not UTF-8 ({error}): convert it first") from error
        if not text:
            raise ValueError(f"--text {file} is empty: there is nothing to foretell")
        (row,) = in_thread(partial(tokenizer.encode_batch, [text]))
        loss = TextLoss(len(text), tokenizer.lost([text], [row]))
        n_bytes = len(text.encode("utf-8")) - loss.n_lost_bytes
        if n_bytes == 0:
            raise ValueError(
                f"--text {file}: the model's tokenizer knows no character of it: give another text"
            )
        if loss.lost:
            print(
                f"warning: {file}: {loss.share} do not come back from their ids: their "
                f"{loss.n_lost_bytes:,} bytes are left out, and the bits per byte of other models "
                "are not comparable",
                file=sys.stderr,
            )
        # Documents in the data follow their bos, or the EOS of the previous one.
        ids = [*(start or [tokenizer.eos_id]), *row]
        nats = loss_of_text(model, ids, stride)
        if not math.isfinite(nats):
            raise RuntimeError(
                f"the loss of {file} is {nats}: the weights of {options.ckpt_path} are too large "
                "or damaged; give an earlier checkpoint"
            )
        results[file] = [nats, len(row), n_bytes]
    if len(results) > 1:
        results["all"] = [sum(column) for column in zip(*results.values(), strict=True)]
    for name, (nats, tokens, n_bytes) in results.items():
        print(
            f"{name}: {bits_per_byte(nats, int(n_bytes)):.4f} bits per byte, {nats / tokens:.4f} "
            f"nats a token, {tokens:,} tokens, {n_bytes:,} bytes"
        )
