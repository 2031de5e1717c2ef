"""What a model costs in parameters and arithmetic: closed forms, no tensor is made."""

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
