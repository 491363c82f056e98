# `make help` lists the targets. Everything lives in $(VENV); stamps in it say what is already there.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV   ?= .venv
SUITE  ?= estimate
GPU    ?= rtx4090

bin := $(VENV)/bin
py  := $(bin)/python
pip := $(py) -m pip --disable-pip-version-check install -q -c constraints.txt

native_sources := $(shell find native -type f 2>/dev/null)
checked := src bench examples tests docs/conf.py
gpu_site := build/gpu-site
# What opens the report's page in its tests; root alone can install it.
install_chromium := test "$$(id -u)" = 0 && apt-get update && \
  apt-get install -y --no-install-recommends chromium fonts-dejavu-core

.DEFAULT_GOAL := help
.PHONY: help demo test stress lint format wheel docs figures bench bench-check compat outputs schemas newest gpu \
  clean

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' Makefile | expand -t 14

demo: $(VENV)/.built ## set up what is missing, then estimate examples/gpt2/train.py
	@$(bin)/memplan estimate --gpu $(GPU) examples/gpt2/train.py

# Files in the order of their names, which ends with many short ones: xdist would begin with those of
# the most tests, and end on the few that take minutes, the other processes with nothing to do.
test: $(VENV)/.dev ## set up what is missing, then run every test (ARGS="-k name" narrows)
	$(py) -m pytest --numprocesses auto --maxprocesses 4 --dist loadfile --no-loadscope-reorder $(ARGS)

stress: $(VENV)/.dev ## build the native stress programs with sanitizers, and run them
	$(py) -m pytest -m stress tests/order tests/runtime/planned $(ARGS)

lint: $(VENV)/.dev ## ruff, mypy --strict, import-linter
	$(bin)/ruff check $(checked)
	$(bin)/ruff format --check $(checked)
	$(bin)/mypy --strict
	$(bin)/lint-imports

format: $(VENV)/.dev ## let ruff format and mend
	$(bin)/ruff check --fix $(checked)
	$(bin)/ruff format $(checked)

wheel: $(VENV)/.built ## build the wheel into dist/, and try it in an environment of its own
	$(py) -m bench.wheel

docs: $(VENV)/.docs ## the documentation as a site, in build/docs; any warning is an error
	$(bin)/sphinx-build -q -W --keep-going -j 2 docs build/docs

figures: $(VENV)/.dev ## draw docs/figures anew (needs Chromium)
	$(py) -m bench.figures

bench: $(VENV)/.dev ## measure, and write bench/results/*.json
	$(py) -m bench

bench-check: $(VENV)/.dev ## name each goal that the committed results miss
	$(py) -m bench.check

compat: $(VENV)/.built ## install other releases of torch (several GB), check each, write docs/support.md
	$(py) -m bench.compat $(ARGS)

outputs: $(VENV)/.built ## what commands print, pasted anew into README.md and docs/
	$(py) -m bench.pasted

schemas: $(VENV)/.built ## JSON Schemas of answers, written anew into docs/schemas/
	$(py) -m bench.schemas

newest: $(VENV)/.dev ## the examples and small jobs on the newest torch, kept in ~/.cache/memplan
	$(py) -m bench.newest

# The CUDA build of torch is the machine's own, so this target makes no venv and fetches nothing:
# it builds from the tree into $(gpu_site), with the wheels in .whl/ beside it where there are any.
gpu: ## on a machine with an NVIDIA GPU and a CUDA build of torch: measure beside our estimate
	@test -f bench/gpu_$(SUITE).py || { echo "no suite bench/gpu_$(SUITE).py; try SUITE=estimate" >&2; exit 2; }
	@rm -rf $(gpu_site)
	$(if $(wildcard .whl/*.whl),$(PYTHON) -m pip install -q --no-index --no-deps --no-compile --target $(gpu_site) $(wildcard .whl/*.whl))
	PYTHONPATH=$(CURDIR)/$(gpu_site):$$PYTHONPATH $(PYTHON) -m pip install -q --no-index --no-deps \
	  --no-build-isolation --no-compile --upgrade --target $(gpu_site) .
	PYTHONPATH=$(CURDIR)/$(gpu_site):$$PYTHONPATH $(PYTHON) -m bench.gpu_$(SUITE)

clean: ## remove the venv, builds and caches
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/.made:
	@test -n "$(PYTHON)" || { echo "no python3 found: install Python 3.11, 3.12 or 3.13, or say PYTHON=/path/to/python" >&2; exit 2; }
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' || \
	  { echo "$(PYTHON) is not Python 3.11 - 3.13: say PYTHON=/path/to/one that is" >&2; exit 2; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || \
	  { echo "$(PYTHON) cannot make virtual environments: apt-get install python3-venv" >&2; exit 2; }
	@command -v $${CXX:-g++} >/dev/null || { echo "no C++ compiler: apt-get install g++" >&2; exit 2; }
	$(PYTHON) -m venv $(VENV)
	$(pip) pip
	@touch $@

# Editable: a change of a Python file needs no new build, a change of the native sources does.
$(VENV)/.built: $(VENV)/.made constraints.txt pyproject.toml $(native_sources)
	@echo "installing torch and what else is needed: a few minutes on the first run"
	$(pip) --group build
	$(pip) --no-build-isolation -e .
	@touch $@

$(VENV)/.dev: $(VENV)/.built
	$(pip) --group dev
	$(pip) --no-deps --upgrade --target $(VENV)/transformer-engine --group transformer-engine
	$(pip) --no-deps --upgrade --target $(VENV)/trl --group trl
	@command -v chromium google-chrome >/dev/null || { $(install_chromium); } >/dev/null 2>&1 || \
	  echo "no Chromium: the tests of the report's page will be skipped (apt-get install chromium)"
	@touch $@

$(VENV)/.docs: $(VENV)/.built
	$(pip) --group docs
	@touch $@
