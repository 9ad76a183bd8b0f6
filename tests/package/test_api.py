"""The public API, `import mlc_amd`."""

import subprocess
import sys

import pytest

import mlc_amd
from mlc_amd.compiler.gguf import synthetic
from mlc_amd.compiler.gguf.writer import write_gguf
from mlc_amd.runtime.engine.engine import Engine
from mlc_amd.runtime.sampling.settings import Sampling


@pytest.fixture(scope="module")
def gguf(tmp_path_factory):
    path = tmp_path_factory.mktemp("api") / "tiny.gguf"
    with synthetic("tiny:f16", keys={"general.sampling.temp": 0.6, "general.sampling.penalty_last_n": -1}) as model:
        write_gguf(model, path)
    return path


def test_import_is_light():
    code = (
        "import sys, mlc_amd; mlc_amd.__version__; print(*{'tvm', 'tvm_ffi', 'numpy', 'tokenizers'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


def test_names():
    assert mlc_amd.Engine is Engine
    assert all(getattr(mlc_amd, name) is not None for name in mlc_amd.__all__)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        mlc_amd.nothing  # noqa: B018 (the access is the test)


def test_compile_and_load(gguf, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = mlc_amd.compile(gguf, tmp_path / "artifact", ctx=64)
    assert path == tmp_path / "artifact"
    compiled = mlc_amd.load(path, threads=1)
    cached = mlc_amd.load(gguf, ctx=64, threads=1)
    assert (
        cached.artifact.path.parent == tmp_path / "cache" / "mlc-amd" / "models"
        and cached.context == compiled.context == 64
    )
    assert (compiled.prefill([1, 2, 3]) == cached.prefill([1, 2, 3])).all()
    assert compiled.sampling == Sampling(temperature=0.6, repetition_window=64)  # the file's; the window is the context


def test_refusals(gguf, tmp_path):
    with pytest.raises(mlc_amd.UserError, match="no such file"):
        mlc_amd.load(tmp_path / "missing.gguf")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    with pytest.raises(mlc_amd.UserError, match="is not a compiled model"):
        mlc_amd.compile(gguf, tmp_path / "full")
