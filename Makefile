# `make demo` and `make test` do all the set-up they need in a virtual environment of their own.
#
#   make test       lint, types and the quick tests: minutes       make test-long   the long tests alone
#   make test-all   lint, types and every test: what CI runs       (tests/README.md says which tests are long)
#   make docs       the documents as one site, in build/site
#
#   make bench      speed of this machine's GPU beside other libraries: under 8 minutes; says what is missing
#
#   VENV   where the environment lives            JOBS      test workers
#   PYTHON the interpreter it is made with        PIP_ARGS  extra arguments of pip install (an index of your own, ...)
#   TORCH  the torch requirement to install       ARGS      extra arguments of the command (pytest, demo)

VENV   ?= .venv
PYTHON ?= python3
JOBS   ?= $(shell n=$$(env -u OMP_NUM_THREADS nproc 2>/dev/null || echo 2); echo $$((n < 8 ? n : 8)))

# Without CUDA in sight the CPU build of torch is enough: a plain `torch` brings gigabytes of CUDA libraries.
CUDA  := $(shell { command -v nvidia-smi || ldconfig -p | grep -m1 'libcuda\.so\.1'; } 2>/dev/null)
TORCH ?= $(if $(CUDA),torch,torch==2.13.0)

BIN   := $(VENV)/bin
READY := $(VENV)/.ready
TOOLS := $(VENV)/.tools

PYTEST := OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(BIN)/python -m pytest -n $(JOBS) --dist worksteal

.PHONY: demo bench test test-long test-all lint format clean

demo: $(READY)
	$(BIN)/python -m cute_attn demo $(ARGS)

bench: $(TOOLS)
	$(BIN)/python -m cute_attn bench $(ARGS)

test: lint
	$(PYTEST) -m 'not long and not corpus and not engines' $(ARGS)

test-long: $(TOOLS)
	$(PYTEST) -m 'long and not corpus and not engines' $(ARGS)

test-all: lint
	$(PYTEST) $(ARGS)

# The site in build/site. Warnings, such as broken links, are errors.
.PHONY: docs
docs: $(READY)
	$(BIN)/python -m pip install --quiet $(PIP_ARGS) --editable '.[docs]' ruff  # ruff lays out signatures
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

lint: $(TOOLS)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(TOOLS)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) build .pytest_cache .mypy_cache .ruff_cache .hypothesis *.egg-info

# torch first, in a command of its own: the project's requirement is then met and pip leaves the chosen build alone.
$(READY): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet $(PIP_ARGS) '$(TORCH)'
	$(BIN)/python -m pip install --quiet $(PIP_ARGS) --editable '.[cu13]'
	touch $@

# What tests and checks need beyond it.
$(TOOLS): $(READY)
	$(BIN)/python -m pip install --quiet $(PIP_ARGS) --editable '.[test,cu13]'
	touch $@
