"""Configuration of the network and of the optimizer: defaults, units and checks."""

import math
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Shape of the network."""

    vocab_size: int = 32000
    """Rows of the embedding; at least the tokenizer's size."""
    d_model: int = 256
    """Width of the residual stream."""
    n_layers: int = 4
    """Number of decoder blocks."""
    n_heads: int = 4
    """Query heads of a block."""
    n_kv_heads: int | None = None
    """Key and value heads of a block; must divide n_heads. Unset: n_heads."""
    head_dim: int | None = None
    """Width of a head, even. Unset: d_model / n_heads."""
    ffn_dim: int = 688
    """Width of the SwiGLU feed-forward layer, or of each expert."""
    n_experts: int | None = None
    """Feed-forward layers of a block, of which a router picks some for each position, padding
    too. Unset: one for all."""
    n_experts_per_token: int = 2
    """How many of them a position goes through."""
    aux_loss_coef: float = 0.01
    """Weight of the loss that keeps experts evenly used, which is 1 where they are; 0 or more."""
    max_seq_len: int = 512
    """Longest context in positions; always data.seq_len."""
    tie_embeddings: bool = True
    """Use one matrix for the embedding and the head."""
    qk_norm: bool = False
    """RMSNorm of each query and key over its head, before the rotation."""
    dropout: float = 0.0
    """Share of activations dropped after the embedding and at each branch's end, 0 <= p < 1."""
    rope_theta: float = 10000.0
    """Base of the rotary frequencies."""
    norm_eps: float = 1e-5
    """Added to the mean square in RMSNorm."""
    init_std: float = 0.02
    """Standard deviation of initial weights inside the blocks; branch ends are scaled down."""
    activation_checkpointing: bool = False
    """Keep only each block's input for the backward pass and compute the block again there."""

    def __post_init__(self) -> None:
        for name in ("vocab_size", "d_model", "n_layers", "n_heads", "ffn_dim", "max_seq_len"):
            if getattr(self, name) < 1:
                key = "data.seq_len" if name == "max_seq_len" else f"model.config.{name}"
                raise ValueError(f"{key} is {getattr(self, name)}: must be at least 1")
        if self.head_dim is None and self.d_model % self.n_heads:
            raise ValueError(
                f"model.config.d_model is {self.d_model} and n_heads is {self.n_heads}: d_model "
                "must be divisible by n_heads; change one of them or give model.config.head_dim"
            )
        if self.head_size < 2 or self.head_size % 2:
            raise ValueError(
                f"model.config.head_dim is {self.head_size}: rotary embedding turns pairs of "
                "values, so it must be even; change d_model, n_heads or head_dim"
            )
        if self.kv_heads < 1 or self.n_heads % self.kv_heads:
            raise ValueError(
                f"model.config.n_kv_heads is {self.kv_heads} and n_heads is {self.n_heads}: "
                "n_kv_heads must divide n_heads"
            )
        if not 0 <= self.dropout < 1:
            raise ValueError(
                f"model.config.dropout is {self.dropout}: must be at least 0 and below 1"
            )
        if self.n_experts is not None:
            self._check_experts(self.n_experts)
        for name in ("rope_theta", "norm_eps", "init_std"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"model.config.{name} is {getattr(self, name)}: must be above 0")

    def _check_experts(self, n_experts: int) -> None:
        if not 1 <= self.n_experts_per_token <= n_experts:
            raise ValueError(
                f"model.config.n_experts_per_token is {self.n_experts_per_token} and n_experts is "
                f"{n_experts}: must be at least 1 and at most n_experts"
            )
        if not 0 <= self.aux_loss_coef < math.inf:
            raise ValueError(
                f"model.config.aux_loss_coef is {self.aux_loss_coef}: must be 0 or more"
            )
        for name in ("d_model", "ffn_dim"):
            if getattr(self, name) % 8:
                raise ValueError(
                    f"model.config.{name} is {getattr(self, name)}: with n_experts it must be a "
                    "multiple of 8, for grouped matrix products read 16 bytes at a time"
                )

    @property
    def head_size(self) -> int:
        """Width of a head, given or derived."""
        return self.d_model // self.n_heads if self.head_dim is None else self.head_dim

    @property
    def kv_heads(self) -> int:
        """Key and value heads, given or derived."""
        return self.n_heads if self.n_kv_heads is None else self.n_kv_heads


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """AdamW and its learning-rate schedule."""

    lr: float = 3e-4
    """Peak learning rate, reached at the end of the warm-up."""
    min_lr_ratio: float = 0.1
    """Last learning rate as a share of lr, 0 to 1."""
    warmup: int | float = 0.02
    """Linear rise: an int is optimizer steps, 0 <= float < 1 a share of the run, rounded down."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Decay of the first and the second moment, each 0 <= beta < 1."""
    eps: float = 1e-8
    """Added to the root of the second moment."""
    weight_decay: float = 0.1
    """Decoupled decay of tensors with two or more dimensions; the others have none."""
    fused: bool | Literal["auto"] = "auto"
    """One kernel for the whole update. auto: where supported, and not with precision 16-mixed."""

    def __post_init__(self) -> None:
        if not 0 < self.lr < math.inf:
            raise ValueError(f"model.optim.lr is {self.lr}: must be above 0 and finite")
        if not 0 <= self.min_lr_ratio <= 1:
            raise ValueError(f"model.optim.min_lr_ratio is {self.min_lr_ratio}: must be 0 to 1")
        if isinstance(self.warmup, float) and not 0 <= self.warmup < 1:
            raise ValueError(
                f"model.optim.warmup is {self.warmup}: a share of the run must be at least 0 and "
                "below 1; write an int (no dot) for a number of steps"
            )
        if self.warmup < 0:
            raise ValueError(f"model.optim.warmup is {self.warmup}: must not be negative")
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"model.optim.betas is {self.betas}: each must be at least 0, below 1")
        if not 0 < self.eps < math.inf:
            raise ValueError(f"model.optim.eps is {self.eps}: must be above 0")
        if not 0 <= self.weight_decay < math.inf:
            raise ValueError(
                f"model.optim.weight_decay is {self.weight_decay}: must not be negative"
            )
