"""Allocator settings, in processes of their own."""

import json
import os
import subprocess
import sys

import pytest

from lm.cpu import has_glibc

pytestmark = pytest.mark.skipif(not has_glibc(), reason="the C library is not glibc")
PROGRAM = """
import json, resource
import torch
from lm.cpu import give_back_freed_memory, keep_freed_memory

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()

kept = keep_freed_memory()
before = resident()
tensors = [torch.ones(2**20) for _ in range(50)]
del tensors
held = resident() - before
give_back_freed_memory()
print(json.dumps([kept, held, resident() - before]))
"""


def freed(**environment: str) -> tuple[bool, float, float]:
    """Of 210 MB that were freed: whether they are to be kept, MB held, and MB held after all."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | environment,
    )
    kept, held, after = json.loads(done.stdout)
    return kept, held / 1e6, after / 1e6


def test_freed_memory_is_kept_until_it_is_given_back():
    kept, held, after = freed()
    assert kept
    assert held > 150
    assert after < 50


def test_variable_leaves_the_allocator_as_it_is():
    kept, held, _ = freed(RELIGHT_MALLOC="default")
    assert not kept
    assert held < 50
