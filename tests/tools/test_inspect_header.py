"""`mlc-amd inspect` of a GGUF file whose architecture cannot be compiled: what its header says."""

import json
import os
from pathlib import Path

import gguf
import numpy as np
import pytest

from mlc_amd.compiler.gguf.reader import quantization
from mlc_amd.runtime.engine.engine import Engine
from mlc_amd.runtime.errors import UserError
from mlc_amd.tools import cli


def write(path: Path, architecture: str) -> Path:
    """A GGUF file of a made-up model of that architecture."""
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_name("A made-up model")
    writer.add_context_length(1 << 20)
    writer.add_array(f"{architecture}.layer_kinds", list(range(24)))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([f"token{i}" for i in range(100)])
    writer.add_eos_token_id(7)
    writer.add_chat_template("{{ x }}" * 100)
    writer.add_tensor("token_embd.weight", np.zeros((100, 64), np.float32))
    blocks = gguf.quantize(np.ones((32, 64), np.float32), gguf.GGMLQuantizationType.Q8_0)
    writer.add_tensor("blk.0.ssm_in.weight", blocks, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture
def rwkv7(tmp_path) -> Path:
    return write(tmp_path / "model.gguf", "rwkv7")


def test_what_the_header_says_is_shown(inspect, rwkv7):
    out, err = inspect(rwkv7)
    assert err == ""
    lines = [" ".join(line.split()) for line in out.splitlines()]
    size = rwkv7.stat().st_size / 1024
    head = ["name A made-up model", f"size {size:.2f} KiB on disk", "parameters 0.01 M", "quantization mostly F32"]
    assert lines[:5] == [*head, f"file {rwkv7}"]
    for line in (
        "rwkv7.context_length 1048576",
        "rwkv7.layer_kinds 24 values",
        "model gpt2",
        "tokens 100 values",
        "eos_token_id 7 'token7'",
        "f32 1 0.01 M 25.00 KiB",
        "q8_0 1 0.00 M 2.12 KiB",
    ):
        assert line in lines, out
    (refusal,) = [line for line in lines if line.startswith("compile ")]
    assert refusal.startswith("compile not possible: architecture 'rwkv7' is not supported; ")
    assert "ssm_in" not in out and max(map(len, lines)) < 600  # the chat template is shortened
    assert "blk.0.ssm_in.weight q8_0 32x64 2.12 KiB" in " ".join(inspect(rwkv7, "--tensors").out.split())


def test_what_is_no_file(tmp_path, capsys):
    """A pipe is not waited for; a folder is no file that is not compiled yet."""
    os.mkfifo(tmp_path / "pipe.gguf")
    assert cli.main(["inspect", str(tmp_path / "pipe.gguf")]) == 1
    assert "is not a file" in capsys.readouterr().err
    (tmp_path / "folder.gguf").mkdir()
    with pytest.raises(UserError, match="is not a compiled model"):
        Engine.load(tmp_path / "folder.gguf")


def test_json(inspect, rwkv7):
    report = json.loads(inspect(rwkv7, "--json").out)
    assert report["types"]["q8_0"] == {"tensors": 1, "weights": 2048, "bytes": 2176}
    assert report["tensors"][0] == {"name": "token_embd.weight", "dtype": "f32", "shape": [100, 64], "bytes": 25600}
    assert report["metadata"]["general.architecture"] == "rwkv7" and "refusal" in report


@pytest.mark.parametrize(
    ("file_type", "name"),
    [(15, "Q4_K_M"), (7, "Q8_0"), (0, "F32"), (1024 + 18, "Q6_K"), (38, "MXFP4_MOE"), (999, "Q8_0"),
     ("15", "Q8_0"), (None, "Q8_0"), (True, "Q8_0")],
)  # fmt: skip
def test_quantization_is_what_the_file_is_called(file_type, name):
    totals = {"f32": {"bytes": 10}, "q8_0": {"bytes": 2000}}
    assert quantization({"general.file_type": file_type}, totals) == name


def test_other_defects_remain_errors(rwkv7, tmp_path, capsys):
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(rwkv7.read_bytes()[:300])
    for path, message in ((broken, "truncated or damaged"), (write(tmp_path / "llama.gguf", "llama"), "is missing")):
        assert cli.main(["inspect", str(path)]) == 1
        shown = capsys.readouterr()
        assert shown.out == "" and shown.err.startswith("error: ") and message in shown.err


def test_it_cannot_be_compiled(rwkv7, capsys):
    assert cli.main(["compile", str(rwkv7), "-o", str(rwkv7.parent / "out")]) == 1
    assert "architecture 'rwkv7' is not supported" in capsys.readouterr().err
