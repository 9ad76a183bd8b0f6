"""Which image encoder goes with a GGUF file."""

import shutil
from pathlib import Path

import pytest
import vision_models

from mlc_amd.runtime.errors import UsageError, UserError
from mlc_amd.runtime.options import CompileOptions, LoadOptions
from mlc_amd.tools.hub import encoders, models


@pytest.fixture
def folder(tmp_path) -> Path:
    vision_models.write(tmp_path / "mmproj-F32.gguf", "gemma3")
    return tmp_path


def chosen(model: Path, **options) -> str | None:
    found = encoders.choose(model, CompileOptions(**options))
    return found and Path(found).name


def test_the_one_beside_the_model(folder):
    model = folder / "Some-Model-4B-Q4_K_M.gguf"
    assert chosen(model) == "mmproj-F32.gguf"
    for name in ("mmproj-BF16.gguf", "mmproj-Some-Model-4B-Q8_0.gguf", "Other-Model-mmproj-f16.gguf"):
        shutil.copy(folder / "mmproj-F32.gguf", folder / name)
    assert chosen(model) == "mmproj-Some-Model-4B-Q8_0.gguf"  # its own
    assert chosen(folder / "Third-Q4_0.gguf") == "mmproj-BF16.gguf"  # that of no other model
    assert chosen(folder / "other-model-7b.gguf") == "Other-Model-mmproj-f16.gguf"
    assert chosen(model, no_mmproj=True) is None


def test_the_one_of_a_repository(folder):
    snapshot = folder / "models--me--x" / "snapshots" / "0123"
    (snapshot / "Q8_0").mkdir(parents=True)
    shutil.copy(folder / "mmproj-F32.gguf", snapshot / "mmproj-F16.gguf")
    assert chosen(snapshot / "Q8_0" / "x-Q8_0-00001-of-00002.gguf") == "mmproj-F16.gguf"


def test_one_that_cannot_be_compiled_is_left_out_with_a_message(tmp_path, capsys):
    (tmp_path / "mmproj-F16.gguf").write_bytes(b"GGUF")
    assert chosen(tmp_path / "x.gguf") is None
    assert "without its image encoder" in capsys.readouterr().err


def test_one_that_is_named_must_be_there(tmp_path):
    with pytest.raises(UserError, match="no such file"):
        chosen(tmp_path / "x.gguf", mmproj=tmp_path / "none.gguf")
    with pytest.raises(UsageError, match="not both"):
        chosen(tmp_path / "x.gguf", mmproj=tmp_path / "none.gguf", no_mmproj=True)


def test_an_artifact_has_its_encoder_already(compiled, folder):
    given = {"model": compiled("tiny:q4_0", 64), "mmproj": folder / "mmproj-F32.gguf"}
    with pytest.raises(UserError, match="was compiled with --mmproj None"):
        models.artifact_path(LoadOptions(**given))
