# Two commands on a fresh machine: `make train` and `make test`. Both do all the set-up themselves.
#
#   make train [CONFIG=quickstart] [BACKEND=jax] [MINUTES=3] [ARGS="model.num_layers=8"]
#   make test  [ARGS="-k replay"]          lint, types, import contract, all tests
#   make quick                             the tests that take seconds
#   make bench                             benchmarks against peers (see benchmarks/README.md)
#   make docs                              build the documentation site into site/

PYTHON ?= python3
VENV   ?= .venv
CONFIG ?= quickstart
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip --disable-pip-version-check --quiet
STAMP  := $(VENV)/.vorox-train
STAMP_DEV := $(VENV)/.vorox-dev
STAMP_JAX := $(VENV)/.vorox-jax

.PHONY: setup train test quick lint types docs bench clean

setup: $(STAMP)

# torch goes first and pinned: anything looser may bring another build of it.
$(STAMP): pyproject.toml constraints.txt
	@command -v $(PYTHON) >/dev/null || { echo "Vorox needs Python 3.11 or newer as '$(PYTHON)'; set PYTHON=..."; exit 2; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "Vorox needs Python 3.11 or newer; '$(PYTHON)' is $$($(PYTHON) -V). Set PYTHON=..."; exit 2; }
	@echo "Installing Vorox into $(VENV) (once, about a minute) ..."
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(PIP) install "$$(grep '^torch==' constraints.txt)" -c constraints.txt
	@$(PIP) install -e . -c constraints.txt
	@touch $@

$(STAMP_DEV): $(STAMP)
	@echo "Installing what the tests need into $(VENV) (once) ..."
	@$(PIP) install -e '.[hf,s3,gcs,http,postgres,ray,dedup,tiktoken,tensorboard,jax,wandb,dev]' -c constraints.txt
	@touch $@

$(STAMP_JAX): $(STAMP)
	@echo "Installing JAX into $(VENV) (once) ..."
	@$(PIP) install -e '.[jax]' -c constraints.txt
	@touch $@

train: $(STAMP) $(if $(filter jax,$(BACKEND)),$(STAMP_JAX))
	@$(BIN)/vorox train $(CONFIG) $(if $(MINUTES),--minutes $(MINUTES)) $(if $(BACKEND),backend=$(BACKEND)) $(ARGS)

test: $(STAMP_DEV) lint types
	@OMP_WAIT_POLICY=passive $(BIN)/python -m pytest -n 2 --dist loadfile $(ARGS)

quick: $(STAMP_DEV)
	@OMP_WAIT_POLICY=passive $(BIN)/python -m pytest -m "not slow" -n 2 --dist loadfile $(ARGS)

lint: $(STAMP_DEV)
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .

types: $(STAMP_DEV)
	@$(BIN)/pyright

docs: $(STAMP_DEV)
	@$(BIN)/mkdocs build --strict

bench:
	@test -x .venv-bench/bin/python || benchmarks/setup.sh
	@for script in train_throughput loop_overhead loader startup; do .venv-bench/bin/python benchmarks/$$script.py || exit 1; done

clean:
	rm -rf $(VENV) build site .pytest_cache .ruff_cache
