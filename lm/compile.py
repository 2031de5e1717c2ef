"""torch.compile: whether a run is compiled, the fallback to eager code, the kernel of the loss."""

import importlib.util
import os
import shutil
import sys
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor

from lm.loss import softmax_step
from lm.softmax import find_compiler, library, native_softmax_step

# Two CPU cores do this uncompiled in about two minutes, of which compiling could save a third.
# Compiling itself takes 13 to 40 seconds with a cold cache.
COMPILE_FLOPS = 5e13


def can_compile(device: str) -> bool:
    """Whether the compilers that torch.compile needs are installed.

    A C++ compiler on a CPU; Triton and a C compiler on CUDA.
    """
    if device == "cuda":
        compilers = (os.environ.get("CC", "cc"), "gcc", "clang")
        return importlib.util.find_spec("triton") is not None and any(map(shutil.which, compilers))
    return device == "cpu" and find_compiler() is not None


def why_not_compiled(setting: bool | str, device: str, run_flops: int) -> str | None:
    """Return the reason not to compile a run, or None if it is to be compiled.

    Args:
        run_flops: FLOPs of the whole run; 0 if unknown.
    """
    if setting is False:
        return "model.compile is false"
    if not can_compile(device):
        return "no compiler is found"
    if setting == "auto" and device == "cpu" and 0 < run_flops < COMPILE_FLOPS:
        return f"{run_flops:.1e} FLOPs in all are too few to make up for compiling"
    return None


class Compilation:
    """Compilation of one run's functions, decided once; `active` while compiled code is used."""

    def __init__(self, setting: bool | Literal["auto"]) -> None:
        self.setting = setting
        self.active = False
        self.summary = ""

    def decide(self, device: str, run_flops: int) -> None:
        """Decide whether the run is compiled.

        Raises:
            ValueError: compilation is required and no compiler is installed.
        """
        if self.setting is True and not can_compile(device):
            raise ValueError(
                f"model.compile is true, but torch.compile finds no compiler for {device} (a C++ "
                "compiler on a CPU, Triton and a C compiler on CUDA); install one or set "
                "model.compile to false"
            )
        why_not = why_not_compiled(self.setting, device, run_flops)
        self.active = why_not is None
        self.summary = (
            f"not compiled ({why_not})" if why_not else "compiled (the first step takes a while)"
        )

    def compile(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the compiled function; with `auto`, it runs eagerly if compiling fails."""
        # Imported here because the import takes a second, which uncompiled runs need not wait for.
        from torch._dynamo.exc import TorchDynamoException

        compiled = torch.compile(function, dynamic=False)
        if self.setting is True:
            return compiled
        # Compiles the backward pass with the forward pass, so that its failure is caught below.
        torch._functorch.config.force_non_lazy_backward_lowering = True  # pyright: ignore

        def call(*args: Any) -> Any:
            if not self.active:
                return function(*args)
            try:
                return compiled(*args)
            except TorchDynamoException as error:
                self.active = False
                # The first line names the backend, the second the backend's error.
                why = " ".join(str(error).split("\n")[:2]) or type(error).__name__
                print(f"compile: failed, so the run is not compiled: {why}", file=sys.stderr)
                return function(*args)

        return call

    def loss_kernel(self, device: str) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]:
        """Return the softmax of the loss for compiled runs: C++ on a CPU, else torch.compile."""
        if device != "cpu":
            return self.compile(softmax_step)
        try:
            library()
        except OSError as error:
            print(f"loss: {error}; torch's own operations are used", file=sys.stderr)
            return softmax_step
        return native_softmax_step
