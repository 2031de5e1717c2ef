"""Memory allocator settings of the process."""

import ctypes
import os
import platform

_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4  # from malloc.h


def has_glibc() -> bool:
    """Whether the process uses glibc."""
    return platform.libc_ver()[0] == "glibc"


def keep_freed_memory() -> bool:
    """Make glibc keep freed pages; return whether it does.

    Otherwise page faults of large tensors, allocated anew at each step, take about a quarter of a
    CPU training step. Call it before the first large tensor. Does nothing and returns False with
    other C libraries and with RELIGHT_MALLOC=default.
    """
    if not has_glibc() or os.environ.get("RELIGHT_MALLOC") == "default":
        return False
    libc = ctypes.CDLL(None)
    return bool(libc.mallopt(_M_MMAP_MAX, 0) and libc.mallopt(_M_TRIM_THRESHOLD, 2**31 - 1))


def give_back_freed_memory() -> None:
    """Return free pages to the system, for example after data preparation."""
    if has_glibc():
        ctypes.CDLL(None).malloc_trim(0)
