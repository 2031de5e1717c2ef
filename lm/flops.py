"""Parameters, FLOPs and activation memory of a model, in closed form."""

from lm.config import ModelConfig
from lm.loss import CHUNK_ROWS


def parameters(config: ModelConfig) -> dict[str, int]:
    """Return the parameters by part; a tied head counts as embedding alone."""
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
    """Return the parameters used per token, by part: only the chosen experts count."""
    counts = parameters(config)
    if config.n_experts is not None:
        counts["mlp"] = counts["mlp"] // config.n_experts * config.n_experts_per_token
    return counts


def flops_per_token(config: ModelConfig, seq_len: int) -> int:
    """Return the training FLOPs (forward + backward) per token.

    Six per active matmul weight (2 forward, 4 backward), including a tied head, plus 12·L·N·H·T for
    attention scores and values. Embedding look-ups and norms are left out. The causal half is not
    discounted, so MFU reads slightly high when the kernel skips it.

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
    """Return the peak bytes of a forward pass on one device, by part, without parameters.

    For eager code: tensors that autograd saves for the backward pass, the gradients that the
    chunked loss computes in the forward pass, and under `logits` the temporary memory of the
    largest chunk. With activation checkpointing: each block's input, and the larger of the logits
    and one block. Compiled code needs at most as much. Attention is assumed to be a fused kernel,
    which saves no scores. Allocator overhead and the backward pass's own tensors are left out.

    Args:
        mixed: Autocast to a 2-byte type (bf16 or fp16) with fp32 weights; otherwise fp32 alone.

    Source: counted with saved_tensors_hooks and torch.profiler; tested in tests/test_flops.py.
    """
    tokens, size = micro_batch_size * seq_len, 2 if mixed else 4
    width, counts, again = config.d_model, parameters(config), config.activation_checkpointing
    # Only one recomputed layer is in memory at a time.
    layers = 1 if again else config.n_layers
    queries, kv = config.n_heads * config.head_size, config.kv_heads * config.head_size
    # In fp32: a norm's input and output, and one scale per position.
    norm = tokens * (8 * width + 4)
    # Inputs of q, k, v and of gate, up. Autocast casts separately for each product and saves each.
    inputs = layers * width * size * (5 if mixed else 2)
    # Rotated queries and keys, values, output, and a log-sum in fp32.
    attention = layers * (size * 2 * (queries + kv) + 4 * config.n_heads)
    if config.qk_norm:
        # Queries and keys in fp32, normed, and one fp32 scale per head.
        heads = config.n_heads + config.kv_heads
        attention += layers * ((4 + size) * (queries + kv) + 4 * heads)
    # Gate, up, the gate's SiLU, and the product.
    mlp = layers * size * 4 * config.ffn_dim
    if config.n_experts is not None:
        # Per chosen expert: its input and output rows; per token: the combined output.
        per_token = config.n_experts_per_token
        mlp = per_token * (mlp + layers * size * 3 * width) + layers * 12 * config.n_experts
    # Masks of the activations' type, as on CPUs; CUDA's take one byte.
    dropout = width * 2 * layers * size if config.dropout else 0
    # Logits, their fp32 form if they are narrower, a temporary of the softmax and its result.
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
    # Freed after the loss: a chunk of logits, the cast head, the hidden states.
    logits = {"logits": vocabulary * (chunk + cast * width) + tokens * 4 * width}
    # Kept for the backward pass: ids, gradients of hidden states and of the head in fp32.
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
    # The loss and the first recomputed block of the backward pass are never in memory together.
    one = cast_weights // config.n_layers
    if sum(blocks.values()) + one < sum(logits.values()) + cast_weights:
        return rest | logits
    return blocks | rest | {"cast weights": one}
