"""Files of a Hugging Face folder: safetensors, shards and their index, JSON."""

import json
import stat
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from lm.config import ModelConfig
from lm.finite import few
from lm.hub.config import from_hf_config
from lm.hub.weights import EMBEDDING, HEAD, from_hf_weights

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
PREFIX, BARE = "model.", "norm.weight"
POINTER = b"version https://git-lfs"
FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def shards(weights: dict[str, Tensor], most_bytes: float) -> Iterator[dict[str, Tensor]]:
    """Yield shards of the weights, filled in order; a tensor is never split."""
    part: dict[str, Tensor] = {}
    for name, tensor in weights.items():
        if part and sum(t.nbytes for t in part.values()) + tensor.nbytes > most_bytes:
            yield part
            part = {}
        part[name] = tensor
    yield part


def write_weights(weights: dict[str, Tensor], folder: Path, most_bytes: float) -> None:
    """Write `model.safetensors`, or shards of at most that size and their index."""
    parts = list(shards(weights, most_bytes))
    where: dict[str, str] = {}
    for number, part in enumerate(parts, 1):
        file = f"model-{number:05d}-of-{len(parts):05d}.safetensors" if len(parts) > 1 else WEIGHTS
        # safetensors refuses views of a shared storage, such as unstacked experts.
        whole = {n: t.clone(memory_format=torch.contiguous_format) for n, t in part.items()}
        save_tensors(whole, folder / file, {"format": "pt"})
        where |= dict.fromkeys(part, file)
    if len(parts) > 1:
        total = sum(tensor.nbytes for tensor in weights.values())
        index = {"metadata": {"total_size": total}, "weight_map": where}
        (folder / INDEX).write_text(json.dumps(index, indent=1) + "\n", encoding="utf-8")


def save_tensors(tensors: dict[str, Tensor], path: Path, metadata: dict[str, str]) -> None:
    """Write a safetensors file.

    Raises:
        OSError: writing fails.
    """
    # safetensors would leave a file that only its owner may read.
    path.touch()
    mode = stat.S_IMODE(path.stat().st_mode)
    try:
        save_file(tensors, path, metadata=metadata)
        path.chmod(mode)
    except SafetensorError as error:
        raise OSError(f"{path} could not be written: {error}") from error


def read_safetensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the tensors and metadata of a safetensors file.

    Raises:
        OSError: the system cannot read the file.
        ValueError: it is missing or damaged.
    """
    try:
        path.open("rb").close()  # safetensors calls every file missing that does not open
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}, file.metadata() or {}  # noqa: SIM118
    except FileNotFoundError as error:
        raise ValueError(f"{path} does not exist: fetch the folder again") from error
    except SafetensorError as error:
        raise ValueError(f"{path} is damaged ({error}): fetch it again") from error


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write an indented JSON file."""
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file.

    Raises:
        ValueError: it is missing or damaged.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8-sig"))
    except FileNotFoundError as error:
        raise ValueError(f"{path} does not exist: fetch the folder again") from error
    except ValueError as error:
        raise ValueError(f"{path} is damaged ({error}): fetch it again") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds no object: fetch it again")
    return content


def names_model(folder: Path) -> bool:
    """Whether a folder holds files of a Hugging Face model."""
    names = ("config.json", "adapter_config.json", WEIGHTS, INDEX)
    return any((folder / name).is_file() for name in names)


def is_pointer(path: Path) -> bool:
    """Whether a file is a pointer that Git LFS left instead of the content."""
    with path.open("rb") as file:
        return file.read(len(POINTER)) == POINTER


def refuse_unfit_files(folder: Path) -> None:
    """Refuse Git LFS pointers and adapters.

    Raises:
        ValueError: the folder does not hold a whole model.
    """
    for path in sorted([*folder.glob("*.json"), *folder.glob("*.safetensors")]):
        if path.is_file() and is_pointer(path):
            raise ValueError(
                f"{path} is a pointer of Git LFS and not the file: get it by git lfs pull"
            )
    if (folder / "adapter_config.json").exists():
        raise ValueError(
            f"{folder} holds an adapter (adapter_config.json), which is only a part of a model: "
            "merge it by peft's merge_and_unload and save the whole with save_pretrained"
        )


def read_weights(folder: Path) -> dict[str, Tensor]:
    """Return the tensors of `model.safetensors` or of all shards, by the names in the files.

    Raises:
        ValueError: files are missing or damaged, or the weights are quantized.
    """
    # transformers' order: an index beside a single file is a leftover of an older save.
    if (folder / WEIGHTS).is_file():
        files = [WEIGHTS]
    elif (folder / INDEX).is_file():
        where = read_json(folder / INDEX).get("weight_map")
        if not isinstance(where, dict) or not all(isinstance(file, str) for file in where.values()):
            raise ValueError(f"{folder / INDEX} names no files: fetch it again")
        files = sorted(set(where.values()))
    else:
        raise ValueError(
            f"{folder} holds no {WEIGHTS} and no {INDEX}: weights are read as safetensors only; "
            "save them so with transformers' save_pretrained"
        )
    weights: dict[str, Tensor] = {}
    for file in files:
        weights |= read_safetensors(folder / file)[0]
    if odd := [f"{name} as {t.dtype}" for name, t in weights.items() if t.dtype not in FLOATS]:
        raise ValueError(
            f"{folder} holds {few(odd)}: weights must be floating-point numbers of 16 bits or "
            "more; save them so with transformers' dequantize and save_pretrained"
        )
    return weights


def read_folder(folder: Path) -> tuple[ModelConfig, dict[str, Tensor]]:
    """Return the configuration and the weights of a Hugging Face folder, by the names of `LM`.

    Raises:
        ValueError: a file is damaged or the model is not supported.
    """
    refuse_unfit_files(folder)
    config = from_hf_config(read_json(folder / "config.json"), folder / "config.json")
    weights = read_weights(folder)
    if PREFIX + BARE not in weights and BARE in weights:
        # The trunk was saved without the head.
        weights = {name if name == HEAD else PREFIX + name: t for name, t in weights.items()}
    # Old exports also store the rotary frequencies, which follow from the configuration.
    weights = {name: t for name, t in weights.items() if "rotary_emb" not in name}
    both = weights.get(EMBEDDING), weights.get(HEAD)
    if config.tie_embeddings and both[0] is not None and both[1] is not None:
        # If the two differ, transformers uses both, whatever config.json says.
        config = replace(config, tie_embeddings=torch.equal(both[0], both[1]))
    return config, from_hf_weights(weights, config)
