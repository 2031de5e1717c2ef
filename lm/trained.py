"""Trained models read from checkpoints, weights-only files and Hugging Face folders."""

import json
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from lm.config import ModelConfig
from lm.finite import NonFiniteError, few, non_finite
from lm.hub.files import read_folder, read_safetensors, save_tensors
from lm.model import LM, plain_keys

# Key of a weights-only file's metadata.
FACTS = "relight"
CHECKSUM = "crc32"
# Derived properties of ModelConfig, and the keys that set them.
KEYS = {"kv_heads": "n_kv_heads", "head_size": "head_dim"}


@dataclass(frozen=True, kw_only=True)
class Trained:
    """Weights, their configuration and their origin."""

    config: ModelConfig
    weights: dict[str, Tensor]
    """Tensors by the names of `LM`."""
    source: Path
    """The file or folder they were read from."""
    tokenizer_path: Path
    """Expected path of the tokenizer.json."""
    tokenizer_fingerprint: str | None = None
    """Fingerprint of the training tokenizer; None: unknown."""
    has_tokenizer: bool = True
    """False if it was trained on token files without a tokenizer."""
    begins_with_bos: bool | None = None
    """Whether documents began with a bos; None: as the tokenizer's files say."""
    facts: dict[str, Any] = field(default_factory=dict)
    """Facts of its training: global_step, train_loss, val_loss, contract."""

    def __post_init__(self) -> None:
        if bad := list(non_finite(self.weights)):
            raise ValueError(
                f"{self.source} is of no use, for weights are not finite: {few(bad)}; give an "
                "earlier checkpoint or a sound copy"
            )

    def model(self) -> LM:
        """Return the network, on the CPU in fp32."""
        return network(self.config, self.weights)


def network(config: ModelConfig, weights: dict[str, Tensor]) -> LM:
    """Return a network with given weights, on the CPU in fp32."""
    model = LM(config)
    model.load_state_dict(weights)
    return model


def from_checkpoint(checkpoint: dict[str, Any], path: Path) -> Trained:
    """Return the model of a checkpoint.

    Raises:
        ValueError: fit did not write it.
    """
    if missing := {"contract", "model_config"} - checkpoint.keys():
        raise ValueError(f"{path} lacks {', '.join(sorted(missing))}: it was not made by fit")
    weights = plain_keys(checkpoint["state_dict"])
    weights = {name.removeprefix("net."): tensor for name, tensor in weights.items()}
    return _trained(facts(checkpoint), weights, path, path.parent.parent)


def from_weights_file(path: Path) -> Trained:
    """Return the model of a weights-only file.

    Raises:
        ValueError: the file is damaged, or fit did not write it.
    """
    weights, metadata = read_safetensors(path)
    if FACTS not in metadata:
        raise ValueError(
            f"{path} was not written by fit: of a model in Hugging Face's form give the folder"
        )
    if metadata.get(CHECKSUM) not in (None, checksum(weights, metadata[FACTS])):
        raise ValueError(
            f"{path} is damaged: its content does not match its checksum; bring back a sound copy, "
            "or use a checkpoint of the run"
        )
    return _trained(json.loads(metadata[FACTS]), weights, path, path.parent)


def _trained(
    content: dict[str, Any], weights: dict[str, Tensor], path: Path, folder: Path
) -> Trained:
    fingerprint = content["contract"]["tokenizer fingerprint"]
    return Trained(
        config=ModelConfig(**content["model_config"]),
        weights=weights,
        source=path,
        tokenizer_path=folder / "tokenizer.json",
        tokenizer_fingerprint=fingerprint,
        has_tokenizer=fingerprint is not None,
        begins_with_bos=content["contract"].get("documents begin with bos", False),
        facts=content,
    )


def from_folder(folder: Path) -> Trained:
    """Return the model of a Hugging Face folder.

    Raises:
        ValueError: a file is damaged, the model is not supported, or the weights do not fit it.
    """
    config, weights = read_folder(folder)
    if faults := differences(weights, config):
        raise ValueError(
            f"{folder} does not hold what its config.json says: {few(faults)}; fetch the "
            "folder again, or save the model anew with transformers' save_pretrained"
        )
    return Trained(
        config=config, weights=weights, source=folder, tokenizer_path=folder / "tokenizer.json"
    )


def write_weights_file(weights: dict[str, Tensor], checkpoint: dict[str, Any], path: Path) -> None:
    """Write weights by the names of `LM`, with the facts of their checkpoint.

    Raises:
        NonFiniteError: a tensor holds NaN or infinity.
        OSError: writing fails.
    """
    text = json.dumps(facts(checkpoint))
    if bad := list(non_finite(weights)):
        raise NonFiniteError(f"weights are not finite: {few(bad)}")
    save_tensors(weights, path, {FACTS: text, CHECKSUM: checksum(weights, text)})


def checksum(weights: Mapping[str, Tensor], text: str) -> str:
    """Return the CRC32 over facts, names, shapes and contents, as hexadecimal digits."""
    crc = zlib.crc32(text.encode())
    for name in sorted(weights):
        tensor = weights[name].detach().cpu().contiguous()
        crc = zlib.crc32(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode(), crc)
        crc = zlib.crc32(tensor.flatten().view(torch.uint8).numpy().data, crc)
    return f"{crc:08x}"


def has_checksum(path: Path) -> bool:
    """Whether a weights-only file holds a checksum of its content."""
    with safe_open(path, framework="pt") as file:
        return CHECKSUM in file.metadata()


def step_of_weights(path: Path) -> int:
    """Return the step of a weights-only file; -1 if it is not one."""
    try:
        with safe_open(path, framework="pt") as file:
            return json.loads(file.metadata()[FACTS])["global_step"]
    except (OSError, SafetensorError, KeyError, TypeError, ValueError):
        return -1


def facts(checkpoint: dict[str, Any]) -> dict[str, Any]:
    """Return the entries of a checkpoint that a weights-only file keeps."""
    names = ("global_step", "train_loss", "val_loss", "model_config", "contract")
    return {name: checkpoint[name] for name in names if name in checkpoint}


def differences(weights: dict[str, Tensor], config: ModelConfig) -> list[str]:
    """Return the names whose shapes differ from those of the configuration's network."""
    with torch.device("meta"):
        return unlike(weights, LM(config).state_dict())


def unlike(given: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> list[str]:
    """Return the names whose shapes differ, with both shapes."""
    left, right = (
        {name: tuple(t.shape) for name, t in weights.items()} for weights in (given, wanted)
    )
    return [
        f"{name} is {left.get(name, 'missing')} and should be {right.get(name, 'absent')}"
        for name in sorted(left.keys() | right.keys())
        if left.get(name) != right.get(name)
    ]


def starting_weights(trained: Trained, config: ModelConfig, grow: bool) -> dict[str, Tensor]:
    """Return the initial weights of a new run; with a larger vocabulary, its first rows.

    Args:
        config: Configuration of the run.
        grow: Allow a larger vocabulary than the model's.

    Raises:
        ValueError: the model differs from the run's.
    """
    # Fields that change the computation; the context length does not.
    names = ("d_model", "n_layers", "n_heads", "kv_heads", "head_size", "ffn_dim", "n_experts")
    names += ("tie_embeddings", "qk_norm", "rope_theta", "norm_eps")
    names += ("n_experts_per_token",) if config.n_experts else ()
    faults = [
        f"model.config.{KEYS.get(name, name)} is {getattr(config, name)} and of the weights "
        f"{getattr(trained.config, name)}"
        for name in names
        if getattr(config, name) != getattr(trained.config, name)
    ]
    more = config.vocab_size - trained.config.vocab_size
    if more < 0 or (more and not grow):
        way_out = "; model.grow_vocab true adds new rows" if more > 0 else ""
        faults.append(
            f"model.config.vocab_size is {config.vocab_size} and of the weights "
            f"{trained.config.vocab_size}{way_out}"
        )
    if faults:
        faults += [few(shapes)] if (shapes := differences(trained.weights, config)) else []
        raise ValueError(
            f"model.from_weights {trained.source} is another model than the run's: "
            f"{'; '.join(faults)}"
        )
    return {name: tensor.float() for name, tensor in trained.weights.items()}
