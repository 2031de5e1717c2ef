"""What a model costs in parameters, arithmetic and memory: closed forms, no tensor is made."""

from lm.config import ModelConfig
from lm.loss import CHUNK_ROWS


def parameters(config: ModelConfig) -> dict[str, int]:
    """Parameters by part; a tied head is counted with the embedding alone."""
    queries, kv = config.n_heads * config.head_size, config.kv_heads * config.head_size
    embedding = config.vocab_size * config.d_model
    experts = config.n_experts or 0
    head_norms = 2 * config.n_layers * config.head_size if config.qk_norm else 0
    return {
        "embedding": embedding,
        "attention": config.n_layers * 2 * config.d_model * (queries + kv),
        "router": config.n_layers * config.d_model * experts,
        "mlp": max(experts, 1) * config.n_layers * 3 * config.d_model * config.ffn_dim,
        "norms": (2 * config.n_layers + 1) * config.d_model + head_norms,
        "head": 0 if config.tie_embeddings else embedding,
    }


def active_parameters(config: ModelConfig) -> dict[str, int]:
    """Parameters that a token goes through, by part: of the experts those it is sent to."""
    counts = parameters(config)
    if config.n_experts is not None:
        counts["mlp"] = counts["mlp"] // config.n_experts * config.n_experts_per_token
    return counts


def flops_per_token(config: ModelConfig, seq_len: int) -> int:
    """Training FLOPs (forward + backward) to learn from one token.

    Six per weight of a matrix product that a token goes through (2 forward, 4 backward), the head's
    included also when it is tied, plus 12·L·N·H·T for attention scores and values. Embedding
    look-ups and norms are left out. The causal half is not discounted, so MFU reads slightly high
    when the kernel skips it.

    Source: PaLM, arXiv:2204.02311, appendix B.
    """
    counts = active_parameters(config)
    weights = counts["attention"] + counts["router"] + counts["mlp"]
    weights += config.vocab_size * config.d_model
    scores = 12 * config.n_layers * config.n_heads * config.head_size * seq_len
    return 6 * weights + scores


def activation_bytes(
    config: ModelConfig, micro_batch_size: int, seq_len: int, *, mixed: bool
) -> dict[str, int]:
    """Bytes of a forward pass on one device at its fullest, by part, parameters left out.

    Of eager code: all that autograd keeps for the backward pass, the gradients that the chunked
    loss makes ahead of it, and under `logits` what the largest chunk needs for a moment. With
    activation checkpointing: each block's input, and the logits or one block, whichever is more.
    Compiled code keeps as much or less. Attention is taken to run in a fused kernel, which keeps no
    scores. The allocator's own waste and what the backward pass adds are left out.

    Args:
        mixed: Autocast to a type of 2 bytes (bf16 or fp16) over fp32 weights; else all in fp32.

    Source: counted with saved_tensors_hooks and torch.profiler; tests/test_flops.py holds it.
    """
    tokens, size = micro_batch_size * seq_len, 2 if mixed else 4
    width, counts, again = config.d_model, parameters(config), config.activation_checkpointing
    # Of those that are recomputed, one is there at a time.
    layers = 1 if again else config.n_layers
    queries, kv = config.n_heads * config.head_size, config.kv_heads * config.head_size
    # In fp32: the residual stream at a norm, its normed form, one scale a position.
    norm = tokens * (8 * width + 4)
    # Before q, k, v and before gate, up. Autocast casts anew for each product, and each is kept.
    inputs = layers * width * size * (5 if mixed else 2)
    # Rotated queries and keys, values, output, and a log-sum in fp32.
    attention = layers * (size * 2 * (queries + kv) + 4 * config.n_heads)
    if config.qk_norm:
        # Queries and keys in fp32, normed, and one scale a head in fp32.
        heads = config.n_heads + config.kv_heads
        attention += layers * ((4 + size) * (queries + kv) + 4 * heads)
    # Gate, up, the gate's SiLU, and the product.
    mlp = layers * size * 4 * config.ffn_dim
    if config.n_experts is not None:
        # For each expert of a position; its row before and after, and the result of all.
        per_token = config.n_experts_per_token
        mlp = per_token * (mlp + layers * size * 3 * width) + layers * 12 * config.n_experts
    # Masks as wide as what they drop, as CPUs keep them; CUDA's are of one byte.
    dropout = width * 2 * layers * size if config.dropout else 0
    # Logits, their fp32 form where that is another, the softmax's temporary and its result.
    chunk = (12 if mixed else 8) * min(tokens, CHUNK_ROWS)
    vocabulary, cast = config.vocab_size, 2 if mixed else 0
    cast_weights = cast * (counts["attention"] + counts["mlp"])
    blocks = {
        "norms": 2 * layers * norm,
        "projections": tokens * inputs,
        "attention": tokens * attention,
        "mlp": tokens * mlp,
        "dropout": tokens * dropout,
    }
    # What is dropped with the loss: a chunk of logits, the cast head, the hidden states.
    logits = {"logits": vocabulary * (chunk + cast * width) + tokens * 4 * width}
    # Kept for the backward pass; ids, gradients of hidden states and of the head in fp32.
    rest = {
        "embedding dropout": tokens * 4 * width if config.dropout else 0,
        "rotary table": 8 * config.max_seq_len * config.head_size,
        "last norm": norm,
        "cast weights": cast_weights,
        "loss": tokens * (8 + 4 * width) + 4 * vocabulary * width,
    }
    if not again:
        return blocks | rest | logits
    rest["block inputs"] = tokens * 4 * width * config.n_layers
    # The loss, at the end of the forward pass, and the first block of the backward pass take turns.
    one = cast_weights // config.n_layers
    if sum(blocks.values()) + one < sum(logits.values()) + cast_weights:
        return rest | logits
    return blocks | rest | {"cast weights": one}
