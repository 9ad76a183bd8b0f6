"""Opening GGUF models: real ones against gguf-py's reader, metadata to configuration, split files, laziness."""

import dataclasses
import json
import os
import subprocess
import sys
import textwrap
import time

import gguf
import numpy as np
import pytest

from mlc_amd.compiler.gguf import GGUFModel, read_metadata, reader, synthetic, write_gguf
from mlc_amd.compiler.gguf.tensor import Tensor
from mlc_amd.compiler.gguf.writer import write_header
from mlc_amd.compiler.models.config import AttentionConfig, FeedForwardConfig, LayerConfig, ModelConfig, RopeConfig
from mlc_amd.compiler.models.registry import expected_tensors, read_config
from mlc_amd.compiler.pipeline import compile_model
from mlc_amd.runtime.errors import UserError
from mlc_amd.runtime.options import CompileOptions
from mlc_amd.schedules.formats import FORMATS


def same_as_gguf_py(path):
    """Everything that the independent reader sees in that file, we see too."""
    reader = gguf.GGUFReader(path)
    with GGUFModel.open(path) as model:
        fields = {name: field.contents() for name, field in reader.fields.items() if not name.startswith("GGUF.")}
        assert model.metadata == fields
        assert list(model.tensors) == [t.name for t in reader.tensors]
        for theirs in reader.tensors:
            ours = model.tensors[theirs.name]
            assert ours.shape == tuple(int(d) for d in reversed(theirs.shape)) and ours.nbytes == theirs.n_bytes
            assert FORMATS[ours.format].gguf_type == theirs.tensor_type
            assert (ours.blocks().reshape(-1) == np.asarray(theirs.data).view(np.uint8).reshape(-1)).all()
        return model.config


def test_demo_model(demo_gguf):
    config = same_as_gguf_py(demo_gguf)
    assert config == ModelConfig(
        architecture="llama",
        name="Tiny Docs Llama 21M",
        vocab=8192,
        hidden=512,
        layers=(LayerConfig(AttentionConfig(heads=8, kv_heads=4, head_dim=64, rope="rope"), FeedForwardConfig(1280)),)
        * 6,
        context=2048,
        norm_eps=pytest.approx(1e-5),
        tied=True,
        ropes={"rope": RopeConfig(dim=64, base=500000.0, neox=False, original_context=2048)},
    )
    assert json.loads(json.dumps(dataclasses.asdict(config)))["ropes"]["rope"]["base"] == 500000.0


def facts(config: ModelConfig) -> dict[str, object]:
    """A model of equal layers as one flat table."""
    (layer,) = set(config.layers)
    flat = vars(config) | vars(layer.attention) | {"ffn": layer.feed_forward.size, "layers": len(config.layers)}
    return flat | {"rope": config.ropes["rope"]}


@pytest.mark.parametrize(
    "name, differs",
    [
        ("llamaspm-q8_0", {"architecture": "llama", "tied": False, "heads": 4, "kv_heads": 4}),
        ("qwen2-q4_k_m", {"architecture": "qwen2", "tied": True, "head_norms": False}),
        (
            "qwen3-q4_k_m",
            {
                "architecture": "qwen3",
                "head_norms": True,
                "head_dim": 128,
                "hidden": 256,
                "heads": 4,
            },
        ),
        ("qwen3-f16", {"architecture": "qwen3", "ffn": 768}),
        ("qwen3-iq4_xs", {"architecture": "qwen3", "layers": 4}),
    ],
)
def test_reference_models(shared, name, differs):
    found = facts(same_as_gguf_py(shared / "models" / f"{name}.gguf"))
    assert {key: found[key] for key in differs} == differs
    assert found["rope"].neox == (found["architecture"] != "llama") and found["rope"].scaling == "none"


def test_big_vocabulary_is_read_fast(shared):
    path = shared / "vocabs" / "ggml-vocab-qwen2.gguf"
    start = time.process_time()
    metadata = read_metadata(path)
    assert time.process_time() - start < 4.0  # gguf.GGUFReader takes 7 s
    assert len(metadata["tokenizer.ggml.tokens"]) == 151936 and metadata["tokenizer.ggml.tokens"][0] == "!"
    with pytest.raises(UserError, match="only a vocabulary"):
        GGUFModel.open(path)


def test_tensor_access(demo_gguf):
    model = GGUFModel.open(demo_gguf)
    tensor = model.tensors["token_embd.weight"]
    assert (tensor.format, tensor.shape, tensor.rows, tensor.row_bytes) == ("q6_k", (8192, 512), 8192, 420)
    part = tensor.blocks(8000, 8192)
    assert part.shape == (192, 420) and part.dtype == np.uint8 and not part.flags.writeable and not part.flags.owndata
    assert (part == tensor.blocks()[8000:8192]).all()
    assert (tensor.dequantize(8000, 8010) == tensor.dequantize()[8000:8010]).all()
    norm = model.tensors["output_norm.weight"]
    assert (
        norm.blocks().shape == (1, 2048) and norm.dequantize().shape == (512,) and norm.dequantize().dtype == np.float32
    )
    for start, stop in ((-1, 1), (2, 1), (0, 8193)):
        with pytest.raises(IndexError):
            tensor.blocks(start, stop)
    kept = part.copy()
    model.close()
    model.close()
    assert (part == kept).all()  # a view outlives its model
    with pytest.raises(ValueError, match="closed"):
        tensor.blocks()


LLAMA = {
    "general.architecture": "llama",
    "llama.context_length": 4096,
    "llama.embedding_length": 256,
    "llama.block_count": 2,
    "llama.feed_forward_length": 512,
    "llama.attention.head_count": 4,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.vocab_size": 1000,
}


def test_defaults():
    found = facts(read_config(LLAMA, {"output.weight"}, "m"))
    expected = {"name": "", "kv_heads": 4, "head_dim": 64, "vocab": 1000, "tied": False}
    assert {key: found[key] for key in expected} == expected
    assert found["rope"] == RopeConfig(dim=64, base=10000.0, neox=False, original_context=4096)
    assert read_config(LLAMA | {"tokenizer.ggml.tokens": ["a"] * 96}, set(), "m").vocab == 96  # the token list decides


def test_optional_parts_follow_the_tensors():
    found = facts(read_config(LLAMA, {"cls.weight", "rope_freqs.weight"}, "m"))
    assert found["tied"] and found["rope"].factors == "rope_freqs.weight" and found["unused"] == ("cls.weight",)


@pytest.mark.parametrize(
    "keys, expected",
    [
        ({}, ("none", 1.0, 1.0, 0.0)),
        ({"scaling.type": "none", "scaling.factor": 4.0}, ("none", 1.0, 1.0, 0.0)),
        ({"scaling.factor": 4.0}, ("linear", 4.0, 1.0, 0.0)),
        ({"scaling.factor": 0.0}, ("none", 1.0, 1.0, 0.0)),
        ({"scale_linear": 2.0}, ("linear", 2.0, 1.0, 0.0)),
        ({"scaling.type": "linear", "scaling.factor": 1.0}, ("none", 1.0, 1.0, 0.0)),
        ({"scaling.type": "yarn", "scaling.factor": 4.0}, ("yarn", 4.0, 1.0, 1.0)),
        (
            {"scaling.type": "yarn", "scaling.factor": 4.0, "scaling.attn_factor": 1.5, "scaling.yarn_ext_factor": 0.5},
            ("yarn", 4.0, 1.5, 0.5),
        ),
    ],
)
def test_rope_scaling(keys, expected):
    rope = read_config(LLAMA | {f"llama.rope.{key}": value for key, value in keys.items()}, set(), "m").ropes["rope"]
    assert (rope.scaling, rope.factor, rope.attn_factor, rope.ext_factor) == expected
    assert (rope.original_context, rope.beta_fast, rope.beta_slow) == (4096, 32.0, 1.0)


def test_rope_other_keys():
    keys = {
        "rope.dimension_count": 32,
        "rope.freq_base": 5e5,
        "rope.scaling.original_context_length": 1024,
        "rope.scaling.yarn_beta_fast": 16.0,
        "rope.scaling.yarn_beta_slow": 2.0,
    }
    rope = read_config(LLAMA | {f"llama.{key}": value for key, value in keys.items()}, set(), "m").ropes["rope"]
    assert (rope.dim, rope.base, rope.original_context, rope.beta_fast, rope.beta_slow) == (32, 5e5, 1024, 16.0, 2.0)


def test_equal_layers_may_be_listed():
    assert read_config(LLAMA | {"llama.attention.head_count_kv": [2, 2]}, set(), "m").layers[1].attention.kv_heads == 2


def write_with_gguf_py(path, metadata, tensors, prepare):
    """A GGUF file by gguf-py's writer, independent of ours; `prepare` adds keys to the writer."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.kv_data[0].clear()
    for key, value in metadata.items():
        sub_type = gguf.GGUFValueType.get_type(value[0]) if isinstance(value, list) else None
        writer.add_key_value(key, value, gguf.GGUFValueType.get_type(value), sub_type)
    prepare(writer)
    for tensor in tensors:
        data = tensor.blocks() if len(tensor.shape) == 2 else tensor.dequantize()
        writer.add_tensor(tensor.name, data, raw_dtype=gguf.GGMLQuantizationType(FORMATS[tensor.format].gguf_type))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def split(model: GGUFModel, folder, count: int):
    """The model in `count` files, as llama.cpp's gguf-split does it: the first holds the metadata."""
    paths = [folder / f"m-{i + 1:05d}-of-{count:05d}.gguf" for i in range(count)]
    tensors = list(model.tensors.values())
    for i, path in enumerate(paths):

        def prepare(writer, i=i):
            writer.add_uint16("split.no", i)
            writer.add_uint16("split.count", count)
            writer.add_int32("split.tensors.count", len(tensors))

        write_with_gguf_py(path, model.metadata if i == 0 else {}, tensors[i::count], prepare)
    return paths


@pytest.mark.parametrize("part", [0, 1, 2])
def test_split_model(tmp_path, part):
    model = synthetic("tiny:q4_0")
    paths = split(model, tmp_path, 3)
    with GGUFModel.open(paths[part]) as opened:
        assert set(opened.tensors) == set(model.tensors) and opened.config.vocab == 1024
        assert opened.metadata["general.name"] == "Synthetic tiny"
        assert all((opened.tensors[n].blocks() == t.blocks()).all() for n, t in model.tensors.items())


def test_stack_of_matrices(tmp_path):
    """A tensor of three dimensions, as experts have: rows are counted through all matrices."""
    path, values = tmp_path / "m.gguf", np.random.default_rng(0).standard_normal((3, 8, 64)).astype(np.float32)
    writer = gguf.GGUFWriter(path, "llama")
    packed = gguf.quantize(values, gguf.GGMLQuantizationType.Q8_0)
    writer.add_tensor("blk.0.ffn_up_exps.weight", packed, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file = reader._File(str(path))
    tensor = file.tensor(file.header.tensors[0])
    assert (tensor.shape, tensor.rows, tensor.nbytes) == ((3, 8, 64), 24, 24 * 2 * 34)
    assert (tensor.blocks(10, 20) == packed.reshape(24, -1)[10:20]).all()
    assert (tensor.dequantize(8, 16) == gguf.dequantize(packed[1], gguf.GGMLQuantizationType.Q8_0)).all()


def test_split_model_damaged(tmp_path):
    paths = split(synthetic("tiny:q4_0"), tmp_path, 3)
    original = paths[1].read_bytes()
    paths[1].unlink()
    with pytest.raises(
        UserError, match=r"part 2 of 3 of this split model is missing; put m-00002-of-00003\.gguf beside it"
    ):
        GGUFModel.open(paths[2])
    paths[1].write_bytes(paths[2].read_bytes())
    with pytest.raises(UserError, match=r"m-00002-of-00003\.gguf: this is not part 2 of 3"):
        GGUFModel.open(paths[0])
    paths[1].write_bytes(original)
    renamed = paths[0].rename(tmp_path / "renamed.gguf")
    with pytest.raises(UserError, match="give all parts their original names"):
        GGUFModel.open(renamed)
    # another model's part: the first one now announces a tensor too many
    data = renamed.read_bytes()
    at = data.index(b"split.tensors.count") + len("split.tensors.count") + 4
    renamed.unlink()
    paths[0].write_bytes(data[:at] + (99).to_bytes(4, "little") + data[at + 4 :])
    with pytest.raises(UserError, match="not the 99 announced"):
        GGUFModel.open(paths[0])


def test_40_gb_are_opened_without_reading_them(tmp_path):
    """A sparse file of a 68-billion-weight model: fast to open, and next to nothing of it in memory."""
    small = synthetic("tiny:q8_0")
    metadata = small.metadata | {
        "llama.block_count": 80,
        "llama.embedding_length": 8192,
        "llama.feed_forward_length": 28672,
        "llama.attention.head_count": 64,
        "llama.attention.head_count_kv": 8,
        "llama.attention.key_length": 128,
        "llama.attention.value_length": 128,
        "llama.rope.dimension_count": 128,
    }
    path = tmp_path / "huge.gguf"
    size = sparse_gguf(path, metadata, "q4_0")
    assert size > 38e9 and path.stat().st_blocks * 512 < 1e6
    used = subprocess.run(
        [
            sys.executable,
            "-c",
            textwrap.dedent(f"""
        import resource, time
        from mlc_amd.compiler.gguf import GGUFModel
        before, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
        model = GGUFModel.open({str(path)!r})
        assert model.tensors["blk.79.ffn_down.weight"].blocks(8191, 8192).shape == (1, 28672 // 32 * 18)
        assert time.process_time() - start < 4.0
        print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
    """),
        ],
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    assert int(used) < 30_000  # KiB


def sparse_gguf(path, metadata, format) -> int:
    """A file of the right size whose weights are holes; returns that size in bytes."""
    config = read_config(metadata, {"output.weight"}, str(path))

    def nothing(start, stop):
        raise AssertionError("weights must not be read")

    tensors = {
        name: Tensor(name, format if len(shape) == 2 else "f32", shape, nothing)
        for name, shape in expected_tensors(config)
    }
    write_header(GGUFModel(str(path), metadata, tensors, config), path)
    size = path.stat().st_size + 64 + sum(-(-t.nbytes // 32) * 32 for t in tensors.values())
    with open(path, "ab") as file:
        file.truncate(size)
    return size


def test_version_2(tmp_path):
    path = tmp_path / "m.gguf"
    write_gguf(synthetic("tiny:q4_0"), path)
    data = bytearray(path.read_bytes())
    data[4:8] = (2).to_bytes(4, "little")
    path.write_bytes(data)
    with GGUFModel.open(path) as model:
        assert len(model.config.layers) == 2


def test_other_alignment(tmp_path):
    source, path = synthetic("tiny:q4_0"), tmp_path / "m.gguf"
    write_with_gguf_py(path, source.metadata, source.tensors.values(), lambda writer: writer.add_custom_alignment(256))
    with GGUFModel.open(path) as model:
        assert model.metadata["general.alignment"] == 256
        assert all((model.tensors[n].blocks() == t.blocks()).all() for n, t in source.tensors.items())


# ---- a file that changes while it is read


@pytest.mark.parametrize("change", ["truncated", "written to"])
def test_a_file_that_changes_while_it_is_compiled(tmp_path, change):
    path = tmp_path / "tiny.gguf"
    write_gguf(synthetic("tiny:q4_0"), path)
    with GGUFModel.open(path) as model:
        tensors = list(model.tensors.values())
        if change == "truncated":
            os.truncate(path, path.stat().st_size // 2)
            with pytest.raises(UserError, match=r"the file ends at byte .* wait until it is complete"):
                [tensor.blocks() for tensor in tensors]
        else:
            os.utime(path, ns=(0, 1))  # as after writing
        with pytest.raises(UserError, match=r"the file (changed|ends at byte) .*; wait until it is complete"):
            compile_model(model, tmp_path / "out", CompileOptions(target="cpu", ctx=64))
    assert not (tmp_path / "out").exists()
