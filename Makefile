# Two commands on a fresh machine: `make train` and `make test`. Both do all the set-up themselves.
#
#   make train [CONFIG=quickstart] [BACKEND=jax] [MINUTES=3] [ARGS="model.num_layers=8"]
#   make demo  [ARGS=FOLDER]               what a run can prove, in some minutes: kill, resume, replay, fork, explain, unlearn, audit
#   make dash  [ARGS="--port 0"]           show the runs in the browser
#   make test  [ARGS="-k replay"]          lint, types, import contract, all tests but the slow ones
#   make matrix [PART=k/n] [DRAW=minutes]  the slow tests: kills, compilations, several processes, every page of the docs;
#                                          all of them, a part, or as many as the tree's hash draws for some minutes
#   make costs                             the tests, and tests/costs.json for their order (on a machine that does nothing else)
#   make test-frameworks                   the tests where only PyTorch, only JAX, or neither is installed
#   make mutate [ARGS="vorox.data.permutation*"] change the code that order, caches and replay rest on, one expression at a time
#   make structure                         modules, packages with their lines, rooms by floor, and five call paths
#   make bench                             benchmarks against peers (see benchmarks/README.md)
#   make docs                              build the documentation site into site/

PYTHON  ?= python3
VENV    ?= .venv
CONFIG  ?= quickstart
BACKEND ?=
BIN     := $(VENV)/bin
PIP     := $(BIN)/python -m pip --disable-pip-version-check --quiet
# One worker for every core and two for tests that wait (tests/scheduling.py). Workers and child processes load the
# bytecode that the first one writes, wherever the shell asks for none to be written.
PYTEST  := PYTHONDONTWRITEBYTECODE= OMP_WAIT_POLICY=passive $(BIN)/python -m pytest -n auto --no-loadscope-reorder

# What an environment has, one stamp each: Vorox alone, and on top of it one framework, or all that developing needs.
STAMP       := $(VENV)/.vorox
STAMP_TORCH := $(VENV)/.vorox-torch
STAMP_JAX   := $(VENV)/.vorox-jax
STAMP_HF    := $(VENV)/.vorox-hf
STAMP_DEV   := $(VENV)/.vorox-dev
# A backend that nobody knows is refused by Vorox itself, with the ones that there are.
STAMP_TRAIN := $(STAMP)$(addprefix -,$(filter torch jax,$(or $(BACKEND),torch)))

.PHONY: setup train demo dash test matrix programs costs test-frameworks only-core only-torch only-jax mutate lint types docs structure bench clean

setup: $(STAMP_TRAIN)

$(STAMP): pyproject.toml constraints.txt
	@command -v $(PYTHON) >/dev/null || { echo "Vorox needs Python 3.11 or newer as '$(PYTHON)'; set PYTHON=..."; exit 2; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "Vorox needs Python 3.11 or newer; '$(PYTHON)' is $$($(PYTHON) -V). Set PYTHON=..."; exit 2; }
	@echo "Installing Vorox into $(VENV) (once, about half a minute) ..."
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(PIP) install -e '.[dash]' -c constraints.txt
	@touch $@

# torch is pinned and goes alone: anything looser may bring another build of it.
$(STAMP_TORCH): $(STAMP)
	@echo "Installing PyTorch into $(VENV) (once) ..."
	@$(PIP) install "$$(grep '^torch==' constraints.txt)" -c constraints.txt
	@touch $@

$(STAMP_JAX): $(STAMP)
	@echo "Installing JAX into $(VENV) (once) ..."
	@$(PIP) install -e '.[jax]' -c constraints.txt
	@touch $@

$(STAMP_HF): $(STAMP_TORCH)
	@test -e $(STAMP_DEV) || { echo "Installing transformers into $(VENV) (once) ..."; $(PIP) install -e '.[hf]' -c constraints.txt; }
	@touch $@

$(STAMP_DEV): $(STAMP_TORCH)
	@echo "Installing what the tests need into $(VENV) (once) ..."
	@$(PIP) install -e '.[hf,adapters,compress,gguf,eval,dash,plot,s3,gcs,azure,http,postgres,ray,sign,passport,vision,dedup,tiktoken,tensorboard,jax,wandb,mlflow,trackio,tune,dev]' -c constraints.txt
	@touch $@

train: $(STAMP_TRAIN)
	@$(BIN)/vorox train $(CONFIG) $(if $(MINUTES),--minutes $(MINUTES)) $(if $(BACKEND),backend=$(BACKEND)) $(ARGS)

demo: $(STAMP_HF)
	@$(BIN)/python examples/demo.py $(ARGS)

dash: $(STAMP)
	@$(BIN)/vorox dash $(ARGS)

# What tests use beside Python packages. Azurite comes from npm; Debian's packages are named, `.ci/run` installs them.
AZURITE := .azurite/node_modules/.bin/azurite-blob
PROGRAMS := git:git node:nodejs npm:npm xz:xz-utils chromium:chromium chromium:fonts-dejavu-core ip:iproute2 openssl:openssl

$(AZURITE):
	@if command -v npm >/dev/null && command -v node >/dev/null; then \
		echo "Installing Azurite into .azurite (once) ..."; \
		npm install --silent --no-audit --no-fund --prefix .azurite azurite@3.35.0 || echo "Azurite was not installed"; fi

programs: $(AZURITE)
	@missing=$$(for pair in $(PROGRAMS); do command -v $${pair%%:*} >/dev/null || echo $${pair#*:}; done); \
		[ -z "$$missing" ] || echo "Tests are skipped for want of these Debian packages: apt-get install" $$missing

# Types are checked beside the tests, and what they say comes last.
test: $(STAMP_DEV) lint programs
	@types=$$(mktemp); trap 'rm -f $$types' EXIT; $(BIN)/pyright >$$types 2>&1 & checking=$$!; \
		$(PYTEST) -m "not slow" $(ARGS); code=$$?; wait $$checking || code=1; cat $$types; exit $$code

costs: $(STAMP_DEV)
	@$(PYTEST) --record-costs $(ARGS)

matrix: $(STAMP_DEV) programs
	@$(PYTEST) -m slow $(if $(PART),--part $(PART)) $(if $(DRAW),--draw-minutes $(DRAW)) $(ARGS)

# Environments of their own, with the dependencies of Vorox, of its extra torch or of its extra jax, and pytest. Everything
# that is quick runs without a framework; with one of them, what may meet it: not core and data, which may import none.
test-frameworks: only-core only-torch only-jax

BELOW_FRAMEWORKS := core data faults integration servers
only-core: SELECTED := tests
only-core: STAMP_ONLY := .vorox
only-torch only-jax: SELECTED := tests $(addprefix --ignore=tests/,$(BELOW_FRAMEWORKS))
only-torch: STAMP_ONLY := .vorox-torch
only-jax: STAMP_ONLY := .vorox-jax

only-core only-torch only-jax:
	@$(MAKE) --no-print-directory VENV=.venv-$@ .venv-$@/$(STAMP_ONLY)
	@.venv-$@/bin/python -m pip --disable-pip-version-check --quiet install -e '.[test]' -c constraints.txt
	@echo "$@: quick tests in .venv-$@"
	@OMP_WAIT_POLICY=passive .venv-$@/bin/python -m pytest -n auto --no-loadscope-reorder -m "not slow" $(SELECTED) $(ARGS)

# Names of mutants, or patterns, in ARGS; all of them take hours. Survivors are listed at the end.
mutate: $(STAMP_DEV)
	@$(PIP) install -e '.[mutate]' -c constraints.txt
	@$(BIN)/mutmut run $(ARGS)
	@$(BIN)/mutmut results | grep -E 'survived|timeout' || true

lint: $(STAMP_DEV)
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .

types: $(STAMP_DEV)
	@$(BIN)/pyright

docs: $(STAMP_DEV)
	@$(BIN)/mkdocs build --strict

structure: $(STAMP_DEV)
	@$(BIN)/python tests/structure.py $(ARGS)

bench:
	@test -x .venv-bench/bin/python || benchmarks/setup.sh
	@for script in train_programs loop_overhead loader startup; do .venv-bench/bin/python benchmarks/$$script.py || exit 1; done

clean:
	rm -rf $(VENV) .venv-only-* build site .pytest_cache .ruff_cache
