# make demo   export the trained smart-meter model, compile it, forecast two weeks in C
# make test   style, types and all fast tests
PYTHON ?= python3
VENV := .venv
NEWEST := .venv-newest-torch
BIN := $(VENV)/bin
ENGINE := $(wildcard engine/src/*/*.[ch] engine/src/*.h engine/include/*.h)
BINDING := src/colibri/_engine_build.py src/colibri/_engine_call.c src/colibri/_scale_costs.c
C_FILES := $(shell find engine src tests benchmarks examples -name build -prune -o -name _engine.c -prune -o -name '*.[ch]' -print)
TIDY_FILES := $(wildcard engine/src/*/*.c engine/lm/*.c engine/host/*.c)
TIDY_FLAGS := -std=gnu11 -D_GNU_SOURCE -Iengine/include -Iengine/src -DCLB_X86 -mavx2 -mf16c -mavx512f -mavx512bw \
              -mavx512dq -mavx512vl -mavx512vnni
INSTALL := $(BIN)/pip install -q --disable-pip-version-check

help:
	@echo "make demo      the smart-meter example, from checkpoint to forecast in C (no PyTorch)"
	@echo "make test      style, types and all fast tests (installs PyTorch)"
	@echo "make test-all  and the exhaustive sweeps"
	@echo "make test-newest-torch  saved programs with the newest PyTorch (a second environment, 5 GB)"
	@echo "make train     train the smart-meter model again"
	@echo "make size      code lines, bytes, stack"
	@echo "make bench     Colibri beside its peers, about ten minutes; make bench-all for everything"
	@echo "make engine    libcolibri.a and libcolibri.so in engine/build"

demo: $(VENV)/.demo
	$(BIN)/python examples/smart_meter/demo.py

test: lint
	$(BIN)/python -m pytest -n 2 --dist worksteal

# The tests pin the oldest PyTorch that is supported. The binding is the same for every Python (abi3).
test-newest-torch: $(NEWEST)/.done $(VENV)/.test
	PYTHONPATH=src $(NEWEST)/bin/python -m pytest -p no:cacheprovider tests/frontends/torch/test_saved_programs.py

test-all: lint
	$(BIN)/python -m pytest -n 2 --dist worksteal -m "slow or not slow"

lint: $(VENV)/.test
	$(BIN)/clang-format --dry-run -Werror $(C_FILES)
	$(BIN)/clang-tidy --quiet $(TIDY_FILES) -- $(TIDY_FLAGS) 2>/dev/null
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python tools/generate.py

train: $(VENV)/.test
	$(BIN)/python examples/smart_meter/train.py

size: $(VENV)/.demo
	$(BIN)/python tools/size.py $(wildcard build/*/model.bin)

bench:
	$(PYTHON) -m benchmarks.layers --quick

bench-all:
	$(PYTHON) -m benchmarks.layers --publish

engine:
	$(MAKE) -C engine

generate: $(VENV)/.test
	$(BIN)/python tools/generate.py --write

$(VENV)/.demo: pyproject.toml setup.py $(BINDING) $(ENGINE) | $(VENV)
	$(INSTALL) -e '.[report]'
	@touch $@

$(VENV)/.test: pyproject.toml setup.py $(BINDING) $(ENGINE) | $(VENV)
	$(INSTALL) -e '.[test]'
	@touch $@ $(VENV)/.demo

$(NEWEST)/.done: pyproject.toml
	$(PYTHON) -m venv $(NEWEST)
	$(NEWEST)/bin/pip install -q --disable-pip-version-check --no-compile --upgrade torch numpy safetensors cffi typer rich pytest setuptools
	@touch $@

$(VENV):
	$(PYTHON) -m venv $@

clean:
	rm -rf $(VENV) $(NEWEST) build engine/build src/colibri/_engine.c src/colibri/*.so *.egg-info src/*.egg-info

.PHONY: help demo test test-all test-newest-torch lint train size bench bench-all engine generate clean
