"""Loops without a trainer, kept as they are so that other things can be measured by them.

The plain one is written as articles write it: whole logits, autocast, AdamW as it comes. The sound
one is as fast as stock parts go with right numerics: the network compiled, a loss in chunks with a
softmax in fp32 whose gradient is made in the forward pass, fused AdamW. Nothing here uses lm/: what
makes lm/ faster must not move the yardstick.
"""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from shape import Shape
from torch import Tensor, nn

CHUNK_ROWS = 1024


class Norm(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)).type_as(
            x
        ) * self.weight


class Attention(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        dim, self.size = shape.d_model, shape.d_model // shape.n_heads
        self.grouped = shape.n_kv_heads != shape.n_heads
        self.q_proj = nn.Linear(dim, shape.n_heads * self.size, bias=False)
        self.k_proj = nn.Linear(dim, shape.n_kv_heads * self.size, bias=False)
        self.v_proj = nn.Linear(dim, shape.n_kv_heads * self.size, bias=False)
        self.o_proj = nn.Linear(shape.n_heads * self.size, dim, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        heads = (*x.shape[:2], -1, self.size)
        q, k, v = (
            project(x).view(heads).transpose(1, 2)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = (
            (y * cos + torch.cat((-y.chunk(2, -1)[1], y.chunk(2, -1)[0]), -1) * sin).type_as(y)
            for y in (q, k)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.grouped)
        return self.o_proj(y.transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.d_model, shape.ffn_dim, bias=False)
        self.up_proj = nn.Linear(shape.d_model, shape.ffn_dim, bias=False)
        self.down_proj = nn.Linear(shape.ffn_dim, shape.d_model, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.input_layernorm = Norm(shape.d_model)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = Norm(shape.d_model)
        self.mlp = Mlp(shape)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))


class Trunk(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.d_model)
        self.layers = nn.ModuleList(Block(shape) for _ in range(shape.n_layers))
        self.norm = Norm(shape.d_model)
        size = shape.d_model // shape.n_heads
        angle = torch.outer(
            torch.arange(shape.seq_len), 10000.0 ** -(torch.arange(0, size, 2) / size)
        )
        angle = torch.cat((angle, angle), -1)
        self.register_buffer("cos", angle.cos(), persistent=False)
        self.register_buffer("sin", angle.sin(), persistent=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed_tokens(ids)
        for layer in self.layers:
            x = layer(x, self.cos, self.sin)
        return self.norm(x)


class Llama(nn.Module):
    """A decoder whose parameters have the names of Hugging Face's LlamaForCausalLM."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.model = Trunk(shape)
        self.lm_head = nn.Linear(shape.d_model, shape.vocab_size, bias=False)
        if shape.tied:
            self.lm_head.weight = self.model.embed_tokens.weight


def softmax_chunk(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    wide = logits.float()
    log_sum = torch.logsumexp(wide, -1)
    loss = (log_sum - wide.gather(1, targets[:, None])[:, 0]).sum()
    of_target = torch.arange(wide.shape[1])[None] == targets[:, None]
    return loss, (torch.exp(wide - log_sum[:, None]) - of_target.float()).to(logits.dtype)


class FusedLoss(torch.autograd.Function):
    chunk = staticmethod(softmax_chunk)

    @staticmethod
    def forward(ctx, hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:  # pyright: ignore
        autocast = torch.is_autocast_enabled("cpu")
        with torch.autocast(hidden.device.type, enabled=False):
            rows = hidden.to(torch.bfloat16) if autocast else hidden
            head = weight.to(rows.dtype)
            hidden_grad = torch.empty_like(rows)
            weight_grad = torch.zeros_like(weight)
            total = torch.zeros(())
            for start in range(0, len(rows), CHUNK_ROWS):
                part = slice(start, start + CHUNK_ROWS)
                loss, gradient = FusedLoss.chunk(rows[part] @ head.T, targets[part])
                total += loss
                torch.mm(gradient, head, out=hidden_grad[part])
                weight_grad += gradient.T @ rows[part]
        ctx.save_for_backward(hidden_grad.to(hidden.dtype), weight_grad)
        return total

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor, None]:  # pyright: ignore
        hidden_grad, weight_grad = ctx.saved_tensors
        return hidden_grad * grad, weight_grad * grad, None


def rate(step: int, steps: int) -> float:
    """Warm-up over 2 % of the steps, then a cosine to a tenth."""
    warmup = max(steps // 50, 1)
    if step < warmup:
        return (step + 1) / warmup
    part = (step - warmup) / max(steps - warmup, 1)
    return 0.1 + 0.45 * (1 + math.cos(math.pi * part))


def train(
    shape: Shape,
    weights: dict[str, Tensor],
    batch: Callable[[int], Tensor],
    steps: int,
    sound: bool,
) -> list[float]:
    """Loss of each step; `batch(n)` gives the ids (B, T + 1) of the run's n-th micro-batch."""
    net = Llama(shape)
    net.load_state_dict(weights)
    trunk: Callable[[Tensor], Tensor] = net.model
    if sound:
        trunk = torch.compile(net.model, dynamic=False)
        FusedLoss.chunk = staticmethod(torch.compile(softmax_chunk, dynamic=False))
    decay = [p for p in net.parameters() if p.dim() > 1]
    others = [p for p in net.parameters() if p.dim() == 1]
    optimizer = torch.optim.AdamW(
        [{"params": decay, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}],
        lr=3e-4,
        betas=(0.9, 0.95),
        fused=sound,
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: rate(step, steps))
    losses = []
    for step in range(steps):
        total = 0.0
        for micro_step in range(shape.accumulate):
            ids = batch(step * shape.accumulate + micro_step)
            inputs, targets = ids[:, :-1], ids[:, 1:].flatten()
            with torch.autocast("cpu", torch.bfloat16, enabled=shape.bf16):
                if sound:
                    hidden = trunk(inputs).flatten(0, 1)
                    loss = FusedLoss.apply(hidden, net.lm_head.weight, targets) / len(targets)
                else:
                    logits = net.lm_head(trunk(inputs))
                    loss = F.cross_entropy(logits.flatten(0, 1), targets)
                loss = loss / shape.accumulate  # pyright: ignore[reportOperatorIssue]
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        losses.append(total)
    return losses
