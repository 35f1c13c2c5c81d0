# make demo   set everything up, answer one prompt in SSD mode
# make test   set everything up, lint, type-check, run the tests that fit CI
# make test-all   the same with the minutes-long tests
PYTHON ?= python3
VENV ?= .venv
TORCH ?= torch==2.13.0
TORCH_INDEX ?=
PROMPT ?=

BIN := $(VENV)/bin
SOURCES := ssd_pipe procs ipc models bench tests
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
INDEX := $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX))

.PHONY: demo test test-all lint types pull clean

demo: $(VENV)/installed
	$(BIN)/ssd-pipe demo --no-adaptive $(if $(PROMPT),"$(PROMPT)")

test: lint types pull
	$(BIN)/python -m pytest -m "not slow"

test-all: lint types pull
	$(BIN)/python -m pytest

lint: $(VENV)/installed-dev
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/ruff format --check $(SOURCES)

types: $(VENV)/installed-dev
	$(BIN)/mypy

pull: $(VENV)/installed-dev
	$(BIN)/ssd-pipe pull smollm2-135m-instruct

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

# A stamp per set of dependencies; both reinstall when pyproject.toml changes.
$(VENV)/installed: pyproject.toml | $(BIN)/python
	$(PIP) $(INDEX) "$(TORCH)" -e .
	touch $@

$(VENV)/installed-dev: pyproject.toml | $(BIN)/python
	$(PIP) $(INDEX) "$(TORCH)" -e ".[dev]"
	touch $@ $(VENV)/installed

clean:
	rm -rf $(VENV) build dist *.egg-info
