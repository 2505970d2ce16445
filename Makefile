# Everything runs in .venv, which the first target that needs it makes from the lock files.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
OLDEST_VENV := .venv-oldest
# -qq: errors only. Nothing is asked of the index but packages.
PIP := $(BIN)/python -m pip --disable-pip-version-check -qq
ARGS ?=

INSTALLED := $(VENV)/.installed
COLOSSALAI_INSTALLED := $(VENV)/.colossalai-installed
TRAINERS_INSTALLED := $(VENV)/.trainers-installed
PEERS_INSTALLED := $(VENV)/.peers-installed
LINTERS_INSTALLED := $(VENV)/.linters-installed
DOCS_INSTALLED := $(VENV)/.docs-installed
OLDEST_INSTALLED := $(OLDEST_VENV)/.installed

# A process of tests for each core, and one more, since some wait; who has done its share takes of another's.
SIDE_BY_SIDE = -n $(shell echo $$(( $$(getconf _NPROCESSORS_ONLN) + 1 ))) --maxprocesses 8 --dist worksteal
WITHOUT_COLOSSALAI := --ignore tests/plugin --ignore tests/trainers -m "not soak and not colossalai"

.DEFAULT_GOAL := help
.PHONY: help demo booster test test-core test-trainers test-full soak test-oldest simulate mutants peers bench hosts cuda house lint docs docs-serve clean

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-14s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(INSTALLED)  ## train a small GPT on two processes (options: make demo ARGS="--help")
	@OMP_NUM_THREADS=1 $(BIN)/torchrun --standalone --nproc-per-node 2 examples/train_gpt.py $(ARGS)

booster: $(COLOSSALAI_INSTALLED)  ## train a small Llama through ColossalAI's Booster (options: as for demo)
	@OMP_NUM_THREADS=1 $(BIN)/torchrun --standalone --nproc-per-node 2 examples/train_llama_booster.py $(ARGS)

test: $(TRAINERS_INSTALLED)  ## run the tests, 5 minutes on 2 cores (options: make test ARGS="-k floors")
	@$(BIN)/python -m pytest $(SIDE_BY_SIDE) $(ARGS)

test-core: $(INSTALLED)  ## run those of them that need torch alone, and not ColossalAI
	@$(BIN)/python -m pytest $(SIDE_BY_SIDE) $(WITHOUT_COLOSSALAI) $(ARGS)

test-trainers: $(TRAINERS_INSTALLED)  ## run those of trainers: accelerate, transformers, Lightning
	@$(BIN)/python -m pytest $(SIDE_BY_SIDE) tests/trainers $(ARGS)

test-full: $(TRAINERS_INSTALLED)  ## run the tests and the long ones
	@$(BIN)/python -m pytest $(SIDE_BY_SIDE) -m "" $(ARGS)

soak: $(TRAINERS_INSTALLED)  ## run the long tests alone (options: make soak ARGS="-k long_run")
	@$(BIN)/python -m pytest -m soak $(ARGS)

# Benchmarks compare with FSDP2, which torch 2.4 doesn't have.
test-oldest: $(OLDEST_INSTALLED)  ## run the core's tests with the oldest torch, in an environment of its own (5 GB)
	@$(OLDEST_VENV)/bin/python -m pytest $(SIDE_BY_SIDE) $(WITHOUT_COLOSSALAI) --ignore tests/tools/test_benchmarks.py --ignore tests/tools/test_readme.py $(ARGS)

simulate: $(INSTALLED)  ## run random programs on simulated ranks, 5 minutes (one seed: make simulate ARGS="--seed 7")
	@OMP_NUM_THREADS=1 $(BIN)/python -m tests.simulation $(ARGS)

mutants: $(TRAINERS_INSTALLED)  ## make mistakes in a copy of the package, each of which a test must see, an hour
	@$(BIN)/python -m tests.mutants $(ARGS)

peers: $(PEERS_INSTALLED)  ## install what the benchmarks compare with

bench: $(PEERS_INSTALLED)  ## measure speed and memory beside others, half an hour (a look: make bench ARGS=--quick)
	@OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks $(ARGS)

hosts: $(PEERS_INSTALLED)  ## measure over links between two hosts, namespaces of this one, 40 minutes; as root
	@$(BIN)/python -m benchmarks --only hosts $(ARGS)

cuda: $(PEERS_INSTALLED)  ## check and measure on GPUs, and write one file to send in (a look: make cuda ARGS=--quick)
	@OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.gpus $(ARGS)

house: $(LINTERS_INSTALLED)  ## lines by room, imports that climb or circle, functions called in one step
	@OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.house $(ARGS)

lint: $(LINTERS_INSTALLED)  ## check style, format, types and imports
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --strict lowlevel_zero examples
	$(BIN)/lint-imports --no-logo

docs: $(DOCS_INSTALLED)  ## build the documentation as a site in docs/_build; warnings are errors
	@$(BIN)/python -m sphinx --quiet --fail-on-warning --keep-going --fresh-env -c docs . docs/_build
	@echo "The first page is docs/_build/index.html; make docs-serve shows it."

docs-serve: docs  ## build the site and serve it at http://127.0.0.1:8000
	@$(BIN)/python -m http.server --bind 127.0.0.1 --directory docs/_build 8000

clean:  ## remove .venv, .venv-oldest and all that was built or cached
	rm -rf $(VENV) $(OLDEST_VENV) build dist docs/_build demo_output *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The stamps live in .venv, so that they go with it; they are written last, so that a failed install is retried.
$(INSTALLED): requirements.lock pyproject.toml
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 10) or sys.exit("lowlevel_zero needs Python 3.10 or newer; this is " + sys.version.split()[0] + ". Choose one: make PYTHON=python3.x ...")'
	@echo "Installing into $(VENV) (once; torch is a large download) ..."
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(VENV)
	@$(PIP) install --requirement requirements.lock
	@$(PIP) install --no-deps --editable .
	@touch $@

# Python 3.12 is the newest that torch 2.4 has a build for.
$(OLDEST_INSTALLED): requirements.lock pyproject.toml
	@echo "Installing torch 2.4 into $(OLDEST_VENV) (once; torch is a large download) ..."
	@$(PYTHON) -m venv --clear $(OLDEST_VENV)
	@sed 's/^torch==.*/torch==2.4.1/' requirements.lock | $(OLDEST_VENV)/bin/python -m pip -qq install --requirement /dev/stdin
	@$(OLDEST_VENV)/bin/python -m pip -qq install --no-deps --editable .
	@touch $@

# --no-build-isolation: the one package that has to be built is built by the lock file's setuptools, not the newest.
$(COLOSSALAI_INSTALLED): requirements-colossalai.lock $(INSTALLED)
	@echo "Installing ColossalAI into $(VENV) (once) ..."
	@$(PIP) install --no-deps --no-build-isolation --requirement requirements-colossalai.lock
	@touch $@

$(TRAINERS_INSTALLED): requirements-trainers.lock $(COLOSSALAI_INSTALLED)
	@echo "Installing Lightning and optimizers into $(VENV) (once) ..."
	@$(PIP) install --no-deps --requirement requirements-trainers.lock
	@touch $@

# These leave their native operators out: the CPU needs none of them.
$(PEERS_INSTALLED): requirements-bench.lock $(COLOSSALAI_INSTALLED)
	@echo "Installing DeepSpeed and fairscale into $(VENV) (once) ..."
	@DS_BUILD_OPS=0 DS_ACCELERATOR=cpu $(PIP) install --no-deps --no-build-isolation --requirement requirements-bench.lock
	@touch $@

$(LINTERS_INSTALLED): requirements-dev.lock $(INSTALLED)
	@echo "Installing the linters into $(VENV) (once) ..."
	@$(PIP) install --requirement requirements-dev.lock
	@touch $@

# Sphinx imports the plugin and the trainers' adapters to read their docstrings.
$(DOCS_INSTALLED): requirements-docs.lock $(TRAINERS_INSTALLED)
	@echo "Installing Sphinx into $(VENV) (once) ..."
	@$(PIP) install --requirement requirements-docs.lock
	@touch $@
