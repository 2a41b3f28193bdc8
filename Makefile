# Every target sets up what it needs. `make setup` makes .venv and installs everything into it.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: help setup demo demo-vlm demo-diloco test test-all lint format bench bench-peers experiments clean

help:  ## what there is
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):[^#]*## /  make \1\t/' | expand -t 20

setup: $(STAMP)  ## make .venv and install Zephon with everything that demo and tests need

$(STAMP): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Zephon needs Python 3.11 or later; set PYTHON=...")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install -e '.[dev]'
	@touch $(STAMP)

demo: $(STAMP)  ## train, kill, resume on 1 and on 4 ranks; compare every batch (5 to 7 minutes on 2 cores)
	$(BIN)/python -m recipes.demo

demo-vlm: $(STAMP)  ## the same with images and text in one stream, on Qwen 3.5's micro model (about 5 minutes)
	$(BIN)/python -m recipes.demo.vlm

demo-diloco: $(STAMP)  ## 4 decoupled learners, two killed, one slowed, beside data-parallel under the same faults (about 10 minutes; ARGS='--seconds 180')
	$(BIN)/python -m recipes.diloco.demo $(ARGS)

test: $(STAMP)  ## the tests, without the slow ones (11 to 18 minutes on 2 cores)
	$(BIN)/python -m pytest -n auto --dist worksteal -m 'not slow'

test-all: $(STAMP)  ## all tests; a skipped one fails, unless a GPU is missing
	$(BIN)/python -m pytest -n auto --dist worksteal --fail-on-skip -m 'not alone'
	$(BIN)/python -m pytest --fail-on-skip -m alone

lint: $(STAMP)  ## ruff and pyright
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

format: $(STAMP)  ## let ruff format and mend what it can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(STAMP)  ## lanes, first batch, state, memory, resume; flame graph; pictures in benchmarks/results (20 minutes)
	$(BIN)/python -m pip install --quiet -e '.[bench]'
	$(BIN)/python -m benchmarks $(ARGS)

bench-peers: $(STAMP)  ## data loaders side by side; ARGS='--text DIR --tokenizer DIR --images DIR' (about an hour)
	$(BIN)/python -m benchmarks.peers $(ARGS)

experiments: $(STAMP)  ## the published experiments repeated on CPUs, restartable; ARGS=--quick is the small form (under 2 hours)
	$(BIN)/python -m benchmarks.experiments $(ARGS)

clean:  ## remove what demo and tools left; keeps .venv
	rm -rf demo demo-vlm demo-diloco demo-chaos build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
