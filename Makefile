# The project's commands; `make help` lists them. Each sets up what it needs, so any of them may be the first.

.DEFAULT_GOAL := help
.PHONY: help setup models sft distill test test-unit lint format bench bench-loss-head bench-gate lock clean distclean
SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c

BIN := .venv/bin
RUN :=
PYTEST_ARGS :=
BENCH_ARGS :=

# Packages and modules from elsewhere must not shadow those in .venv.
unexport PYTHONPATH PYTHONHOME

help: ## show this list
	@echo "Usage: make TARGET"
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  %-16s %s\n", $$1, $$2 }' Makefile

setup: ## create .venv with the pinned packages; returns at once when it is up to date
	@scripts/setup_env.sh

sft: setup ## fine-tune a pretrained chat model on 2 local ranks and compare it before/after (RUN=FOLDER)
	@scripts/quick_start.sh $(if $(RUN),"$(RUN)")

distill: setup ## let a pretrained chat model teach a smaller one on 2 local ranks (RUN=FOLDER)
	@scripts/quick_distill.sh $(if $(RUN),"$(RUN)")

models: setup ## fetch the pretrained model that examples and tests use
	@$(BIN)/python scripts/fetch_smollm2.py --folder models

test: setup ## run all tests (PYTEST_ARGS="-k name" for some of them)
	@$(MAKE) --no-print-directory models || echo "going on without it: the tests that need it are skipped"
	@$(BIN)/python -m pytest $(PYTEST_ARGS)

test-unit: setup ## run the tests that start no other process, under a minute
	@$(BIN)/python -m pytest tests/unit $(PYTEST_ARGS)

lint: setup ## check Python and shell style; changes nothing
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@if command -v shellcheck >/dev/null; then find .ci/run scripts -type f \( -name '*.sh' -o -name '*.sbatch' -o -path .ci/run \) \
	    -print0 | xargs -0 shellcheck; else echo "lint: shellcheck is not installed; shell scripts not checked"; fi

format: setup ## rewrite the Python files as `make lint` wants them
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

bench: setup ## time one training step against transformers with torch's AdamW
	@$(BIN)/python scripts/bench_step.py

bench-loss-head: setup ## time the loss head against bare matrix products and other ways (BENCH_ARGS="--quick")
	@$(BIN)/python scripts/bench_loss_head.py --tp $(BENCH_ARGS)
	@$(BIN)/python scripts/bench_distillation.py

bench-gate: setup ## time a training step with per-token outputs off, on, and collected as lists (BENCH_ARGS="--rounds 9")
	@$(BIN)/python scripts/bench_gate.py $(BENCH_ARGS)

lock: ## write requirements.lock anew, from the newest versions pyproject.toml allows
	@VENV=.venv-lock scripts/setup_env.sh --lock

clean: ## remove caches and build leftovers; keeps .venv, models/ and runs/
	@rm -rf build dist .pytest_cache .ruff_cache .hypothesis .venv-lock ./*.egg-info
	@find megatron_ext tests scripts -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true

distclean: clean ## remove .venv and downloaded models too; keeps runs/
	@rm -rf .venv models
