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

from lm.loss import IGNORE_INDEX, softmax_step

SOURCE = Path(__file__).with_name("softmax.cpp")
COMPILERS = ("c++", "g++", "clang++")
# Enough to vectorise. Not -ffast-math: a library linked with it makes the whole process flush
# denormal numbers to zero as soon as it is loaded.
FLAGS = ["-O3", "-march=native", "-fno-math-errno", "-fno-trapping-math", "-fno-signed-zeros"]
FLAGS += ["-fopenmp", "-shared", "-fPIC"]
if platform.machine() == "x86_64":
    FLAGS.append("-mprefer-vector-width=512")
KERNELS = {torch.bfloat16: "softmax_bf16", torch.float32: "softmax_fp32"}


def find_compiler() -> str | None:
    """The machine's C++ compiler."""
    return next(filter(None, map(shutil.which, COMPILERS)), None)


def cache_folder() -> Path | None:
    """Where built kernels stay from run to run; None where nothing can be kept."""
    try:
        home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        folder = Path(home) / "relight"
        folder.mkdir(parents=True, exist_ok=True)
    except (OSError, RuntimeError):  # the latter where there is no home
        return None
    return folder if os.access(folder, os.W_OK) else None


def machine(compiler: str) -> str:
    """What a built kernel depends on but its source: unlike machines may share a cache."""
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False)
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = [platform.processor()]
    kinds = ("vendor_id", "model", "stepping", "flags", "Features", "CPU part")
    cpu = sorted({line for line in lines if line.startswith(kinds)})
    return "\n".join([version.stdout, *platform.libc_ver(), *FLAGS, *cpu])


def build(compiler: str, folder: Path, name: str) -> Path:
    """Put the built kernels into a folder, whole, under a name that tells their digest.

    Raises:
        OSError: the compiler refuses; the text says which and why.
    """
    with tempfile.TemporaryDirectory(dir=folder) as private:
        built = Path(private) / "softmax.so"
        command = [compiler, *FLAGS, str(SOURCE), "-o", str(built)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            lines = done.stderr.strip().splitlines() or ["it says nothing"]
            raise OSError(f"{compiler} cannot build {SOURCE.name}: {lines[0]}")
        # On disk before its name is: a power failure would else leave an empty file.
        with built.open("rb") as file:
            os.fsync(file.fileno())
        # Several processes may build at once: each puts a whole file in place.
        return built.replace(folder / f"{name}-{digest(built)}.so")


def digest(path: Path) -> str:
    """What a file's content is told by."""
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]


def find_built(folder: Path, name: str) -> ctypes.CDLL | None:
    """Kernels that were built before; damaged files are removed."""
    for path in folder.glob(f"{name}-*.so"):
        # To load a file that was cut short can kill the process.
        if path.stem == f"{name}-{digest(path)}":
            return ctypes.CDLL(str(path))
        path.unlink(missing_ok=True)
    return None


@functools.cache
def library() -> ctypes.CDLL:
    """The kernels, built where they are not there yet.

    Raises:
        OSError: no compiler, or one that refuses; the text says which.
    """
    compiler = find_compiler()
    if compiler is None:
        raise OSError(f"no C++ compiler ({', '.join(COMPILERS)}) is on the path")
    facts = SOURCE.read_text(encoding="utf-8") + machine(compiler)
    name = f"softmax-{hashlib.sha256(facts.encode()).hexdigest()[:16]}"
    folder = cache_folder()
    if folder is None:
        with tempfile.TemporaryDirectory() as private:
            return ctypes.CDLL(str(build(compiler, Path(private), name)))
    return find_built(folder, name) or ctypes.CDLL(str(build(compiler, folder, name)))


def native_softmax_step(
    logits: Float[Tensor, "R V"], targets: Int[Tensor, " R"]
) -> tuple[Float[Tensor, " R"], Float[Tensor, "R V"]]:
    """`softmax_step` in one pass over memory less, for the logits of a CPU; they are overwritten.

    Its sums do not depend on the number of threads. Logits of another type, or that do not lie
    vocabulary first, go to `softmax_step`.

    Raises:
        IndexError: a target is outside the vocabulary.
    """
    by_vocabulary = logits.T
    known = logits.dtype in KERNELS and targets.dtype == torch.int64
    if not known or not by_vocabulary.is_contiguous() or not logits.numel():
        return softmax_step(logits, targets)
    vocab, rows = by_vocabulary.shape
    targets = targets.contiguous()
    outside = (targets < 0) & (targets != IGNORE_INDEX) | (targets >= vocab)
    if outside.any():
        raise IndexError(f"target {int(targets[outside][0])} is not in a vocabulary of {vocab}")
    kernels = library()
    loss = torch.empty(rows, dtype=torch.float32)
    room = torch.empty(kernels.room_rows() * rows, dtype=torch.float32)
    getattr(kernels, KERNELS[logits.dtype])(
        *(ctypes.c_void_p(x.data_ptr()) for x in (logits, targets, loss, room)),
        ctypes.c_int64(vocab),
        ctypes.c_int64(rows),
        ctypes.c_int(torch.get_num_threads()),
    )
    return loss, logits
