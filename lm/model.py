"""The network: a Llama-style decoder, in data-flow order.

Axes: B batch, T position, D d_model, N n_heads, K n_kv_heads, H head_dim, F ffn_dim, V vocab,
L n_layers, E n_experts.
Parameter names and shapes are those of Hugging Face's LlamaForCausalLM, Qwen3ForCausalLM with
qk_norm, Qwen3MoeForCausalLM with experts.
"""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lm.config import ModelConfig
from lm.experts import Experts

# Variance of a new model's logits over the vocabulary.
LOGIT_VARIANCE = 0.05


class KVCache:
    """Keys and values of past positions, for all layers.

    Shapes: `keys`, `values` (L, B, K, positions, H); `length` positions are filled.
    """

    def __init__(
        self, config: ModelConfig, batch_size: int, like: Tensor, positions: int | None = None
    ) -> None:
        size = min(positions or config.max_seq_len, config.max_seq_len)
        shape = (config.n_layers, batch_size, config.kv_heads, size, config.head_size)
        self.keys = like.new_zeros(shape)
        self.values = like.new_zeros(shape)
        self.length = 0

    def append(
        self, layer: int, key: Float[Tensor, "B K T H"], value: Float[Tensor, "B K T H"]
    ) -> tuple[Float[Tensor, "B K S H"], Float[Tensor, "B K S H"]]:
        """Store a layer's new keys and values and return all of that layer."""
        end = self.length + key.shape[2]
        self.keys[layer, :, :, self.length : end] = key
        self.values[layer, :, :, self.length : end] = value
        return self.keys[layer, :, :, :end], self.values[layer, :, :, :end]


class RMSNorm(nn.Module):
    """Root-mean-square norm with statistics in fp32.

    Source: arXiv:1910.07467.
    """

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x: Float[Tensor, "*batch D"]) -> Float[Tensor, "*batch D"]:
        wide = x.float()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return (wide * scale).type_as(x) * self.weight


def rotary_table(config: ModelConfig) -> Float[Tensor, "2 T H"]:
    """Return cosines and sines of every position's angles, each half-width repeated twice.

    Source: RoFormer, arXiv:2104.09864, in the half-split layout of Llama's published weights.
    """
    exponent = torch.arange(0, config.head_size, 2, dtype=torch.float64) / config.head_size
    angle = torch.outer(torch.arange(config.max_seq_len).double(), config.rope_theta**-exponent)
    angle = torch.cat((angle, angle), dim=-1)  # (T, H)
    return torch.stack((angle.cos(), angle.sin())).float()


def rotate(x: Float[Tensor, "B N T H"], rotary: Float[Tensor, "2 T H"]) -> Float[Tensor, "B N T H"]:
    """Rotate each (first half, second half) pair of values by its position's angle, in fp32."""
    cos, sin = rotary
    first, second = x.chunk(2, dim=-1)
    return (x * cos + torch.cat((-second, first), dim=-1) * sin).type_as(x)


def attends_in_groups(device: str, dtype: torch.dtype) -> bool:
    """Whether torch has a memory-efficient kernel for grouped-query attention.

    On CUDA only flash attention supports it: not in fp32, nor in fp16 on GPUs without bf16.
    """
    return device != "cuda" or dtype == torch.bfloat16


class Attention(nn.Module):
    """Causal grouped-query attention with rotary positions.

    Source: arXiv:2305.13245 (grouped queries).
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.head_size = config.head_size
        self.group_size = config.n_heads // config.kv_heads
        queries, kv = config.n_heads * config.head_size, config.kv_heads * config.head_size
        self.q_proj = nn.Linear(config.d_model, queries, bias=False)
        self.k_proj = nn.Linear(config.d_model, kv, bias=False)
        self.v_proj = nn.Linear(config.d_model, kv, bias=False)
        self.o_proj = nn.Linear(queries, config.d_model, bias=False)
        self.q_norm = RMSNorm(config.head_size, config.norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(config.head_size, config.norm_eps) if config.qk_norm else None

    def forward(
        self,
        x: Float[Tensor, "B T D"],
        rotary: Float[Tensor, "2 T H"],
        cache: KVCache | None = None,
        layer: int = 0,
    ) -> Float[Tensor, "B T D"]:
        heads = (*x.shape[:2], -1, self.head_size)
        q, k = self.q_proj(x).view(heads), self.k_proj(x).view(heads)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q = rotate(q.transpose(1, 2), rotary)  # (B, N, T, H)
        k = rotate(k.transpose(1, 2), rotary)  # (B, K, T, H)
        v = self.v_proj(x).view(heads).transpose(1, 2)
        mask = None
        if cache is not None:
            k, v = cache.append(layer, k, v)
            # A query sees the cached positions and those of its own block up to itself.
            mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=x.device)
            mask = mask.tril(diagonal=cache.length)
        grouped = self.group_size > 1
        if grouped and not attends_in_groups(q.device.type, q.dtype):
            k, v = (y.repeat_interleave(self.group_size, dim=1) for y in (k, v))
            grouped = False
        y = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=grouped
        )
        return self.o_proj(y.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    """SwiGLU feed-forward layer.

    Source: arXiv:2002.05202.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.d_model, config.ffn_dim, bias=False)
        self.up_proj = nn.Linear(config.d_model, config.ffn_dim, bias=False)
        self.down_proj = nn.Linear(config.ffn_dim, config.d_model, bias=False)

    def forward(self, x: Float[Tensor, "B T D"]) -> Float[Tensor, "B T D"]:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    """One decoder layer: attention and feed-forward, each normed before and added after."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.d_model, config.norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RMSNorm(config.d_model, config.norm_eps)
        self.mlp = (
            MLP(config)
            if config.n_experts is None
            else Experts(
                config.d_model, config.ffn_dim, config.n_experts, config.n_experts_per_token
            )
        )
        self.dropout = config.dropout

    def forward(
        self,
        x: Float[Tensor, "B T D"],
        rotary: Float[Tensor, "2 T H"],
        cache: KVCache | None = None,
        layer: int = 0,
    ) -> tuple[Float[Tensor, "B T D"], Float[Tensor, "2 E"] | None]:
        branch = self.self_attn(self.input_layernorm(x), rotary, cache, layer)
        x = x + F.dropout(branch, self.dropout, self.training)
        branch, routing = self.mlp(self.post_attention_layernorm(x)), None
        if isinstance(branch, tuple):
            branch, routing = branch
        return x + F.dropout(branch, self.dropout, self.training), routing


class Trunk(nn.Module):
    """Everything below the head: token ids to normed hidden states."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.d_model)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.n_layers))
        self.norm = RMSNorm(config.d_model, config.norm_eps)
        self.dropout = config.dropout
        self.checkpoints = config.activation_checkpointing
        self.rotary = rotary_table(config)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "Trunk":
        super()._apply(fn, recurse)
        # Not a buffer: it follows the weights to their device but stays in fp32, because in half
        # precision distant positions would share their angles.
        self.rotary = self.rotary.to(fn(self.rotary).device)
        return self

    def forward(
        self, ids: Int[Tensor, "B T"], cache: KVCache | None = None
    ) -> Float[Tensor, "B T D"]:
        return self.forward_with_routing(ids, cache)[0]

    def forward_with_routing(
        self, ids: Int[Tensor, "B T"], cache: KVCache | None = None
    ) -> tuple[Float[Tensor, "B T D"], Float[Tensor, "L 2 E"] | None]:
        """Return hidden states and, with experts, each layer's routing (see `Experts.forward`)."""
        start = 0 if cache is None else cache.length
        if start + ids.shape[1] > self.rotary.shape[1]:
            raise ValueError(
                f"{start + ids.shape[1]} positions are more than max_seq_len "
                f"{self.rotary.shape[1]}: give a shorter input"
            )
        rotary = self.rotary[:, start : start + ids.shape[1]]
        x = F.dropout(self.embed_tokens(ids), self.dropout, self.training)
        return self.apply_blocks(x, rotary, cache)

    def apply_blocks(
        self,
        x: Float[Tensor, "B T D"],
        rotary: Float[Tensor, "2 T H"],
        cache: KVCache | None = None,
    ) -> tuple[Float[Tensor, "B T D"], Float[Tensor, "L 2 E"] | None]:
        """Apply all blocks and the last norm: the part that is compiled.

        The embedding is left out: compiled for CPUs, threads sum its gradient in an order that
        varies between runs.
        """
        routings: list[Tensor] = []
        for layer, block in enumerate(self.layers):
            if self.checkpoints and self.training and torch.is_grad_enabled():
                x, routing = checkpoint(block, x, rotary, use_reentrant=False)
            else:
                x, routing = block(x, rotary, cache, layer)
            if routing is not None:
                routings.append(routing)
        if cache is not None:
            cache.length += x.shape[1]
        return self.norm(x), torch.stack(routings) if routings else None


class LM(nn.Module):
    """Causal language model.

    The head is the matrix `head_weight` (V, D). The loss takes it together with the hidden states
    of `model`, so that the full logits never exist in memory.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.model = Trunk(config)
        self.lm_head = (
            None
            if config.tie_embeddings
            else nn.Linear(config.d_model, config.vocab_size, bias=False)
        )
        self.reset_parameters()

    @property
    def head_weight(self) -> Float[Tensor, "V D"]:
        """Output matrix: the head's own, or the embedding's when tied."""
        return (self.model.embed_tokens if self.lm_head is None else self.lm_head).weight

    @property
    def expected_first_loss(self) -> float:
        """Expected loss in nats per token of newly initialized weights."""
        return math.log(self.config.vocab_size) + LOGIT_VARIANCE / 2

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Initialize all weights from torch's global generator.

        The normed hidden state has length √D, so a head of standard deviation s gives logits of
        variance D·s² and a first loss of ln V + D·s²/2. s = √(0.05/D) keeps that at ln V + 0.025
        for every width (`expected_first_loss`), where a fixed 0.02 would start a wide model far
        above ln V.
        """
        config = self.config
        end_std = config.init_std / math.sqrt(2 * config.n_layers)
        for name, parameter in self.named_parameters():
            if parameter.dim() < 2:
                nn.init.ones_(parameter)
            elif parameter is self.head_weight:
                nn.init.normal_(parameter, std=math.sqrt(LOGIT_VARIANCE / config.d_model))
            elif name.endswith(("o_proj.weight", "down_proj.weight", "experts.down_proj")):
                nn.init.normal_(parameter, std=end_std)
            else:
                nn.init.normal_(parameter, std=config.init_std)

    def forward(
        self, ids: Int[Tensor, "B T"], cache: KVCache | None = None
    ) -> Float[Tensor, "B T V"]:
        """Return logits of every position; with a cache, `ids` continue the cached positions."""
        return F.linear(self.model(ids, cache), self.head_weight)


def plain_keys(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return weights without the name prefixes of torch.compile and DDP."""
    return {
        name.replace("_orig_mod.", "").removeprefix("module."): tensor
        for name, tensor in weights.items()
    }
