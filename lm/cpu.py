"""Allocator settings of the process."""

import ctypes
import os
import platform

_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4  # from malloc.h


def has_glibc() -> bool:
    """Whether the process runs on the C library whose allocator is known here."""
    return platform.libc_ver()[0] == "glibc"


def keep_freed_memory() -> bool:
    """Let glibc keep freed pages instead of giving them back and faulting them in anew.

    Large tensors that come and go each step cost about a quarter of a CPU training step in page
    faults otherwise. To be called before the first large tensor. Does nothing, and says so by
    returning False, on other C libraries and with RELIGHT_MALLOC=default.
    """
    if not has_glibc() or os.environ.get("RELIGHT_MALLOC") == "default":
        return False
    libc = ctypes.CDLL(None)
    return bool(libc.mallopt(_M_MMAP_MAX, 0) and libc.mallopt(_M_TRIM_THRESHOLD, 2**31 - 1))


def give_back_freed_memory() -> None:
    """Have glibc give back all pages that are free now, such as those of preparing the data."""
    if has_glibc():
        ctypes.CDLL(None).malloc_trim(0)
