# Every target sets up what it needs, from a fresh clone with only Python 3.11 or later.
#
#   make demo             plan a 1.7 B-parameter model for an RTX 4090, then train a small one here
#   make check            linters and two minutes of tests: between two edits
#   make test             linters and the tests that take eight minutes on two cores
#   make test-all         linters and all tests, as continuous integration runs them
#   make lint             linters only
#   make accuracy         predictions against the recordings, as a table
#   make accuracy-record  record again without a GPU (Linux x86-64, gcc, 6 GB of disk)
#   make zoo              which models work, an hour; writes docs/zoo.md
#   make bench            speed, and the plan against what others do; over an hour
#   make docs             the site, in site/; stops at a warning
#
# PYTHON=python3.12 chooses the interpreter; JOBS=2 the number of test processes.
# Recording: TORCH=2.15.0 chooses the version, CASES='gpt2-*' the cases, RECORD_JOBS=4 how many at a time.

SHELL := /bin/bash
.DEFAULT_GOAL := help
.PHONY: help demo check test test-all lint accuracy accuracy-record bench zoo docs clean

# The first that is new enough and can make environments. 3.11 first: constraints.txt was
# frozen on it.
PYTHON ?= $(shell for name in python3.11 python3.12 python3.13 python3.14 python3; do \
	$$name -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))' \
	>/dev/null 2>&1 && echo $$name && break; done)
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
BENCH_READY := $(VENV)/.bench-ready
DOCS_READY := $(VENV)/.docs-ready
JOBS ?= auto
# Recordings are made with the CUDA build of this torch, one process per case.
TORCH ?= $(shell sed -n 's/^torch==//p' constraints.txt)
CASES ?= *
RECORD_JOBS ?= 2
# Each test process would otherwise start a thread per core.
export OMP_NUM_THREADS ?= 1

help:
	@sed -n '3,15s/^# \{0,1\}//p' Makefile

define need_python
	@test -n "$(PYTHON)" || { echo "No Python 3.11 or later with venv was found. Install" \
		"it (Debian: apt-get install python3 python3-venv) or set PYTHON." >&2; exit 1; }
endef

# Made again when what it was made from changes; a half-made one is never ready.
$(READY): pyproject.toml constraints.txt
	$(need_python)
	@echo "Setting up $(VENV) with $(PYTHON): once, a few minutes (PyTorch is large)."
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check \
		--constraint constraints.txt --editable ".[test,lint]"
	@touch $(READY)

demo: $(READY)
	$(BIN)/python examples/demo.py

# Processor seconds of tests, the cheapest first (tests/durations.py); the rest is the
# collection. OMP_NUM_THREADS=1: the workers share the cores, not every op all of them.
check: lint
	$(BIN)/python -m pytest -n $(JOBS) --dist=worksteal --within 60

test: lint
	$(BIN)/python -m pytest -n $(JOBS) --dist=worksteal --within 660

test-all: lint
	$(BIN)/python -m pytest -n $(JOBS) --dist=worksteal

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo

accuracy: $(READY)
	$(BIN)/python -m tests.accuracy.report

# Needs no more than Python itself: the recorded programs run in an environment of their own.
accuracy-record:
	$(need_python)
	$(PYTHON) -m tests.accuracy.nulldriver.install --torch $(TORCH)
	$(PYTHON) -m tests.accuracy.record --null-driver .nulldriver/torch-$(TORCH) \
		--jobs $(RECORD_JOBS) $(foreach case,$(CASES),'$(case)')

# ZOO='"causal LM" T5' takes some families or names; all of them also write docs/zoo.md.
zoo: $(READY)
	$(BIN)/python -m tests.zoo.run $(ZOO) $(if $(ZOO),,--write)

# torch's own budget solver needs more packages; without them its benchmark is skipped.
$(BENCH_READY): $(READY)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check \
		--constraint constraints.txt --editable ".[bench]" && touch $@ || \
		echo "The packages of [bench] could not be installed; going on without." >&2

# BENCH='six_blocks checkmate' runs some; all of them also write docs/performance.md.
bench: $(BENCH_READY)
	$(BIN)/python -m benchmarks.run $(BENCH)

$(DOCS_READY): $(READY)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check \
		--constraint constraints.txt --editable ".[docs]"
	@touch $@

# The banner that is switched off is about MkDocs 2; constraints.txt has 1.
docs: $(DOCS_READY)
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

clean:
	rm -rf $(VENV) build dist site .mypy_cache .pytest_cache .ruff_cache .hypothesis \
		.import_linter_cache
