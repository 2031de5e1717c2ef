"""Export of a trained model as a Hugging Face folder: written, verified, then published."""

from pathlib import Path

import torch

from lm.hub.card import model_card
from lm.hub.config import to_hf_config
from lm.hub.files import write_json, write_weights
from lm.hub.folder import atomic_folder, check_place, seal
from lm.hub.tokenizer import Tokens, begins_with_bos, special_ids, write_tokenizer
from lm.hub.verify import verify
from lm.hub.weights import to_hf_weights
from lm.trained import Trained

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def export(
    trained: Trained,
    output: Path,
    *,
    dtype: str = "fp32",
    tokenizer: Tokens | None = None,
    overwrite: bool = False,
    shard_bytes: float = 5e9,
) -> list[str]:
    """Write a Hugging Face folder, published only after verification; return a report.

    Args:
        tokenizer: Written too; None: the folder has no tokenizer.
        overwrite: Replace an existing export.
        shard_bytes: Maximum size of a weight file.

    Raises:
        ValueError: the folder exists, or the model cannot be represented.
        RuntimeError: the exported model computes something else.
        OSError: writing fails.
    """
    check_place(output, overwrite)
    config, kind = trained.config, DTYPES[dtype]
    size = config.vocab_size if tokenizer is None else tokenizer.size
    ids = special_ids(tokenizer)
    content = to_hf_config(config, size, str(kind).removeprefix("torch."), ids)
    weights = to_hf_weights({n: t.to(kind) for n, t in trained.weights.items()}, config, size)
    too_large = [name for name, tensor in weights.items() if not tensor.isfinite().all()]
    if too_large:
        raise ValueError(
            f"{', '.join(too_large)} of {trained.source} do not fit into {dtype}: give --dtype bf16"
        )
    needed = sum(tensor.nbytes for tensor in weights.values())
    with atomic_folder(output, needed, overwrite) as folder:
        write_weights(weights, folder, shard_bytes)
        write_json(folder / "config.json", content)
        write_json(folder / "generation_config.json", {f"{n}_token_id": i for n, i in ids.items()})
        if tokenizer is not None:
            write_tokenizer(
                tokenizer, folder, config.max_seq_len, begins_with_bos(trained, tokenizer)
            )
        card = model_card(trained, dtype, needed, size)
        (folder / "README.md").write_text(seal(folder, card), encoding="utf-8", newline="\n")
        lines = [*verify(trained, folder, kind, size, tokenizer)]
    what = f"{output}: {content['architectures'][0]}, {dtype}, {needed / 1e6:.1f} MB"
    if size < config.vocab_size:
        lines.append(f"{config.vocab_size - size} rows of the vocabulary that no token has: cut")
    if config.dropout:
        lines.append(f"dropout {config.dropout} of training: left out, it has no place in use")
    if tokenizer is None:
        lines.append("no tokenizer: the model was trained on token files without one")
    return [what, *lines]
