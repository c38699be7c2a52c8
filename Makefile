# make test and make demo do everything on a machine that has make and Python 3.11 or newer: they create .venv, install
# the versions of constraints.txt into it, and run. The set-up runs once, and again when its inputs change.

.SHELLFLAGS := -eu -c
.DEFAULT_GOAL := help

ARGS ?=
JOBS ?= 3
FOLDER ?= build/npu
VENV := .venv
STAMP := $(VENV)/.installed-by-make
PIP := $(VENV)/bin/python -m pip --disable-pip-version-check --no-input
unexport PYTHONDONTWRITEBYTECODE # the many processes of tests read compiled modules instead of compiling them again
PACKAGES := plans costmodels simulator search interop executor reports twofold
IS_NEW_ENOUGH := import sys; sys.exit(sys.version_info < (3, 11))

.PHONY: help setup demo test check check-npu docs format clean

help: ## this list
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):.*## /  make \1\t/' | expand -t 16
	@echo '  ARGS="..." goes to the command: make demo ARGS="--steps 20", make test ARGS="-k layout -x"'

demo: $(STAMP) ## plan, simulate, run on 8 processes and verify the digits example (about a minute after the set-up)
	$(VENV)/bin/twofold demo $(ARGS)

# loadfile: what the tests of a file share is made once, by one worker. tests/support/scheduling.py says which worker. One worker
# more than 2 cores computes while the ranks of another one's tests wait for each other.
test: check ## lint, formatting, types and all tests (JOBS=3 workers)
	$(VENV)/bin/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder $(ARGS)

check: $(STAMP) ## lint, formatting and types only
	$(VENV)/bin/ruff check
	$(VENV)/bin/ruff format --check
	$(VENV)/bin/mypy --num-workers $(JOBS)

check-npu: $(STAMP) ## every operator of a step on an Ascend NPU, by shapes only (torch-npu is installed in FOLDER)
	PYTHON=$(VENV)/bin/python benchmarks/npu/environment.sh $(FOLDER)
	$(VENV)/bin/python -m benchmarks.npu.plans $(FOLDER)/plans
	LD_LIBRARY_PATH=$(FOLDER)/stub TORCH_DEVICE_BACKEND_AUTOLOAD=0 $(FOLDER)/venv/bin/python -m benchmarks.npu.check \
	  $(FOLDER)/plans --out benchmarks/results/npu_operators.json

docs: $(STAMP) ## the pages of docs/ and the reference as a site in build/docs
	$(PIP) install --quiet --constraint constraints.txt --no-build-isolation --editable '.[docs]'
	NO_MKDOCS_2_WARNING=1 $(VENV)/bin/python -m mkdocs build --quiet
	@echo 'build/docs/index.html is the first page'

format: $(STAMP) ## mend what lint and formatting can mend by themselves
	$(VENV)/bin/ruff check --fix
	$(VENV)/bin/ruff format

setup: $(STAMP) ## only create .venv and install
	@echo '$(VENV) is ready'

# python3 if it is new enough, else python3.12 or python3.11; an environment that is there and works is kept.
# A name may be there and not run (pyenv's shims), and Debian ships a python3 without ensurepip: both are tried here.
$(STAMP): pyproject.toml constraints.txt tests/programs.txt
	@if ! $(VENV)/bin/python -c '$(IS_NEW_ENOUGH)' 2>/dev/null || ! $(VENV)/bin/python -m pip --version >/dev/null 2>&1; then \
	  python=; \
	  for name in $(PYTHON) python3 python3.12 python3.11; do \
	    if "$$name" -c '$(IS_NEW_ENOUGH)' 2>/dev/null; then python=$$name; break; fi; \
	  done; \
	  if [ -z "$$python" ]; then \
	    echo "error: twofold needs Python 3.11 or newer, and none of python3, python3.12, python3.11 is." >&2; \
	    echo "       python3 here: $$(python3 --version 2>&1 || true)" >&2; \
	    echo "       Install Python 3.12, or name yours: make PYTHON=/path/to/python $(or $(MAKECMDGOALS),test)" >&2; \
	    exit 2; \
	  fi; \
	  if ! "$$python" -c 'import ensurepip, venv' 2>/dev/null; then \
	    echo "error: $$python cannot create environments: its modules venv and ensurepip are missing." >&2; \
	    echo "       On Debian and Ubuntu: apt-get install python3-venv" >&2; \
	    exit 2; \
	  fi; \
	  echo "creating $(VENV) with $$("$$python" --version) ($$(command -v "$$python"))"; \
	  "$$python" -m venv --clear $(VENV); \
	fi
	$(PIP) install --constraint constraints.txt setuptools
	$(PIP) install --constraint constraints.txt --no-build-isolation --no-compile --editable \
	  '.[torch,reports,data,weights,dev]' # Python compiles the modules that are imported, a third of them
	$(PIP) install --no-deps --requirement tests/programs.txt
	@touch $@

clean: ## remove .venv, caches and what runs left here
	rm -rf $(VENV) build dist *.egg-info .hypothesis .mypy_cache .pytest_cache .ruff_cache log_output runs
	find $(PACKAGES) tests -name __pycache__ -type d -prune -exec rm -rf {} +
