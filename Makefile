# From nothing but Python 3.10+ and make: `make train` trains the example, `make test` runs the tests.
# The environment in .venv is made on first use, and again only when what it is made from has changed.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

SOURCES := lightning_gacp tests examples benchmarks setup.py
RUFF_RULES := --select E,F,W,I,UP,B,SIM,RUF,D1 --ignore D105,D107 --line-length 120 --target-version py310

.DEFAULT_GOAL := help
.PHONY: help train test test-fast lint format types check benchmarks gpu clean

help:  ## say what can be made
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*##/:/' | awk -F': ' '{printf "make %-12s %s\n", $$1, $$2}'

$(READY): setup.cfg setup.py constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' \
		|| { echo "$(PYTHON) is older than Python 3.10: run \`make PYTHON=python3.12\` or the like" >&2; exit 1; }
	$(PYTHON) -m venv --clear $(VENV)
	$(BIN)/python -m pip install -qq --use-pep517 -c constraints.txt -e '.[cli,plots,examples,test]'
	@touch $@

# One thread, because the example's products are too small to be worth a second.
train: $(READY)  ## train the example language model: accumulation, checkpointing, offload, held-out perplexity
	OMP_NUM_THREADS=1 $(BIN)/python examples/train_lm.py fit -c examples/configs/base.yaml \
		-c examples/configs/accumulate.yaml -c examples/configs/offload.yaml -c examples/configs/monitor.yaml

test: $(READY)  ## run all tests
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests

test-fast: $(READY)  ## run the tests that take no more than seconds
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests -m "not slow"

lint: $(READY)  ## check style and formatting
	$(BIN)/ruff check $(RUFF_RULES) --per-file-ignores 'tests/**:D1' $(SOURCES)
	$(BIN)/ruff format --check --line-length 120 --target-version py310 $(SOURCES)

format: $(READY)  ## rewrite the files in the project's style
	$(BIN)/ruff check --fix $(RUFF_RULES) --per-file-ignores 'tests/**:D1' $(SOURCES)
	$(BIN)/ruff format --line-length 120 --target-version py310 $(SOURCES)

types: $(READY)  ## check the types of the package
	$(BIN)/mypy

check: lint types test  ## everything that CI checks

benchmarks: $(READY)  ## print the figures that the README and the docs quote
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/accumulation_error.py
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/saved_bytes.py
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/oom_note.py
	$(BIN)/python benchmarks/checkpointing.py

gpu: $(READY)  ## run the tests and the benchmark that need a GPU, in under 8 minutes
	-$(BIN)/python -m pip install -qq --no-deps torchtune trl psutil
	timeout 120 $(BIN)/python -m pytest tests -m cuda -q; tested=$$?; \
		$(BIN)/python benchmarks/offload.py --seconds 280 && exit $$tested

clean:  ## remove the environment and what tools left behind
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
