# `make demo` and `make test` set up everything they need in .venv, on a machine with Python >= 3.11, git and a C compiler.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: setup demo test lint clean

setup: $(VENV)/.ready

$(VENV)/.ready: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -e ".[test]"
	touch $@

demo: setup
	$(BIN)/mlc-amd chat --prompt "What does os.path.join do?"

test: setup lint
	$(BIN)/python -m pytest -q

lint: setup
	$(BIN)/ruff check .

clean:
	rm -rf $(VENV) *.egg-info .pytest_cache .ruff_cache
