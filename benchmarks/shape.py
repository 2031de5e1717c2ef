"""What is trained in a comparison: the model, the batch and the length."""

from dataclasses import dataclass

from lm.config import ModelConfig


@dataclass(frozen=True, kw_only=True)
class Shape:
    vocab_size: int = 32000
    d_model: int = 256
    n_layers: int = 4
    n_heads: int = 4
    n_kv_heads: int = 2
    ffn_dim: int = 688
    seq_len: int = 512
    tied: bool = False
    micro_batch: int = 8
    accumulate: int = 1
    bf16: bool = True
    device: str = "cpu"
    """cpu or cuda."""
    warm_steps: int = 4
    steps: int = 12
    """Timed, after the warm ones."""

    @property
    def tokens_per_step(self) -> int:
        return self.micro_batch * self.accumulate * self.seq_len

    @property
    def all_steps(self) -> int:
        return self.warm_steps + self.steps

    @property
    def model_config(self) -> ModelConfig:
        return ModelConfig(
            vocab_size=self.vocab_size,
            d_model=self.d_model,
            n_layers=self.n_layers,
            n_heads=self.n_heads,
            n_kv_heads=self.n_kv_heads,
            ffn_dim=self.ffn_dim,
            max_seq_len=self.seq_len,
            tie_embeddings=self.tied,
        )
