"""Shared fixtures: where the optional reference data lies, the bundled model, and models compiled once for all tests."""

import fcntl
import os
from pathlib import Path
from urllib.parse import quote

import gfxemu
import pytest

from mlc_amd.compiler.gguf import GGUFModel, synthetic
from mlc_amd.compiler.pipeline import compile_model
from mlc_amd.tools import cli

REPO = Path(__file__).resolve().parent.parent
# The files that take longest go first: workers that are done early then have short ones left.
LONG = (
    "test_models.py", "test_cpu_linear.py", "test_tune_cli.py", "test_rocm_models.py", "test_vulkan_device.py", "test_gpu_attention.py",
    "test_cli.py", "test_tuning_rpc.py", "test_tuning_attention.py", "test_tuning_kit.py", "test_chat.py", "test_vulkan_models.py",
    "test_cpu_plans.py", "test_gpu_gemm.py", "test_tuning_search.py", "test_tuning_build.py", "test_bench.py", "test_bench_gpu.py",
)  # fmt: skip


def pytest_collection_modifyitems(items):
    place = {name: i for i, name in enumerate(LONG)}
    items.sort(key=lambda item: place.get(item.path.name, len(LONG)))


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


@pytest.fixture(scope="session")
def compiled(tmp_path_factory):
    """compiled(GGUF path or synthetic spec, ctx) -> artifact folder. Not to be changed by tests.

    Each is compiled once a run, also where pytest-xdist runs several workers: the first that asks compiles, the others wait for it.
    """
    mine = tmp_path_factory.getbasetemp()  # of a worker: a folder in the run's
    root = (mine.parent if "PYTEST_XDIST_WORKER" in os.environ else mine) / "artifacts"

    def compile_once(source: Path | str, ctx: int) -> Path:
        place = root / f"{quote(str(source), safe='')}-{ctx}"
        place.mkdir(parents=True, exist_ok=True)
        out = place / "model"
        with open(place / "lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not out.exists():  # it appears whole or not at all
                with GGUFModel.open(source) if isinstance(source, Path) else synthetic(source) as model:
                    compile_model(model, "cpu", "native", ctx, out)
        return out

    return compile_once


@pytest.fixture(scope="session")
def demo_artifact(compiled, demo_gguf) -> Path:
    """The bundled model with its whole context, 2048 tokens."""
    return compiled(demo_gguf, 2048)


@pytest.fixture(scope="session")
def emulator():
    """The ISA emulator; tests that need it skip where it is absent, before they compile anything."""
    return gfxemu.load()


@pytest.fixture
def inspect(capsys):
    """inspect(arguments) -> (stdout, stderr) of a command that succeeds."""

    def run(*tokens):
        assert cli.main(["inspect", *map(str, tokens)]) == 0
        return capsys.readouterr()

    return run
