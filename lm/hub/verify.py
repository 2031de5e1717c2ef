"""Verification of an export: its logits and token ids equal those of the trained model."""

import importlib
import importlib.util
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from lm.hub.files import read_folder
from lm.hub.tokenizer import Tokens, begins_with_bos
from lm.trained import Trained, network

TOLERANCE = 1e-4  # of fp32 logits, relative to the largest if that is above 1
# Share of positions that may choose other experts, because router probabilities are nearly equal.
TIES = 0.01
MOST_POSITIONS = 1024  # at which logits are compared
PROBE = "def main(argument):\n    return 'été 漢字 🙂'  # 1 + 1\n"


def verify(
    trained: Trained, folder: Path, kind: torch.dtype, size: int, tokenizer: Tokens | None
) -> Iterator[str]:
    """Load the folder with our reader and with transformers; compare logits and token ids.

    Raises:
        RuntimeError: they differ.
    """
    rounded = {name: tensor.to(kind).float() for name, tensor in trained.weights.items()}
    length = min(trained.config.max_seq_len, MOST_POSITIONS)
    ids = torch.randint(size, (1, length), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        ours = network(trained.config, rounded).eval()(ids)[..., :size]
        config, weights = read_folder(folder)
        again = network(config, weights).eval()(ids)
    ties = 0.0 if config.n_experts is None else TIES
    yield f"read again: {differ(ours, again, 'our reader', ties)}"
    if importlib.util.find_spec("transformers") is None or older(version("transformers")):
        yield "transformers, from release 5 on, is not installed: it did not read it"
        return
    theirs, tokens = by_transformers(folder, ids)
    yield f"by transformers {version('transformers')}: {differ(ours, theirs, 'transformers', ties)}"
    if tokenizer is None:
        return
    bos = begins_with_bos(trained, tokenizer)
    expected = tokenizer.start_ids(bos) + tokenizer.encode(PROBE)
    if tokens == expected:
        begin = ", with the bos before each text" if bos else ""
        yield f"its tokenizer gives the ids that the model was trained on{begin}"
    elif tokens and [i for i in tokens if i in expected] == expected:
        yield (
            "its tokenizer adds special tokens to a text, which training did not: pass "
            "add_special_tokens=False"
        )
    else:
        raise RuntimeError(f"transformers reads {PROBE!r} as {tokens}, training as {expected}")


def older(release: str) -> bool:
    """Whether a transformers release has another name for the argument `dtype`."""
    return int(release.partition(".")[0]) < 5


def differ(
    ours: Float[Tensor, "B T V"], theirs: Float[Tensor, "B T V"], who: str, ties: float
) -> str:
    """Return how far logits differ, as text.

    Args:
        ties: Share of positions that may differ more.

    Raises:
        RuntimeError: they differ too much.
    """
    if ours.shape != theirs.shape:
        raise RuntimeError(f"{who} gives logits of {theirs.shape}, the model of {ours.shape}")
    apart = (ours - theirs).abs().amax(-1)[0]
    limit = TOLERANCE * max(1.0, float(ours.abs().max()))
    far = int((~(apart < limit)).sum())
    most = float(apart.max())
    if far > ties * len(apart):
        raise RuntimeError(
            f"the exported model, read by {who}, does not compute what the trained one does: "
            f"logits differ by {most:.2g} at position {int(apart.argmax())}; nothing was written"
        )
    if far:
        return f"logits of {len(apart) - far} of {len(apart)} positions within {limit:.0e}"
    return f"logits of all {len(apart)} positions within {most:.0e}"


def by_transformers(
    folder: Path, ids: Int[Tensor, "B T"]
) -> tuple[Float[Tensor, "B T V"], list[int] | None]:
    """Return the logits and the ids of `PROBE`, computed by transformers' Auto classes."""
    transformers: Any = importlib.import_module("transformers")
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, local_files_only=True
    )
    with torch.inference_mode():
        found = model.eval()(ids).logits
    if not (folder / "tokenizer.json").is_file():
        return found, None
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    return found, tokenizer(PROBE)["input_ids"]
