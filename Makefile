# `make demo` and `make test` need Python 3.10 or later, make and a package index; everything else goes into .venv.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: demo test test-fast faults lint types bench clean

demo: $(READY)
	$(BIN)/python examples/demo.py

test: $(READY)
	$(BIN)/python -m pytest

test-fast: $(READY)
	$(BIN)/python -m pytest -m "not slow"

# An hour: everything that `make test` tries a little of. New memory is not empty, so that it can be told from what was read.
faults: $(READY)
	MALLOC_PERTURB_=165 EWC_FT_FAULTS=1 $(BIN)/python -m pytest tests/faults

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(READY)
	$(BIN)/mypy

# The libraries to compare with go into an environment of their own.
bench: $(VENV)-bench/.ready
	OMP_WAIT_POLICY=PASSIVE $(VENV)-bench/bin/python tests/benchmarks/run.py
	OMP_WAIT_POLICY=PASSIVE $(VENV)-bench/bin/python tests/benchmarks/penalty.py
	OMP_WAIT_POLICY=PASSIVE $(VENV)-bench/bin/python tests/benchmarks/kfac.py
	MALLOC_MMAP_THRESHOLD_=1000000000 MALLOC_TRIM_THRESHOLD_=4000000000 $(VENV)-bench/bin/python tests/benchmarks/loop.py
	OMP_WAIT_POLICY=PASSIVE $(VENV)-bench/bin/python tests/benchmarks/rehearsal.py

clean:
	rm -rf $(VENV) $(VENV)-bench demo build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis

$(READY): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -e ".[dev]"
	touch $@

$(VENV)-bench/.ready: pyproject.toml
	$(PYTHON) -m venv $(VENV)-bench
	$(VENV)-bench/bin/python -m pip install --quiet -e ".[bench]"
	touch $@
