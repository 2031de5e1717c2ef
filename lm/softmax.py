"""CPU kernel of the loss in C++ (softmax.cpp), built when first needed and cached."""

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
# Sufficient to vectorize. Not -ffast-math: loading a library linked with it makes the whole process
# flush denormal numbers to zero.
FLAGS = ["-O3", "-march=native", "-fno-math-errno", "-fno-trapping-math", "-fno-signed-zeros"]
FLAGS += ["-fopenmp", "-shared", "-fPIC"]
if platform.machine() == "x86_64":
    FLAGS.append("-mprefer-vector-width=512")
KERNELS = {torch.bfloat16: "softmax_bf16", torch.float32: "softmax_fp32"}


def find_compiler() -> str | None:
    """Return the first C++ compiler on the path."""
    return next(filter(None, map(shutil.which, COMPILERS)), None)


def cache_folder() -> Path | None:
    """Return the cache folder of built kernels; None if it cannot be written."""
    try:
        home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        folder = Path(home) / "relight"
        folder.mkdir(parents=True, exist_ok=True)
    except (OSError, RuntimeError):  # RuntimeError: no home directory
        return None
    return folder if os.access(folder, os.W_OK) else None


def machine(compiler: str) -> str:
    """Return all that a built kernel depends on besides its source; machines may share a cache."""
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False)
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = [platform.processor()]
    kinds = ("vendor_id", "model", "stepping", "flags", "Features", "CPU part")
    cpu = sorted({line for line in lines if line.startswith(kinds)})
    return "\n".join([version.stdout, *platform.libc_ver(), *FLAGS, *cpu])


def build(compiler: str, folder: Path, name: str) -> Path:
    """Build the kernels into a folder by an atomic rename; the name contains their digest.

    Raises:
        OSError: the compiler fails.
    """
    with tempfile.TemporaryDirectory(dir=folder) as private:
        built = Path(private) / "softmax.so"
        command = [compiler, *FLAGS, str(SOURCE), "-o", str(built)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            lines = done.stderr.strip().splitlines() or ["it says nothing"]
            raise OSError(f"{compiler} cannot build {SOURCE.name}: {lines[0]}")
        # Flushed before the rename: a power failure could otherwise leave an empty file.
        with built.open("rb") as file:
            os.fsync(file.fileno())
        # Several processes may build at once; each renames a complete file.
        return built.replace(folder / f"{name}-{digest(built)}.so")


def digest(path: Path) -> str:
    """Return the first digits of a file's SHA-256."""
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]


def find_built(folder: Path, name: str) -> ctypes.CDLL | None:
    """Load kernels built earlier; damaged files are removed."""
    for path in folder.glob(f"{name}-*.so"):
        # Loading a truncated file can kill the process.
        if path.stem == f"{name}-{digest(path)}":
            return ctypes.CDLL(str(path))
        path.unlink(missing_ok=True)
    return None


@functools.cache
def library() -> ctypes.CDLL:
    """Return the kernels, built if they are not cached.

    Raises:
        OSError: there is no compiler, or it fails.
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
    """`softmax_step` for CPU logits with one pass over memory less; overwrites the logits.

    Sums do not depend on the number of threads. Logits of another type or memory order go to
    `softmax_step`.

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
