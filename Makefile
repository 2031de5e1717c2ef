# Targets with a ## comment are shown by `make`.
PYTHON ?= python3
BIN := .venv/bin
CONFIG ?= configs/small.yaml

.PHONY: help env bench-env train test test-slow check fmt sizes
.DEFAULT_GOAL := help

help: ## show this help
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

env: .venv/.stamp ## make or refresh .venv with the pinned versions

# torch first and by its exact version: a range would take the newest build there is.
.venv/.stamp: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit("Python 3.11 or newer is needed, this is " + sys.version) if sys.version_info < (3, 11) else None'
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check "$$(grep '^torch==' constraints.txt)"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

# litgpt's own pins contradict ours, so it comes without what it asks for.
bench-env: env ## add the trainers that benchmarks/throughput.py compares with
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[bench]'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps litgpt==0.5.13

train: env ## prepare the corpus, then train configs/small.yaml; again: resume
	$(BIN)/lightning fit --config $(CONFIG)

test: env ## run the tests (under 5 minutes)
	$(BIN)/python -m pytest -q -n auto

# Threads that wait for work asleep: two tests at a time share the cores.
test-slow: env ## run the tests that take longer
	OMP_WAIT_POLICY=PASSIVE $(BIN)/python -m pytest -q -m 'slow and not gpu' -n 2

check: env ## format, lint, types and tests
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright
	$(MAKE) test

fmt: env ## format the code and sort imports
	$(BIN)/ruff check --fix --quiet --select I .
	$(BIN)/ruff format .

sizes: ## lines of each source file
	@find lm data callbacks cli.py -name "*.py" -size +0 | xargs wc -l | sort -n
