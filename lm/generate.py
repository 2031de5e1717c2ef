"""Sampling: token by token, with a KV cache."""

from collections.abc import Generator, Sequence

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from lm.finite import NonFiniteError
from lm.model import LM, KVCache


def generate(
    model: LM,
    prompt: list[int],
    *,
    max_new_tokens: int,
    temperature: float,
    top_k: int | None,
    top_p: float | None,
    seed: int,
    eos_id: int | None,
    n_tokens: int,
    holes: Sequence[int] = (),
    use_cache: bool = True,
) -> Generator[int, None, None]:
    """Yield the ids that follow a prompt, each as soon as it is drawn.

    The context is the last max_seq_len of prompt and new ids. The model is in eval mode until the
    generator is exhausted or closed, then in its previous mode.

    Args:
        model: On any device; a seed gives the same text on all of them, up to rounding.
        prompt: At least one id; not yielded.
        max_new_tokens: Maximum number of ids to yield.
        temperature: Divides the logits; 0 is greedy and independent of the seed.
        top_k: Draw among this many likeliest ids.
        top_p: Draw among the fewest likeliest ids that reach this probability, after top_k.
        seed: Seed of a separate generator; torch's global one is not used.
        eos_id: Ends the text; not yielded.
        n_tokens: Size of the tokenizer; ids from there on are never drawn.
        holes: Ids below n_tokens without a token, never drawn.
        use_cache: Cache keys and values of past positions: the same ids, faster.

    Raises:
        ValueError: the prompt is empty or an option is out of range; raised by the call, not by the
            first next().
    """
    if not prompt:
        raise ValueError("--prompt has no tokens: must have at least one")
    if max_new_tokens < 0:
        raise ValueError(f"--max_new_tokens is {max_new_tokens}: must be 0 or above")
    if not temperature >= 0:  # true of nan too
        raise ValueError(f"--temperature is {temperature}: must be 0 (greedy) or above")
    if top_k is not None and top_k < 1:
        raise ValueError(f"--top_k is {top_k}: must be at least 1")
    if top_p is not None and not 0 < top_p <= 1:
        raise ValueError(f"--top_p is {top_p}: must be above 0 and at most 1")
    generator = torch.Generator().manual_seed(seed)

    # The body of a generator runs at the first next(); the checks above run at the call.
    @torch.inference_mode()
    def draw() -> Generator[int, None, None]:
        ids = list(prompt)
        was_training = model.training
        model.eval()
        try:
            size = len(prompt) + max_new_tokens
            cache = KVCache(model.config, 1, model.head_weight, size) if use_cache else None
            for _ in range(max_new_tokens):
                logits = next_logits(model, ids, cache)[:n_tokens]
                if holes:
                    logits[list(holes)] = -torch.inf
                token = pick(logits, temperature, top_k, top_p, generator)
                if token == eos_id:
                    return
                ids.append(token)
                yield token
        finally:
            model.train(was_training)

    return draw()


def next_logits(model: LM, ids: list[int], cache: KVCache | None) -> Float[Tensor, " V"]:
    """Return the logits of the id after `ids`, the first of which may be cached."""
    window = model.config.max_seq_len
    if len(ids) > window:
        # Cached keys are rotated by positions, which change when the window moves.
        cache = None
    start = max(0, len(ids) - window) if cache is None else cache.length
    context = torch.tensor([ids[start:]], device=model.head_weight.device)
    return F.linear(model.model(context, cache)[0, -1], model.head_weight)


def pick(
    logits: Float[Tensor, " V"],
    temperature: float,
    top_k: int | None,
    top_p: float | None,
    generator: torch.Generator,
) -> int:
    """Draw one index; see `generate` for the options."""
    # On the CPU, so that draws do not depend on the device.
    logits = logits.cpu().double()
    if not logits.max().isfinite():  # NaN if any is; -inf marks excluded ids
        raise NonFiniteError(
            "the model's logits are not finite: its weights are too large or damaged; give an "
            "earlier checkpoint"
        )
    if temperature == 0:
        return int(logits.argmax())
    ranked, ids = logits.sort(descending=True, stable=True)
    # With the largest logit at 0, a tiny temperature overflows to -inf, of probability 0.
    shares = ((ranked[:top_k] - ranked[0]) / temperature).softmax(dim=0)
    if top_p is not None:
        # Excluding the id's own share keeps the id that reaches top_p.
        shares = shares[shares.cumsum(dim=0) - shares < top_p]
    return int(ids[torch.multinomial(shares, 1, generator=generator)])
