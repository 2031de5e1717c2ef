"""What a model costs in parameters, arithmetic and memory: closed forms, no tensor is made."""

from lm.loss import CHUNK_ROWS
from lm.model import ModelConfig


def parameters(config: ModelConfig) -> dict[str, int]:
    """Parameters by part; a tied head is counted with the embedding alone."""
    queries, kv = config.n_heads * config.head_size, config.kv_heads * config.head_size
    embedding = config.vocab_size * config.d_model
    return {
        "embedding": embedding,
        "attention": config.n_layers * 2 * config.d_model * (queries + kv),
        "mlp": config.n_layers * 3 * config.d_model * config.ffn_dim,
        "norms": (2 * config.n_layers + 1) * config.d_model,
        "head": 0 if config.tie_embeddings else embedding,
    }


def flops_per_token(config: ModelConfig, seq_len: int) -> int:
    """Training FLOPs (forward + backward) to learn from one token.

    Six per weight of a matrix product (2 forward, 4 backward), the head's included also when it
    is tied, plus 12·L·N·H·T for attention scores and values. Embedding look-ups and norms are left
    out. The causal half is not discounted, so MFU reads slightly high when the kernel skips it.

    Source: PaLM, arXiv:2204.02311, appendix B.
    """
    counts = parameters(config)
    weights = counts["attention"] + counts["mlp"] + config.vocab_size * config.d_model
    scores = 12 * config.n_layers * config.n_heads * config.head_size * seq_len
    return 6 * weights + scores


def activation_bytes(
    config: ModelConfig, micro_batch_size: int, seq_len: int, *, mixed: bool
) -> dict[str, int]:
    """Bytes of a forward pass on one device at its fullest, by part, parameters left out.

    Of eager code: all that autograd keeps for the backward pass, the gradients that the chunked
    loss makes ahead of it, and under `logits` what the largest chunk needs for a moment. Compiled
    code keeps as much or less. Attention is taken to run in a fused kernel, which keeps no scores.
    The allocator's own waste and what the backward pass adds are left out.

    Args:
        mixed: Autocast to a type of 2 bytes (bf16 or fp16) over fp32 weights; else all in fp32.

    Source: counted with saved_tensors_hooks and torch.profiler; tests/test_flops.py holds it.
    """
    tokens, size = micro_batch_size * seq_len, 2 if mixed else 4
    layers, width, counts = config.n_layers, config.d_model, parameters(config)
    queries, kv = config.n_heads * config.head_size, config.kv_heads * config.head_size
    # In fp32: the residual stream at each norm, its normed form, one scale a position.
    norms = (2 * layers + 1) * (8 * width + 4)
    # Before q, k, v and before gate, up. Autocast casts anew for each product, and each is kept.
    inputs = layers * width * size * (5 if mixed else 2)
    # Rotated queries and keys, values, output, and a log-sum in fp32.
    attention = layers * (size * 2 * (queries + kv) + 4 * config.n_heads)
    # Gate, up, the gate's SiLU, and the product.
    mlp = layers * size * 4 * config.ffn_dim
    # Masks as wide as what they drop, as CPUs keep them; CUDA's are of one byte.
    dropout = width * (4 + 2 * layers * size) if config.dropout else 0
    # Logits, their fp32 form where that is another, the softmax's temporary and its result.
    chunk = (12 if mixed else 8) * min(tokens, CHUNK_ROWS)
    vocabulary, cast = config.vocab_size, 2 if mixed else 0
    return {
        "norms": tokens * norms,
        "projections": tokens * inputs,
        "attention": tokens * attention + 8 * config.max_seq_len * config.head_size,
        "mlp": tokens * mlp,
        "dropout": tokens * dropout,
        # For the backward pass; the head's is dropped with the loss.
        "cast weights": cast * (counts["attention"] + counts["mlp"]),
        # Ids; gradients of hidden states and of the head in fp32.
        "loss": tokens * (8 + 4 * width) + 4 * vocabulary * width,
        # A chunk of them, the cast head, the hidden states.
        "logits": vocabulary * (chunk + cast * width) + tokens * 4 * width,
    }
