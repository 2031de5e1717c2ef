"""Slow, obvious versions of what lm/ computes, to compare it with."""

import math

import torch
from torch import Tensor

from lm.config import ModelConfig


def cross_entropy_sum(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Sum over the rows with a target, from the whole matrix of logits, in the inputs' type."""
    logits = hidden.flatten(0, 1) @ weight.T
    log_share = logits - logits.exp().sum(dim=1, keepdim=True).log()
    rows = [i for i, target in enumerate(targets.flatten().tolist()) if target != -100]
    return -log_share[rows, targets.flatten()[rows]].sum()


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / (x.square().mean(dim=-1, keepdim=True) + eps).sqrt() * weight


def rotate(x: Tensor, theta: float) -> Tensor:
    """Turn (B, heads, T, H): values i and i + H/2 are a complex number, T its position."""
    half = x.shape[-1] // 2
    turned = torch.empty_like(x)
    for position in range(x.shape[2]):
        for i in range(half):
            angle = position * theta ** (-2 * i / x.shape[-1])
            real, imaginary = x[:, :, position, i], x[:, :, position, half + i]
            turned[:, :, position, i] = real * math.cos(angle) - imaginary * math.sin(angle)
            turned[:, :, position, half + i] = real * math.sin(angle) + imaginary * math.cos(angle)
    return turned


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention of (B, N, T, H) queries; each key head serves a run of query heads."""
    out = torch.empty_like(q)
    run = q.shape[1] // k.shape[1]
    for head in range(q.shape[1]):
        for position in range(q.shape[2]):
            keys, values = k[:, head // run, : position + 1], v[:, head // run, : position + 1]
            scores = (keys * q[:, head, position, None]).sum(dim=-1) / math.sqrt(q.shape[-1])
            out[:, head, position] = (scores.softmax(dim=-1).unsqueeze(-1) * values).sum(dim=1)
    return out


def logits(weights: dict[str, Tensor], ids: Tensor, config: ModelConfig) -> Tensor:
    """A decoder's logits (B, T, V) from its state dict."""

    def heads(x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, config.head_size)).transpose(1, 2)

    x = weights["model.embed_tokens.weight"][ids]
    for i in range(config.n_layers):
        w = {k.removeprefix(f"model.layers.{i}."): tensor for k, tensor in weights.items()}
        normed = rms_norm(x, w["input_layernorm.weight"], config.norm_eps)
        q, k, v = (heads(normed @ w[f"self_attn.{c}_proj.weight"].T) for c in "qkv")
        mixed = attention(rotate(q, config.rope_theta), rotate(k, config.rope_theta), v)
        x = x + mixed.transpose(1, 2).flatten(2) @ w["self_attn.o_proj.weight"].T
        normed = rms_norm(x, w["post_attention_layernorm.weight"], config.norm_eps)
        gate, up = normed @ w["mlp.gate_proj.weight"].T, normed @ w["mlp.up_proj.weight"].T
        x = x + (gate * gate.sigmoid() * up) @ w["mlp.down_proj.weight"].T
    head = weights.get("lm_head.weight", weights["model.embed_tokens.weight"])
    return rms_norm(x, weights["model.norm.weight"], config.norm_eps) @ head.T
