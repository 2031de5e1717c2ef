"""A model in Hugging Face's form: `config.json`, the names of its weights, and their files."""

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

# By whether queries and keys are normed, and whether there are experts.
ARCHITECTURES = {
    (False, False): "LlamaForCausalLM",
    (True, False): "Qwen3ForCausalLM",
    (False, True): "MixtralForCausalLM",
    (True, True): "Qwen3MoeForCausalLM",
}
MODEL_TYPES = {
    "LlamaForCausalLM": "llama",
    "Qwen3ForCausalLM": "qwen3",
    "MixtralForCausalLM": "mixtral",
    "Qwen3MoeForCausalLM": "qwen3_moe",
}
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
PREFIX, BARE = "model.", "norm.weight"
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
DEFAULT_THETA = {"MixtralForCausalLM": 1e6}
DEFAULT_EPS = {"MixtralForCausalLM": 1e-5}
# What a stored expert's matrices are called: gate, up, down.
EXPERT_NAMES = {
    "MixtralForCausalLM": ("block_sparse_moe", "w1", "w3", "w2"),
    "Qwen3MoeForCausalLM": ("mlp", "gate_proj", "up_proj", "down_proj"),
}
# Settings that change what a model computes, with the values under which it is ours.
PLAIN: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu", "swish"),
    "attention_bias": (False, None),
    "mlp_bias": (False, None),
    "use_sliding_window": (False, None),
    "partial_rotary_factor": (1, None),
    "mlp_only_layers": ([], None),
    "decoder_sparse_step": (1, None),
}
# Types of what a configuration is made of.
WHOLE, NUMBER, PERHAPS = (int,), (int, float), (int, type(None))
TYPES: dict[str, tuple[type, ...]] = {
    "vocab_size": WHOLE,
    "hidden_size": WHOLE,
    "num_hidden_layers": WHOLE,
    "num_attention_heads": WHOLE,
    "num_key_value_heads": PERHAPS,
    "head_dim": PERHAPS,
    "intermediate_size": WHOLE,
    "moe_intermediate_size": WHOLE,
    "num_local_experts": WHOLE,
    "num_experts": WHOLE,
    "num_experts_per_tok": WHOLE,
    "max_position_embeddings": WHOLE,
    "sliding_window": PERHAPS,
    "rms_norm_eps": NUMBER,
    "rope_theta": NUMBER,
    "rope_parameters": (dict, type(None)),
    "rope_scaling": (dict, type(None)),
    "tie_word_embeddings": (bool, type(None)),
}
POINTER = b"version https://git-lfs"
FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def architecture(config: ModelConfig) -> str:
    """Name of the class that computes what a model of this configuration does."""
    return ARCHITECTURES[config.qk_norm, config.n_experts is not None]


def to_hf_config(
    config: ModelConfig, vocab_size: int, dtype: str, ids: dict[str, int | None]
) -> dict[str, Any]:
    """Content of `config.json`; `ids` are of bos, eos and pad.

    Raises:
        ValueError: the class takes no such model.
    """
    kind = architecture(config)
    if kind == "LlamaForCausalLM" and config.d_model % config.n_heads:
        raise ValueError(
            f"a model with d_model {config.d_model} and n_heads {config.n_heads} cannot be "
            f"exported: transformers' {kind} takes only a d_model that n_heads divides; train with "
            "model.config.qk_norm true, whose class takes any"
        )
    rope = {"rope_theta": config.rope_theta, "rope_type": "default"}
    content: dict[str, Any] = {
        "architectures": [kind],
        "model_type": MODEL_TYPES[kind],
        "vocab_size": vocab_size,
        "hidden_size": config.d_model,
        "intermediate_size": config.ffn_dim,
        "num_hidden_layers": config.n_layers,
        "num_attention_heads": config.n_heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_size,
        "hidden_act": "silu",
        "max_position_embeddings": config.max_seq_len,
        "initializer_range": config.init_std,
        "rms_norm_eps": config.norm_eps,
        "tie_word_embeddings": config.tie_embeddings,
        # Releases before 5 read the first, later ones the second.
        "rope_theta": config.rope_theta,
        "rope_parameters": rope,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "use_cache": True,
        "dtype": dtype,
        "torch_dtype": dtype,
        **{f"{name}_token_id": token_id for name, token_id in ids.items()},
    }
    if config.n_experts is None:
        return content | ({"mlp_bias": False} if kind == "LlamaForCausalLM" else {})
    content |= {
        "num_experts_per_tok": config.n_experts_per_token,
        # Its balance loss is n_experts_per_token where experts are used alike, ours is 1.
        "router_aux_loss_coef": config.aux_loss_coef / config.n_experts_per_token,
    }
    if kind == "MixtralForCausalLM":
        return content | {"num_local_experts": config.n_experts, "sliding_window": None}
    return content | {
        "num_experts": config.n_experts,
        "moe_intermediate_size": config.ffn_dim,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def from_hf_config(content: dict[str, Any], source: Path) -> ModelConfig:
    """Our configuration of a `config.json`.

    Raises:
        ValueError: it is of a model that ours cannot be, named with what can.
    """
    named = content.get("architectures") or []
    named = [named] if isinstance(named, str) else named
    # Transformers goes by the type; a trunk that was saved alone names a class without a head.
    trunks = {kind.replace("ForCausalLM", "Model"): kind for kind in MODEL_TYPES}
    by_type = {name: kind for kind, name in MODEL_TYPES.items()}.get(content.get("model_type", ""))
    known = [trunks.get(name, name) for name in named] or [by_type]
    kind = next((name for name in known if name in MODEL_TYPES), None)
    if kind is None:
        raise ValueError(
            f"{source} is of {', '.join(named) or 'no architecture'}, which is not supported: "
            f"{', '.join(MODEL_TYPES)} are"
        )
    experts = kind in EXPERT_NAMES
    wrong = [
        f"{name} is {content[name]!r}"
        for name, types in TYPES.items()
        if name in content and type(content[name]) not in types
    ]
    # In transformers' order.
    rope = content.get("rope_scaling") or content.get("rope_parameters") or {}
    if not wrong and type(rope.get("rope_theta", 1)) not in NUMBER:
        wrong = [f"rope_theta is {rope['rope_theta']!r}"]
    if wrong:
        raise ValueError(f"{source} is damaged ({', '.join(wrong)}): fetch it again")
    faults = [
        f"{name} is {content[name]}"
        for name, values in PLAIN.items()
        if name in content and content[name] not in values
    ]
    if (rope_type := rope.get("rope_type", rope.get("type", "default"))) != "default":
        faults.append(f"rope_type is {rope_type}")
    window = content.get("sliding_window") if kind == "MixtralForCausalLM" else None
    if window and window < content.get("max_position_embeddings", 0):
        faults.append(f"sliding_window is {window}")
    if kind == "Qwen3MoeForCausalLM" and not content.get("norm_topk_prob", False):
        faults.append("norm_topk_prob is false")
    if content.get("model_type", MODEL_TYPES[kind]) != MODEL_TYPES[kind]:
        faults.append(f"model_type is {content['model_type']}")
    if content.get("quantization_config"):
        faults.append("quantised weights (quantization_config)")
    if faults:
        raise ValueError(f"{source} has what is not supported: {', '.join(faults)}")
    theta = rope.get("rope_theta", content.get("rope_theta", DEFAULT_THETA.get(kind, 1e4)))
    try:
        return ModelConfig(
            vocab_size=content["vocab_size"],
            d_model=content["hidden_size"],
            n_layers=content["num_hidden_layers"],
            n_heads=content["num_attention_heads"],
            n_kv_heads=content.get("num_key_value_heads"),
            head_dim=content.get("head_dim", 128 if kind == "Qwen3ForCausalLM" else None),
            ffn_dim=content["moe_intermediate_size" if "Moe" in kind else "intermediate_size"],
            max_seq_len=content["max_position_embeddings"],
            tie_embeddings=bool(content.get("tie_word_embeddings")),
            qk_norm="Qwen3" in kind,
            n_experts=(
                content.get("num_local_experts", content.get("num_experts")) if experts else None
            ),
            **({"n_experts_per_token": content["num_experts_per_tok"]} if experts else {}),
            rope_theta=float(theta),
            norm_eps=content.get("rms_norm_eps", DEFAULT_EPS.get(kind, 1e-6)),
        )
    except KeyError as error:
        raise ValueError(f"{source} lacks {error}: fetch it again") from error
    except ValueError as error:
        raise ValueError(f"{source} is of a model that cannot be: {error}") from error


def to_hf_weights(
    weights: dict[str, Tensor], config: ModelConfig, vocab_size: int
) -> dict[str, Tensor]:
    """Our weights under Hugging Face's names: experts one by one, no padded rows of the vocabulary.

    A tied matrix is there once.
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
    """The inverse of `to_hf_weights`; a tied matrix may be there under either name or both."""
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
            continue  # who compares names says which are missing
        found[f"{ours}.gate.weight"] = found.pop(f"{theirs}.gate.weight")
        gates, ups, downs = ([found.pop(name) for name in names[part]] for part in names)
        pairs = [torch.cat(pair) for pair in zip(gates, ups, strict=True)]
        found[f"{ours}.experts.gate_up_proj"] = torch.stack(pairs)
        found[f"{ours}.experts.down_proj"] = torch.stack(downs)
    return found


def shards(weights: dict[str, Tensor], most_bytes: float) -> Iterator[dict[str, Tensor]]:
    """Parts of the weights, each as large as fits; a tensor is never cut."""
    part: dict[str, Tensor] = {}
    for name, tensor in weights.items():
        if part and sum(t.nbytes for t in part.values()) + tensor.nbytes > most_bytes:
            yield part
            part = {}
        part[name] = tensor
    yield part


def write_weights(weights: dict[str, Tensor], folder: Path, most_bytes: float) -> None:
    """`model.safetensors`, or shards and their index where that would be larger than it may."""
    parts = list(shards(weights, most_bytes))
    where: dict[str, str] = {}
    for number, part in enumerate(parts, 1):
        file = f"model-{number:05d}-of-{len(parts):05d}.safetensors" if len(parts) > 1 else WEIGHTS
        # Views of one storage, as parts of a stack are, are refused.
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
        OSError: the disk refuses.
    """
    # The library leaves a file that its owner alone may read.
    path.touch()
    mode = stat.S_IMODE(path.stat().st_mode)
    try:
        save_file(tensors, path, metadata=metadata)
        path.chmod(mode)
    except SafetensorError as error:
        raise OSError(f"{path} could not be written: {error}") from error


def read_safetensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tensors and metadata of a file.

    Raises:
        ValueError: it is missing or damaged.
    """
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}, file.metadata() or {}  # noqa: SIM118
    except FileNotFoundError as error:
        raise ValueError(f"{path} does not exist: fetch the folder again") from error
    except SafetensorError as error:
        raise ValueError(f"{path} is damaged ({error}): fetch it again") from error


def read_json(path: Path) -> dict[str, Any]:
    """An object of a JSON file.

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
    """Whether a folder holds files by which Hugging Face's form is known."""
    names = ("config.json", "adapter_config.json", WEIGHTS, INDEX)
    return any((folder / name).is_file() for name in names)


def is_pointer(path: Path) -> bool:
    """Whether a file is what Git LFS leaves where it did not fetch."""
    with path.open("rb") as file:
        return file.read(len(POINTER)) == POINTER


def refuse_unfit_files(folder: Path) -> None:
    """Refuse a folder whose files are not what their names say, or not all that the model is of.

    Raises:
        ValueError: one is a pointer that Git LFS left, or the weights belong to another model's.
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


def read_folder(folder: Path) -> tuple[ModelConfig, dict[str, Tensor]]:
    """Our configuration and our weights of a Hugging Face folder.

    Raises:
        ValueError: of a file or a model that cannot be taken.
    """
    refuse_unfit_files(folder)
    config = from_hf_config(read_json(folder / "config.json"), folder / "config.json")
    # In transformers' order: an index beside one whole file is left over from an older save.
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
    if PREFIX + BARE not in weights and BARE in weights:
        # The trunk was saved without the model around it.
        weights = {name if name == HEAD else PREFIX + name: t for name, t in weights.items()}
    # Old exports hold the rotary frequencies, which the configuration tells.
    weights = {name: t for name, t in weights.items() if "rotary_emb" not in name}
    both = weights.get(EMBEDDING), weights.get(HEAD)
    if config.tie_embeddings and both[0] is not None and both[1] is not None:
        # Where the two differ, transformers uses each for its own, whatever config.json says.
        config = replace(config, tie_embeddings=torch.equal(both[0], both[1]))
    return config, from_hf_weights(weights, config)
