# `make demo` and `make test` set up everything they need in .venv, on Linux with Python >= 3.11, git and a C compiler.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

# A Vulkan driver that runs on any CPU, a SPIR-V checker, validation layers; tests that need them skip where they cannot be had.
DEBIAN := mesa-vulkan-drivers libvulkan1 spirv-tools vulkan-validationlayers
# What the emulator of AMD's instruction sets (tests/dev/gfxemu.py) compiles with, where it is.
DEBIAN += $(if $(wildcard ../shared/tools/gfxemu),clang-19)

.PHONY: setup drivers demo test suite test-fast test-all lint clean

setup: $(VENV)/.ready

$(VENV)/.ready: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	@# --no-compile: most of the bytecode would never be used, and takes as long to make as the rest of the installation
	$(BIN)/pip install --quiet --disable-pip-version-check --no-compile -e ".[test]"
	touch $@

drivers:
	@if command -v apt-get >/dev/null && [ "$$(id -u)" = 0 ] && ! dpkg -s $(DEBIAN) >/dev/null 2>&1; then \
		apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends $(DEBIAN) >/dev/null \
		|| echo "cannot install $(DEBIAN): tests that need them will be skipped" >&2; fi

demo: setup
	$(BIN)/mlc-amd chat --prompt "What does os.path.join do?"

# Two at a time, of which one waits for downloads; and pyright has work for one core.
test:
	@$(MAKE) --no-print-directory -j2 setup drivers
	@$(MAKE) --no-print-directory -j2 lint suite

suite: setup
	$(BIN)/python -m pytest -q -n auto --dist loadfile --no-loadscope-reorder

# Also the cases marked full, which differ from others in numbers more than in code: hours on two cores.
test-all: setup
	$(BIN)/python -m pytest -q -n auto --dist loadfile --no-loadscope-reorder -m ""

# The tests that compile little: under two minutes on two idle cores.
test-fast: setup
	$(BIN)/python -m pytest -q -n auto --dist loadfile -m "not slow"

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check --quiet .
	$(BIN)/pyright --pythonpath $(BIN)/python

clean:
	rm -rf $(VENV) *.egg-info .pytest_cache .ruff_cache
