"""Shared fixtures: where the optional reference data lies, and the bundled model."""

from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of reference models and logits beside the repository; tests that need it skip where it is absent."""
    path = REPO.parent / "shared"
    if not (path / "refs").is_dir():
        pytest.skip("reference data (../shared) is not here")
    return path


@pytest.fixture(scope="session")
def demo_gguf() -> Path:
    return REPO / "dist" / "demo" / "llama-q4_k_m.gguf"
