#!/usr/bin/env bash
# What only a CUDA card can show, in about 8 minutes; results as they come, in $OUT/device.jsonl.
#   benchmarks/device.sh          on a card
#   benchmarks/device.sh --dry    the same paths on a CPU, with toy shapes
# PYTHON is that of .venv, or another that has what pyproject.toml asks for; it needs no install.
set -euo pipefail
cd "$(dirname "$0")/.."
OUT=${OUT:-runs/device}
PYTHON=${PYTHON:-.venv/bin/python}
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
"$PYTHON" benchmarks/device.py --out "$OUT" "$@"
