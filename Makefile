# relit: every target builds .venv on its own first; `make help` lists them.
.DEFAULT_GOAL := help
SHELL := /bin/sh

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
PY := $(VENV)/bin/python
STAMP := $(VENV)/.installed-from
INPUTS := pyproject.toml constraints.txt
# One thread per process: losses are compared bit for bit, and two ranks share the machine.
ONE_THREAD := OMP_NUM_THREADS=1
PYTEST := $(ONE_THREAD) $(PY) -m pytest
SUITES = $(wildcard tests/unit tests/sim)
DRILLS = $(wildcard tests/cluster/test_drill_*.py)
SEEDS ?= 200
KILLS ?= 20
# Unit tests share nothing but the machine; two at a time is what two cores hold.
UNIT_WORKERS ?= 2
CORRUPTIONS ?= 10000
ARGS ?=

.NOTPARALLEL:
.PHONY: help run test check test-unit test-sim test-cluster test-store sim fuzz drill bench docs fmt clean

help:  ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-13s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

run: $(STAMP)  ## Train, kill twice, compare with the twin (ARGS='--steps 300')
	$(PY) -m relit demo $(ARGS)

test: test-unit test-cluster  ## Unit, simulator and cluster suites

check: $(STAMP)  ## Lint, format, types, tidy rules
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy
	$(PYTEST) -q tests/unit/test_tidy.py

test-unit: $(STAMP)  ## Unit tests and the simulator; no Ray
	$(PYTEST) -q -n $(UNIT_WORKERS) --dist worksteal $(SUITES)

test-cluster: $(STAMP)  ## Tests on a real local Ray cluster
	$(PYTEST) -q --durations=12 tests/cluster

test-store: $(STAMP)  ## The S3 store against a real server that a proxy breaks; skipped where there is none
	$(PYTEST) -q -rs tests/store

sim: $(STAMP)  ## The seeded simulator alone, over many seeds (SEEDS=200)
	RELIT_SIM_SEEDS=$(SEEDS) $(PYTEST) -q tests/sim

fuzz: $(STAMP)  ## Damaged checkpoints, racing committers, killed trainers (CORRUPTIONS=10000)
	RELIT_CORRUPTIONS=$(CORRUPTIONS) RELIT_RACES=200 RELIT_KILLS=50 $(PYTEST) -q -o timeout=3600 \
	  tests/unit/test_corruption.py tests/unit/test_racing_committers.py tests/unit/test_trainer_killed.py

drill: $(STAMP)  ## SIGKILLs at random steps on a real cluster (KILLS=20)
	RELIT_DRILL_KILLS=$(KILLS) $(PYTEST) -q -s $(or $(DRILLS),$(error no tests/cluster/test_drill_*.py))

bench: $(STAMP)  ## Measure against peers; writes benchmarks/results/latest.json
	$(ONE_THREAD) $(PY) benchmarks/run_all.py $(ARGS)

docs: $(STAMP)  ## Check the documents: links, anchors, code examples, make targets
	$(PYTEST) -q tests/unit/test_docs.py

fmt: $(STAMP)  ## Format and fix what can be fixed
	$(PY) -m ruff format .
	$(PY) -m ruff check --fix .

clean:  ## Remove caches and build results; keeps .venv and run directories
	rm -rf .mypy_cache .ruff_cache .pytest_cache .hypothesis dist build
	find jobs platform storage tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +

# The stamp holds the text it was installed from: a mere touch of an input installs nothing.
$(STAMP): $(INPUTS)
	@if cat $(INPUTS) | cmp -s - $@; then touch $@; else $(MAKE) --no-print-directory install; fi

.PHONY: install
install:
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' || \
	  { echo "relit needs Python 3.11; found '$(PYTHON)'. Say make PYTHON=/path/to/python3.11"; exit 1; }
	@test -x $(PY) || "$(PYTHON)" -m venv $(VENV) || \
	  { rm -rf $(VENV); echo "python3 -m venv failed: install the package python3.11-venv"; exit 1; }
	$(PY) -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@cat $(INPUTS) > $(STAMP)
