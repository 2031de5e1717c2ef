"""Hugging Face's config.json: ModelConfig to and from it."""

from pathlib import Path
from typing import Any

from lm.config import ModelConfig

# By (qk_norm, has experts).
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
DEFAULT_THETA = {"MixtralForCausalLM": 1e6}
DEFAULT_EPS = {"MixtralForCausalLM": 1e-5}
# Names of the block and of an expert's matrices: gate, up, down.
EXPERT_NAMES = {
    "MixtralForCausalLM": ("block_sparse_moe", "w1", "w3", "w2"),
    "Qwen3MoeForCausalLM": ("mlp", "gate_proj", "up_proj", "down_proj"),
}
# Settings that change the computation, with the values that are supported.
PLAIN: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu", "swish"),
    "attention_bias": (False, None),
    "mlp_bias": (False, None),
    "use_sliding_window": (False, None),
    "partial_rotary_factor": (1, None),
    "mlp_only_layers": ([], None),
    "decoder_sparse_step": (1, None),
}
# Types of the settings that are read.
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


def architecture(config: ModelConfig) -> str:
    """Return the name of the transformers class for this configuration."""
    return ARCHITECTURES[config.qk_norm, config.n_experts is not None]


def to_hf_config(
    config: ModelConfig, vocab_size: int, dtype: str, ids: dict[str, int | None]
) -> dict[str, Any]:
    """Return the content of `config.json`; `ids` are those of bos, eos and pad.

    Raises:
        ValueError: transformers' class does not support the model.
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
        # Read by transformers before release 5, and since.
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
        # At an even load its balance loss is n_experts_per_token, ours is 1.
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
    """Return the configuration of a `config.json`.

    Raises:
        ValueError: the model is not supported; the message names what is.
    """
    kind = read_architecture(content, source)
    check_types(content, source)
    if faults := unsupported(content, kind):
        raise ValueError(f"{source} has what is not supported: {', '.join(faults)}")
    experts = kind in EXPERT_NAMES
    rope = rope_settings(content)
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


def read_architecture(content: dict[str, Any], source: Path) -> str:
    """Return the supported transformers class that a `config.json` names.

    Raises:
        ValueError: the class is not supported.
    """
    named = content.get("architectures") or []
    named = [named] if isinstance(named, str) else named
    # transformers chooses by model_type. A trunk saved alone names a class without a head.
    trunks = {kind.replace("ForCausalLM", "Model"): kind for kind in MODEL_TYPES}
    by_type = {name: kind for kind, name in MODEL_TYPES.items()}.get(content.get("model_type", ""))
    known = [trunks.get(name, name) for name in named] or [by_type]
    kind = next((name for name in known if name in MODEL_TYPES), None)
    if kind is None:
        raise ValueError(
            f"{source} is of {', '.join(named) or 'no architecture'}, which is not supported: "
            f"{', '.join(MODEL_TYPES)} are"
        )
    return kind


def rope_settings(content: dict[str, Any]) -> dict[str, Any]:
    """Return the rotary settings, in transformers' order of precedence."""
    return content.get("rope_scaling") or content.get("rope_parameters") or {}


def check_types(content: dict[str, Any], source: Path) -> None:
    """Check the types of all settings that are read.

    Raises:
        ValueError: a setting has another type.
    """
    wrong = [
        f"{name} is {content[name]!r}"
        for name, types in TYPES.items()
        if name in content and type(content[name]) not in types
    ]
    if not wrong and type(theta := rope_settings(content).get("rope_theta", 1)) not in NUMBER:
        wrong = [f"rope_theta is {theta!r}"]
    if wrong:
        raise ValueError(f"{source} is damaged ({', '.join(wrong)}): fetch it again")


def unsupported(content: dict[str, Any], kind: str) -> list[str]:
    """Return the settings under which the model computes something else than ours."""
    faults = [
        f"{name} is {content[name]}"
        for name, values in PLAIN.items()
        if name in content and content[name] not in values
    ]
    rope = rope_settings(content)
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
    return faults
