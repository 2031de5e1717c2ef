"""Continue a prompt: one token id after another, with a KV cache."""

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

    Once they outgrow the context together, the last max_seq_len of prompt and new ids are the
    context. The model is in eval mode until the generator is exhausted or closed, then in the
    mode it came in.

    Args:
        model: On any device, with the same text for a seed up to rounding.
        prompt: At least one id; not yielded.
        max_new_tokens: Most ids to yield.
        temperature: Divides the logits; 0 takes the likeliest id, whatever the seed.
        top_k: Draw among this many likeliest ids.
        top_p: Draw among the fewest likeliest ids that reach this share, of what top_k left.
        seed: Of a generator of its own: torch's global one is neither read nor moved.
        eos_id: Ends the text when drawn; not yielded.
        n_tokens: Size of the tokenizer; the vocabulary's rows from there on are never drawn.
        holes: Ids below n_tokens that are no token, never drawn either.
        use_cache: Keep keys and values of past positions: the same ids, sooner.

    Raises:
        ValueError: the prompt is empty or an option is out of range; at the call, not at the
            first id.
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

    # A generator function's body waits for the first next(), the checks above do not.
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
    """Logits of the id after `ids`, of which a cache may hold the first ones."""
    window = model.config.max_seq_len
    if len(ids) > window:
        # Cached keys are turned by positions that all move when the window does.
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
    # On the CPU, so that a seed does not depend on the device.
    logits = logits.cpu().double()
    if not logits.max().isfinite():  # NaN if any is; -inf of ids that are left out does not count
        raise NonFiniteError(
            "the model's logits are not finite: its weights are too large or damaged; give an "
            "earlier checkpoint"
        )
    if temperature == 0:
        return int(logits.argmax())
    ranked, ids = logits.sort(descending=True, stable=True)
    # With the largest logit at 0 a tiny temperature overflows to -inf only, which has no share.
    shares = ((ranked[:top_k] - ranked[0]) / temperature).softmax(dim=0)
    if top_p is not None:
        # The share before an id, so that the one which reaches top_p stays.
        shares = shares[shares.cumsum(dim=0) - shares < top_p]
    return int(ids[torch.multinomial(shares, 1, generator=generator)])
