"""Parameters, FLOPs and memory in closed form, and the share of a device's peak."""

import itertools
from dataclasses import replace
from typing import Any, cast

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from callbacks.peak_flops import measured_peak_flops, peak_flops
from callbacks.throughput import Throughput, mfu
from lm.config import ModelConfig
from lm.flops import activation_bytes, flops_per_token, parameters
from lm.loss import CHUNK_ROWS, cross_entropy_sum
from lm.model import LM

BASE = ModelConfig(
    vocab_size=32000, d_model=1536, n_layers=18, n_heads=12, n_kv_heads=4, ffn_dim=4096,
    max_seq_len=2048,
)  # fmt: skip
ODD = ModelConfig(
    vocab_size=11, d_model=12, n_layers=3, n_heads=10, n_kv_heads=5, head_dim=4, ffn_dim=14,
    tie_embeddings=False,
)  # fmt: skip
# The example of 124 million parameters without positions at 1,024 positions: 178,000 tokens/s.
FLOPS = 855_166_464 * 178_000


@pytest.mark.parametrize("config", [BASE, ODD, ModelConfig()])
def test_parameters_are_those_of_the_model(config: ModelConfig):
    with torch.device("meta"):
        model = LM(config)
    assert sum(parameters(config).values()) == sum(p.numel() for p in model.parameters())


def test_base_model_costs_what_its_table_says():
    assert sum(parameters(BASE).values()) == 502_193_664
    assert f"{6 * sum(parameters(BASE).values()) / 1e9:.2f}" == "3.01"
    assert f"{flops_per_token(BASE, 2048) / 1e9:.2f}" == "3.69"


def test_untied_head_costs_what_a_tied_one_does():
    tied = ModelConfig(tie_embeddings=True)
    untied = ModelConfig(tie_embeddings=False)
    assert flops_per_token(tied, 512) == flops_per_token(untied, 512)


# Micro-batches with fewer and with more rows than a chunk of logits.
SHAPES = [
    (ODD, 2, 9),
    (ModelConfig(
        vocab_size=300, d_model=24, n_layers=1, n_heads=4, ffn_dim=70, max_seq_len=50
    ), 5, 33),
    (ModelConfig(
        vocab_size=77, d_model=32, n_layers=5, n_heads=8, n_kv_heads=2, head_dim=6, ffn_dim=48,
        max_seq_len=40, dropout=0.1,
    ), 3, 40),
    (ModelConfig(
        vocab_size=500, d_model=64, n_layers=2, n_heads=2, n_kv_heads=1, ffn_dim=200,
        max_seq_len=700,
    ), 3, 700),
]  # fmt: skip


def forward(model: LM, batch: int, length: int, mixed: bool) -> Tensor:
    """Loss on ids that are all 0."""
    ids = torch.zeros(batch, length, dtype=torch.int64)
    with torch.autocast("cpu", torch.bfloat16, enabled=mixed):
        return cross_entropy_sum(model.model(ids), model.head_weight, ids)


def kept_bytes(model: LM, batch: int, length: int, mixed: bool) -> int:
    """Bytes of all storages that autograd keeps for the backward pass, parameters left out."""
    kept: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        return kept.setdefault(tensor.untyped_storage().data_ptr(), tensor)

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = forward(model, batch, length, mixed)
    assert loss.requires_grad  # and so all that it keeps is still there
    assert loss.grad_fn is not None
    for gradient in cast(Any, loss.grad_fn).gradients:  # which the loss holds by itself
        pack(gradient)
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    return sum(kept[place].untyped_storage().nbytes() for place in kept.keys() - own)


def most_bytes(model: LM, batch: int, length: int, mixed: bool, backward: bool = False) -> int:
    """Most bytes that the allocator ever held in a pass, parameters left out."""
    cpu = torch.profiler.ProfilerActivity.CPU
    with torch.profiler.profile(activities=[cpu], profile_memory=True) as profile:
        loss = forward(model, batch, length, mixed)
        if backward:
            loss.backward()
    events: Any = cast(Any, profile.profiler).kineto_results.events()
    changes = [event for event in events if event.name() == "[memory]"]
    changes.sort(key=lambda event: event.start_ns())
    held = itertools.accumulate(event.nbytes() for event in changes)
    return model.model.rotary.nbytes + max(held)


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize(("config", "batch", "length"), SHAPES)
def test_activations_are_what_autograd_keeps(
    config: ModelConfig, batch: int, length: int, mixed: bool
):
    parts = activation_bytes(config, batch, length, mixed=mixed)
    kept = sum(parts.values()) - parts["logits"]
    assert kept == pytest.approx(kept_bytes(LM(config), batch, length, mixed), rel=0.001)


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize(("config", "batch", "length"), SHAPES)
def test_activations_are_the_most_a_forward_pass_holds(
    config: ModelConfig, batch: int, length: int, mixed: bool
):
    estimate = sum(activation_bytes(config, batch, length, mixed=mixed).values())
    assert estimate == pytest.approx(most_bytes(LM(config), batch, length, mixed), rel=0.01)


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("vocab_size", [64, 2000], ids=["block", "logits"])
def test_checkpointed_activations_are_the_most_a_step_holds(mixed: bool, vocab_size: int):
    config = ModelConfig(
        vocab_size=vocab_size, d_model=96, n_layers=8, n_heads=4, ffn_dim=256, max_seq_len=256,
        activation_checkpointing=True,
    )  # fmt: skip
    estimate = sum(activation_bytes(config, 4, 256, mixed=mixed).values())
    most = most_bytes(LM(config), 4, 256, mixed, backward=True)
    assert estimate == pytest.approx(most, rel=0.15)
    plain = replace(config, activation_checkpointing=False)
    assert estimate < 0.5 * sum(activation_bytes(plain, 4, 256, mixed=mixed).values())


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize(
    ("more", "near"), [({"n_experts": 4}, 0.15), ({"qk_norm": True}, 0.01)], ids=str
)
def test_activations_of_experts_and_normed_heads_are_near(
    mixed: bool, more: dict[str, Any], near: float
):
    sizes: dict[str, Any] = {"d_model": 96, "n_layers": 4, "n_heads": 4, "ffn_dim": 128}
    config = ModelConfig(vocab_size=500, max_seq_len=256, **sizes, **more)
    estimate = sum(activation_bytes(config, 4, 256, mixed=mixed).values())
    assert estimate == pytest.approx(most_bytes(LM(config), 4, 256, mixed), rel=near)


def test_shapes_have_more_and_fewer_rows_than_a_chunk():
    assert {batch * length > CHUNK_ROWS for _, batch, length in SHAPES} == {False, True}


@pytest.mark.parametrize(
    ("name", "precision", "tflops"),
    [
        ("NVIDIA A100-SXM4-80GB", "bf16-mixed", 312),
        ("NVIDIA A100-SXM4-80GB", "32-true", 19.5),
        ("A100-PCIE-40GB", "bf16-mixed", 312),
        ("NVIDIA A100 80GB PCIe", "bf16-mixed", 312),
        ("NVIDIA GH200 480GB", "bf16-mixed", 989),
        ("NVIDIA H100 80GB HBM3", "bf16-mixed", 989),
        ("NVIDIA H100 PCIe", "bf16-mixed", 756),
        ("NVIDIA H100 NVL", "bf16-mixed", 835),
        ("NVIDIA H200", "bf16-mixed", 989),
        ("NVIDIA H200 NVL", "bf16-mixed", 835),
        ("NVIDIA B200", "bf16-mixed", 2250),
        ("NVIDIA GB200", "bf16-mixed", 2500),
        ("NVIDIA L40S", "bf16-mixed", 362),
        ("NVIDIA L40", "bf16-mixed", 181),
        ("NVIDIA L4", "bf16-mixed", 121),
        ("NVIDIA A10", "bf16-mixed", 125),
        ("NVIDIA A40", "bf16-mixed", 149.7),
        ("NVIDIA A30", "bf16-mixed", 165),
        ("NVIDIA GeForce RTX 4090", "bf16-mixed", 165.2),
        ("NVIDIA GeForce RTX 3090", "bf16-mixed", 71),
        ("NVIDIA GeForce RTX 5090", "bf16-mixed", 209.5),
        ("Tesla T4", "16-mixed", 65),
        ("Tesla V100-SXM2-16GB", "16-mixed", 125),
        ("Tesla V100-PCIE-16GB", "16-mixed", 112),
    ],
)
def test_peak_is_dense_and_by_precision(name: str, precision: str, tflops: float):
    assert peak_flops(name, precision) == pytest.approx(tflops * 1e12)


@pytest.mark.parametrize(
    "name",
    [
        *("NVIDIA A10G", "NVIDIA L400", "NVIDIA A1000", "Some Card", ""),
        *("NVIDIA GeForce RTX 4090 Laptop GPU", "NVIDIA GeForce RTX 4090 D"),
        *("NVIDIA H200 MIG 1g.18gb", "NVIDIA A100-SXM4-40GB MIG 3g.20gb"),
        *("NVIDIA A100-4-20C", "GRID A100-40C", "GRID T4-16Q", "NVIDIA L40S-48Q", "NVIDIA A40-12Q"),
        *("NVIDIA GeForce RTX 3090 Ti", "NVIDIA GeForce RTX 5090 D v2", "NVIDIA RTX 5090 SUPER"),
        *("NVIDIA H20", "NVIDIA H800", "NVIDIA A800-SXM4-80GB", "NVIDIA H100", "NVIDIA B200A"),
        *("NVIDIA A100-SXM-64GB", "NVIDIA A100X", "NVIDIA A10M", "NVIDIA T4G", "NVIDIA T400 4GB"),
        *("Tesla V100S-PCIE-32GB", "Tesla V100-SXM3-32GB", "Tesla V100-FHHL-16GB"),
        *("Tesla V100-DGXS-32GB", "Tesla V100-SXM2-32GB-LS", "AMD Instinct MI300X"),
    ],
)
def test_unknown_device_has_no_peak(name: str):
    assert peak_flops(name, "bf16-mixed") is None


@pytest.mark.parametrize(
    ("name", "devices", "percent"),
    [
        ("NVIDIA A100-SXM4-80GB", 1, "48.79"),
        ("NVIDIA H100 80GB HBM3", 1, "15.39"),
        ("NVIDIA A100-SXM4-80GB", 2, "48.79"),
    ],
)
def test_share_is_of_all_devices(name: str, devices: int, percent: str):
    peak = peak_flops(name, "bf16-mixed")
    assert peak is not None
    assert f"{100 * mfu(devices * FLOPS, peak, devices):.2f}" == percent


def test_peak_of_a_cpu_is_its_best_product():
    clock = iter([0.0, 0.0, 0.5, 0.5, 1.0, 1.25, 2.0])
    assert measured_peak_flops("32-true", 1.0, lambda: next(clock)) == 2 * 2048**3 / 0.25


def test_peak_of_nothing_is_refused():
    with pytest.raises(ValueError, match=r"throughput\.peak_tflops is 0\.0: must be above 0"):
        Throughput(peak_tflops=0.0)
