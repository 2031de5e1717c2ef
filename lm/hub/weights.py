"""Names of weights in Hugging Face's files: to and from those of `LM`."""

import torch
from torch import Tensor

from lm.config import ModelConfig
from lm.hub.config import EXPERT_NAMES, architecture

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def to_hf_weights(
    weights: dict[str, Tensor], config: ModelConfig, vocab_size: int
) -> dict[str, Tensor]:
    """Return weights under Hugging Face's names: experts unstacked, the vocabulary unpadded.

    A tied matrix is stored once.
    """
    found: dict[str, Tensor] = {}
    for name, tensor in weights.items():
        if name in (EMBEDDING, HEAD):
            found[name] = tensor[:vocab_size]
        elif ".mlp.gate." in name or ".mlp.experts." in name:
            found |= _split(name, tensor, architecture(config))
        else:
            found[name] = tensor
    return found


def _split(name: str, tensor: Tensor, kind: str) -> dict[str, Tensor]:
    place, gate, up, down = EXPERT_NAMES[kind]
    layer, _, part = name.partition(".mlp.")
    if part == "gate.weight":
        return {f"{layer}.{place}.gate.weight": tensor}
    names = [down] if part.endswith("down_proj") else [gate, up]
    return {
        f"{layer}.{place}.experts.{number}.{matrix}.weight": values
        for number, one in enumerate(tensor)
        for matrix, values in zip(names, one.chunk(len(names)), strict=True)
    }


def from_hf_weights(weights: dict[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """Return the inverse of `to_hf_weights`; a tied matrix may have either name or both."""
    found = dict(weights)
    if config.tie_embeddings and (head := found.pop(HEAD, None)) is not None:
        found.setdefault(EMBEDDING, head)
    if config.n_experts is None:
        return found
    place, gate, up, down = EXPERT_NAMES[architecture(config)]
    for layer in range(config.n_layers):
        theirs, ours = f"model.layers.{layer}.{place}", f"model.layers.{layer}.mlp"
        names = {
            part: [f"{theirs}.experts.{i}.{part}.weight" for i in range(config.n_experts)]
            for part in (gate, up, down)
        }
        wanted = {f"{theirs}.gate.weight"}.union(*names.values())
        if not wanted <= found.keys():
            continue  # the comparison of names reports what is missing
        found[f"{ours}.gate.weight"] = found.pop(f"{theirs}.gate.weight")
        gates, ups, downs = ([found.pop(name) for name in names[part]] for part in names)
        pairs = [torch.cat(pair) for pair in zip(gates, ups, strict=True)]
        found[f"{ours}.experts.gate_up_proj"] = torch.stack(pairs)
        found[f"{ours}.experts.down_proj"] = torch.stack(downs)
    return found
