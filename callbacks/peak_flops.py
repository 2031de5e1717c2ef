"""Peak arithmetic of a device: from its maker's data sheet, or measured on a CPU."""

import time
from collections.abc import Callable

import torch

# Whole words of the device name that must all be there → dense TFLOP/s in bf16 (fp16 where the
# card has no bf16), and in fp32 without TF32. The first match counts, so longer names come first.
# Data sheets often quote twice as much, with structured sparsity.
PEAKS: tuple[tuple[frozenset[str], float, float], ...] = tuple(
    (frozenset(name.upper().split()), half, single)
    for name, half, single in (
        ("GB200", 2500.0, 80.0),  # NVIDIA GB200 NVL72 data sheet, per GPU
        ("B200", 2250.0, 75.0),  # NVIDIA DGX B200 data sheet, per GPU
        ("H200", 989.0, 67.0),  # NVIDIA H200 data sheet, SXM
        ("H100 NVL", 835.0, 60.0),  # NVIDIA H100 data sheet
        ("H100 PCIe", 756.0, 51.0),  # NVIDIA H100 PCIe product brief
        ("H100", 989.0, 67.0),  # NVIDIA H100 data sheet, SXM
        ("A100", 312.0, 19.5),  # NVIDIA A100 data sheet
        ("L40S", 362.0, 91.6),  # NVIDIA L40S data sheet
        ("L40", 181.0, 90.5),  # NVIDIA L40 data sheet
        ("L4", 121.0, 30.3),  # NVIDIA L4 data sheet
        ("A10", 125.0, 31.2),  # NVIDIA A10 data sheet
        ("A30", 165.0, 10.3),  # NVIDIA A30 data sheet
        ("A40", 149.7, 37.4),  # NVIDIA A40 data sheet
        ("RTX 5090", 209.5, 104.8),  # NVIDIA RTX Blackwell architecture, fp32 accumulate
        ("RTX 4090", 165.2, 82.6),  # NVIDIA Ada architecture, fp32 accumulate
        ("RTX 3090", 71.0, 35.6),  # NVIDIA GA102 architecture, fp32 accumulate
        ("T4", 65.0, 8.1),  # NVIDIA T4 data sheet, fp16
        ("V100 PCIE", 112.0, 14.0),  # NVIDIA V100 data sheet, fp16
        ("V100", 125.0, 15.7),  # NVIDIA V100 data sheet, SXM2, fp16
    )
)


def peak_flops(device_name: str, precision: str) -> float | None:
    """Dense FLOP/s of a GPU for a Trainer precision, or None where the name is not known.

    Only whole words match: A10 is not A100, L4 is not L40S. A part of a card, or a slower card of
    the same name, is not known.
    """
    words = set(device_name.upper().replace("-", " ").split())
    if words & {"MIG", "LAPTOP", "D"} or precision == "64-true":
        return None
    for name, half, single in PEAKS:
        if name <= words:
            return 1e12 * (half if precision.startswith(("bf16", "16")) else single)
    return None


def measured_peak_flops(
    precision: str, seconds: float = 1.0, now: Callable[[], float] = time.perf_counter
) -> float:
    """FLOP/s of this CPU in a large square matrix product, the best of about a second."""
    kind = torch.bfloat16 if precision.startswith("bf16") else torch.float32
    side = 2048
    left, right = (torch.ones(side, side, dtype=kind) for _ in range(2))
    best, end = float("inf"), now() + seconds
    while True:
        start = now()
        torch.mm(left, right)
        best = min(best, now() - start)
        if now() >= end:
            return 2 * side**3 / best
