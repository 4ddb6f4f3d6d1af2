# make demo   export the trained smart-meter model, compile it, forecast two weeks in C
# make test   everything that must hold
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
ENGINE := $(wildcard engine/src/*.c engine/src/*.h engine/include/*.h)
BINDING := src/colibri/_engine_build.py src/colibri/_engine_call.c src/colibri/_scale_costs.c
INSTALL := $(BIN)/pip install -q --disable-pip-version-check

help:
	@echo "make demo      the smart-meter example, from checkpoint to forecast in C (no PyTorch)"
	@echo "make test      style, types and all fast tests (installs PyTorch)"
	@echo "make test-all  and the exhaustive sweeps"
	@echo "make train     train the smart-meter model again"
	@echo "make size      code lines, bytes, stack"
	@echo "make bench     Colibri beside its peers, about ten minutes; make bench-all for everything"
	@echo "make engine    libcolibri.a and libcolibri.so in engine/build"

demo: $(VENV)/.demo
	$(BIN)/python examples/smart_meter/demo.py

test: lint
	$(BIN)/python -m pytest -n 2 --dist worksteal

test-all: lint
	$(BIN)/python -m pytest -n 2 --dist worksteal -m "slow or not slow"

lint: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python tools/generate.py

train: $(VENV)/.test
	$(BIN)/python examples/smart_meter/train.py

size: $(VENV)/.demo
	$(BIN)/python tools/size.py $(wildcard build/*/model.bin)

bench:
	$(PYTHON) benchmarks/run.py --quick

bench-all:
	$(PYTHON) benchmarks/run.py --publish

engine:
	$(MAKE) -C engine

generate: $(VENV)/.demo
	$(BIN)/python tools/generate.py --write

$(VENV)/.demo: pyproject.toml setup.py $(BINDING) $(ENGINE) | $(VENV)
	$(INSTALL) -e '.[report]'
	@touch $@

$(VENV)/.test: pyproject.toml setup.py $(BINDING) $(ENGINE) | $(VENV)
	$(INSTALL) -e '.[test]'
	@touch $@ $(VENV)/.demo

$(VENV):
	$(PYTHON) -m venv $@

clean:
	rm -rf $(VENV) build engine/build src/colibri/_engine.c src/colibri/*.so *.egg-info src/*.egg-info

.PHONY: help demo test test-all lint train size bench bench-all engine generate clean
