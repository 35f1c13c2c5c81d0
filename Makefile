# make demo   set everything up, answer one prompt in SSD mode
# make test   set everything up, lint, type-check, run the tests that fit CI
# make test-all   the same with the minutes-long tests
PYTHON ?= python3
VENV ?= .venv
TORCH ?= torch==2.13.0
TORCH_INDEX ?=
PROMPT ?=
# As typed: neither make nor the shell looks into it.
export DEMO_PROMPT := $(value PROMPT)

BIN := $(VENV)/bin
SOURCES := ssd_pipe procs ipc models bench tests
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
WANTED := $(shell printf '%s' '$(TORCH) $(TORCH_INDEX)' | cksum | cut -d' ' -f1)
INSTALLED := $(VENV)/installed-$(WANTED)
INDEX := $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX))

.PHONY: demo test test-all lint types pull clean

demo: $(INSTALLED)
	$(BIN)/ssd-pipe demo --no-adaptive $(if $(value PROMPT),"$$DEMO_PROMPT")

test: lint types pull
	$(BIN)/python -m pytest -m "not slow"

test-all: lint types pull
	$(BIN)/python -m pytest

lint: $(INSTALLED)-dev
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/ruff format --check $(SOURCES)

types: $(INSTALLED)-dev
	$(BIN)/mypy

pull: $(INSTALLED)-dev
	$(BIN)/ssd-pipe pull smollm2-135m-instruct

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

# A stamp per set of dependencies and torch; both reinstall when pyproject.toml changes.
$(INSTALLED): pyproject.toml | $(BIN)/python
	$(PIP) $(INDEX) "$(TORCH)"
	$(PIP) "$(TORCH)" -e .
	touch $@

$(INSTALLED)-dev: pyproject.toml | $(BIN)/python
	$(PIP) $(INDEX) "$(TORCH)"
	$(PIP) "$(TORCH)" -e ".[dev]"
	touch $@ $(INSTALLED)

clean:
	rm -rf $(VENV) build dist *.egg-info
