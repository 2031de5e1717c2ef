"""`lightning sample`: text that a trained model writes."""

import io
import sys
import time
from functools import partial

from callbacks.config.options import LineParser, finite, integer, local_path, utf8
from callbacks.run.trained import TRAINED, load_trained


def sample(argv: list[str]) -> None:
    """Write text with a trained model."""
    parser = LineParser(sample)
    add = parser.add_argument
    add("--ckpt_path", required=True, type=local_path, help=TRAINED)
    add(
        "--prompt",
        action="append",
        type=utf8,
        help="text to go on from, repeatable; else stdin is read",
    )
    add(
        "--max_new_tokens",
        type=integer,
        default=200,
        help="at most so many tokens after each prompt",
    )
    add("--temperature", type=finite, default=0.8, help="0 always takes the likeliest token")
    add("--top_k", type=integer, help="draw from the k likeliest tokens only")
    add("--top_p", type=finite, help="draw from the fewest tokens whose mass reaches p")
    add("--seed", type=integer, default=1337, help="of the draws")
    add("--device", default="auto", choices=("auto", "cpu", "cuda", "mps"), help="where to run")
    add("--tokenizer", type=local_path, help="tokenizer.json; unset: the one in the run folder")
    options = parser.parse_args(argv)
    if not 0 <= options.seed < 2**63:
        raise ValueError(f"--seed is {options.seed}: must be 0 or more and below 2^63")

    from data.system.threads import in_thread
    from data.text.continuation import continuation
    from data.text.text_loss import TextLoss
    from lm.generate import generate

    model, tokenizer, start = load_trained(options.ckpt_path, options.device, options.tokenizer)
    started, count = time.perf_counter(), 0
    for prompt in options.prompt or [piped_prompt()]:
        ids = list(in_thread(partial(tokenizer.encode_batch, [prompt]))[0])
        if lost := tokenizer.lost([prompt], [ids]):
            share = TextLoss(len(prompt), lost).share
            print(f"warning: --prompt: {share} do not come back from their ids", file=sys.stderr)
        new = generate(
            model,
            # Without a prompt a document starts, as after the end of another.
            start + ids or [tokenizer.eos_id],
            max_new_tokens=options.max_new_tokens,
            temperature=options.temperature,
            top_k=options.top_k,
            top_p=options.top_p,
            seed=options.seed,
            eos_id=tokenizer.eos_id,
            n_tokens=tokenizer.size,
            holes=tokenizer.holes,
        )
        print(prompt, end="", flush=True)
        n_new = 0
        for n_new, text in enumerate(continuation(tokenizer, ids, new)):  # noqa: B007
            print(text, end="", flush=True)
        count += n_new
        print(flush=True)
    rate = count / (time.perf_counter() - started)
    print(f"{count} tokens, {rate:.0f} tokens/s", file=sys.stderr)


def piped_prompt() -> str:
    """Return the text of standard input, decoded as UTF-8."""
    if sys.stdin.isatty():
        raise ValueError("there is no prompt; give --prompt TEXT or pipe text in")
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(encoding="utf-8", errors="strict")
    try:
        return sys.stdin.read()
    except UnicodeDecodeError as error:
        raise ValueError(f"the piped prompt is not UTF-8 ({error}); convert it first") from None
