"""The user's cache of compiled models: what shapes an artifact is part of its key."""

import pytest

from mlc_amd.compiler import pipeline
from mlc_amd.runtime.devices.hip import gpu
from mlc_amd.tools import models

SPEC = "tiny:q4_0"


@pytest.fixture
def builds(monkeypatch, tmp_path) -> list[tuple[str, str]]:
    """(target, arch) of each compilation; nothing is really compiled. The cache is empty at first."""
    made = []

    def compile_model(source, target, arch, ctx, out, progress, weights, tuned):
        made.append((target, arch))
        out.mkdir(parents=True)
        (out / "manifest.json").touch()

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(pipeline, "compile_model", compile_model)
    return made


@pytest.mark.parametrize("arch", ["native", "auto"])
def test_rocm_follows_the_gpu(builds, monkeypatch, arch):
    monkeypatch.setattr(gpu, "kfd_gpus", lambda: [{"arch": "gfx1100"}])
    first = models.artifact_path(None, synthetic=SPEC, target="rocm", arch=arch)
    assert models.artifact_path(None, synthetic=SPEC, target="rocm", arch=arch) == first
    monkeypatch.setattr(gpu, "kfd_gpus", lambda: [{"arch": "gfx1201"}])
    assert models.artifact_path(None, synthetic=SPEC, target="rocm", arch=arch) != first
    assert builds == [("rocm", "gfx1100"), ("rocm", "gfx1201")]


@pytest.mark.parametrize("arch", ["native", "auto"])
def test_cpu_follows_the_flags(builds, monkeypatch, arch):
    monkeypatch.setattr(models, "cpu_flags", lambda: frozenset({"avx2"}))
    first = models.artifact_path(None, synthetic=SPEC, target="cpu", arch=arch)
    monkeypatch.setattr(models, "cpu_flags", lambda: frozenset({"avx2", "avx512_vnni"}))
    assert models.artifact_path(None, synthetic=SPEC, target="cpu", arch=arch) != first
    assert builds == [("cpu", "native")] * 2
