"""Peak arithmetic of a device: from its maker's data sheet, or measured on a CPU."""

import re
import time
from collections.abc import Callable

import torch

# Names of cards as the driver tells them, after the maker's words, and what their data sheets say:
# dense TFLOP/s in bf16 (fp16 where the card has no bf16), and in fp32 without TF32. Data sheets
# often quote twice as much, with structured sparsity.
PEAKS: tuple[tuple[str, float, float], ...] = (
    ("GB200", 2500.0, 80.0),  # NVIDIA GB200 NVL72 data sheet, per GPU
    ("B200", 2250.0, 75.0),  # NVIDIA DGX B200 data sheet, per GPU
    ("GH200 (480GB|96GB HBM3|144G HBM3e)", 989.0, 67.0),  # NVIDIA GH200 data sheet
    ("H200", 989.0, 67.0),  # NVIDIA H200 data sheet, SXM
    ("H200 NVL", 835.0, 60.0),  # NVIDIA H200 data sheet
    ("H100 80GB HBM3", 989.0, 67.0),  # NVIDIA H100 data sheet, SXM
    ("H100 NVL", 835.0, 60.0),  # NVIDIA H100 data sheet
    ("H100 PCIe", 756.0, 51.0),  # NVIDIA H100 PCIe product brief
    ("A100-SXM4?-(40|80)GB|A100-PCIE-(40|80)GB|A100 80GB PCIe", 312.0, 19.5),  # A100 data sheet
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
    ("V100-PCIE-(16|32)GB", 112.0, 14.0),  # NVIDIA V100 data sheet, fp16
    ("V100-SXM2-(16|32)GB", 125.0, 15.7),  # NVIDIA V100 data sheet, fp16
)
MAKER = "((NVIDIA|Tesla|GeForce) )*"


def peak_flops(device_name: str, precision: str) -> float | None:
    """Dense FLOP/s of a GPU for a Trainer precision, or None where the name is not known.

    Only whole names match: a part of a card (MIG, vGPU), a laptop's or a country's, Ti, SUPER and
    other variants are other cards.
    """
    if precision == "64-true":
        return None
    for name, half, single in PEAKS:
        if re.fullmatch(f"{MAKER}({name})", device_name, re.IGNORECASE):
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
