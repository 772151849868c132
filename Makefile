# Two commands set everything up on a machine that has Python >= 3.11, make and a package index:
#   make demo    install and run the bundled batch
#   make test    install with the test extra and run the tests
#   make chaos   the same, and break everything that can be broken, for some minutes
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
# Two at a time, a file staying together: many tests wait for processes.
PYTEST := $(BIN)/python -m pytest --numprocesses 2 --dist loadfile $(PYTEST_ARGS)

.PHONY: demo test chaos check fmt lint types clean

demo: $(VENV)/.installed
	$(BIN)/dflash-batch demo

test: $(VENV)/.tested
	$(PYTEST)

# All faults, and a table of what each cost.
chaos: $(VENV)/.tested
	$(PYTEST) -m "fault or chaos"

check: $(VENV)/.tested lint types
	$(PYTEST)

lint: $(VENV)/.tested
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

fmt: $(VENV)/.tested
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# mypy and editors read the rooms through .typetree, under their real names.
types: $(VENV)/.tested
	mkdir -p .typetree/dflash_batch
	ln -sfn ../../worker ../../decoder ../../cli .typetree/dflash_batch/
	$(BIN)/mypy

$(BIN)/python:
	$(PYTHON) -c 'import sys; sys.exit("dflash-batch needs Python 3.11 or newer") if sys.version_info < (3, 11) else None'
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: $(BIN)/python pyproject.toml
	$(BIN)/python -m pip install --quiet --editable .
	touch $@

$(VENV)/.tested: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --editable '.[serve,test]'
	touch $@

clean:
	rm -rf $(VENV) .typetree build *.egg-info .pytest_cache .mypy_cache .ruff_cache
