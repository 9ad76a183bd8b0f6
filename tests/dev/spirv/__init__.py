"""A SPIR-V emulator for tests: `emulator.py`."""
