# Each target does its own set-up, on a fresh machine too (Debian or macOS with Python >= 3.11).
#   make serve ARGS="--port 9000"      make test ARGS="-m 'not model'"
# PYTHON=/path/to/python chooses the Python of .venv.

VENV := .venv
BIN := $(VENV)/bin
# Made anew when what is to be installed changes.
STAMP := $(VENV)/.headrace-setup
ARGS ?=

.DEFAULT_GOAL := help
.PHONY: help setup serve test lint format bench clean

help:
	@echo "make serve    run the gateway             (ARGS=... goes to 'headrace serve')"
	@echo "make test     lint, types and all tests   (ARGS=... goes to pytest)"
	@echo "make lint     lint and types only"
	@echo "make format   format the code"
	@echo "make bench    measure a gateway           (ARGS=... goes to 'headrace bench')"
	@echo "make setup    only set up $(VENV)"
	@echo "make clean    remove $(VENV) and all caches of tools; fetched models stay"

setup: $(STAMP)

$(STAMP): pyproject.toml scripts/setup-venv.sh scripts/setup-blas.sh
	@bash scripts/setup-venv.sh $(VENV)
	@bash scripts/setup-blas.sh $(BIN)/python
	@touch $@

serve: $(STAMP)
	@exec $(BIN)/headrace serve $(ARGS)

lint: $(STAMP)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

test: lint
	@bash scripts/setup-chromium.sh
	$(BIN)/pytest $(ARGS)

format: $(STAMP)
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

bench: $(STAMP)
	@exec $(BIN)/headrace bench $(ARGS)

clean:
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache .hypothesis build *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
