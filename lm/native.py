"""The softmax of the loss on a CPU in C++: softmax.cpp, built by the machine's own compiler."""

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch
from jaxtyping import Float, Int
from torch import Tensor

from lm.loss import softmax_step

SOURCE = Path(__file__).with_name("softmax.cpp")
COMPILERS = ("c++", "g++", "clang++")
FLAGS = ["-O3", "-march=native", "-ffast-math", "-fno-finite-math-only", "-fopenmp"]
if platform.machine() == "x86_64":
    FLAGS.append("-mprefer-vector-width=512")
KERNELS = {torch.bfloat16: "softmax_bf16", torch.float32: "softmax_fp32"}


def cache_folder() -> Path:
    """Where built kernels stay from run to run."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "relight"


def processor() -> str:
    """What -march=native depends on: a cache may be shared by unlike machines."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    kinds = ("vendor_id", "model", "stepping", "flags", "Features", "CPU part")
    return "\n".join(sorted({line for line in lines if line.startswith(kinds)}))


@functools.cache
def library() -> ctypes.CDLL:
    """The kernels, built where they are not there yet.

    Raises:
        OSError: no compiler, or one that refuses; the text says which.
    """
    compiler = next(filter(None, map(shutil.which, COMPILERS)), None)
    if compiler is None:
        raise OSError(f"no C++ compiler ({', '.join(COMPILERS)}) is on the path")
    text = SOURCE.read_text(encoding="utf-8")
    facts = "\n".join([text, compiler, *FLAGS, processor()])
    name = f"softmax-{hashlib.sha256(facts.encode()).hexdigest()[:16]}.so"
    path = cache_folder() / name
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            built = Path(folder) / name
            command = [compiler, *FLAGS, "-shared", "-fPIC", str(SOURCE), "-o", str(built)]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                lines = done.stderr.strip().splitlines() or ["it says nothing"]
                raise OSError(f"{compiler} cannot build {SOURCE.name}: {lines[0]}")
            # Several processes may build at once: each puts a whole file in place.
            built.replace(path)
    return ctypes.CDLL(str(path))


def native_softmax_step(
    logits: Float[Tensor, "R V"], targets: Int[Tensor, " R"]
) -> tuple[Float[Tensor, " R"], Float[Tensor, "R V"]]:
    """`softmax_step` in one pass over memory less, for the logits of a CPU; they are overwritten.

    Its sums do not depend on the number of threads. Logits of another type, or that do not lie
    vocabulary first, go to `softmax_step`.
    """
    by_vocabulary = logits.T
    if logits.dtype not in KERNELS or not by_vocabulary.is_contiguous() or not logits.numel():
        return softmax_step(logits, targets)
    kernels = library()
    vocab, rows = by_vocabulary.shape
    loss = torch.empty(rows, dtype=torch.float32)
    room = torch.empty(kernels.room_rows() * rows, dtype=torch.float32)
    getattr(kernels, KERNELS[logits.dtype])(
        *(ctypes.c_void_p(x.data_ptr()) for x in (logits, targets.contiguous(), loss, room)),
        ctypes.c_int64(vocab),
        ctypes.c_int64(rows),
        ctypes.c_int(torch.get_num_threads()),
    )
    return loss, logits
