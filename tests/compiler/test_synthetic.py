"""Synthetic models: real shapes, sane weights, never in memory; and `write_gguf`, checked by gguf-py's own reader."""

import subprocess
import sys
import textwrap

import gguf
import numpy as np
import pytest

from mlc_amd.compiler.gguf import PRESETS, GGUFModel, synthetic, write_gguf
from mlc_amd.compiler.models.registry import expected_tensors
from mlc_amd.compiler.models.tensors import merged_parts, optional
from mlc_amd.runtime.errors import UserError
from mlc_amd.schedules.formats import FORMATS

PARAMETERS = {
    "llama3-1b": 1.50e9, "llama3-8b": 8.03e9, "llama3-70b": 70.55e9, "llama3-405b": 405.85e9,
    "llama2-7b": 6.74e9, "qwen3-8b": 8.19e9,
    "qwen3-0.6b": 0.596e9, "qwen3-30b-a3b": 30.5e9, "gpt-oss-20b": 20.9e9, "gpt-oss-120b": 116.8e9,
    "gemma3-12b": 11.77e9,
    "gemma4-26b-a4b": 25.2e9, "mistral-small-24b": 23.57e9, "phi4-mini": 3.84e9, "lfm2-1.2b": 1.17e9,
    "qwen35-35b-a3b": 34.66e9, "granite-4-h-small": 32.2e9, "nemotron-3-nano": 31.6e9, "kimi-linear-48b-a3b": 49.12e9,
    "glm-5": 743.9e9, "deepseek-v3.2": 671.9e9, "step-3.5-flash": 196.8e9,
    "deepseek-v4-flash": 284e9, "minimax-m3": 427e9, "muse-glimmer-30b": 27.9e9,
}  # fmt: skip

# How names end of what the graph takes instead of a convolution, or besides
COMPUTED = ("indexer.mean", "ple_lags", "ple_taps", "ple_products.weight", "ple_conv1d.weight")


@pytest.mark.parametrize("preset", PRESETS)
def test_presets_have_the_published_sizes(preset):
    model = synthetic(f"{preset}:q4_k")
    merged = {part.source for part in merged_parts(model.config)}
    listed = {name for name, _ in expected_tensors(model.config)}
    beside = {name for tensor, shape in expected_tensors(model.config) for name, _ in optional(tensor, shape)}
    beside -= listed
    made = {part.name for part in merged_parts(model.config)}
    assert set(model.stored) - beside == listed
    # of merged matrices there are parts, and biases of these; factors of experts come of scales
    apart = {name.removesuffix("weight") + "bias" for name in made} | {
        name for name in model.tensors if "ffn_exps" in name
    }
    found, wanted = (
        {name for name in names if not name.endswith(COMPUTED) and "output_hc_norm" not in name}
        for names in (set(model.tensors) - beside - apart, listed - merged | made)
    )
    assert found == wanted
    if preset in PARAMETERS:
        assert sum(np.prod(t.shape) for t in model.tensors.values()) == pytest.approx(PARAMETERS[preset], rel=0.005)
    assert (
        len(model.metadata["tokenizer.ggml.tokens"])
        == model.config.vocab
        == len(set(model.metadata["tokenizer.ggml.tokens"]))
    )


@pytest.mark.parametrize("format", FORMATS)
def test_weights_are_sane_in_every_format(format):
    model = synthetic(f"tiny:{format}")
    for name in ("blk.0.ffn_down.weight", "token_embd.weight"):
        tensor = model.tensors[name]
        weights = tensor.dequantize() * np.float32(tensor.shape[1] ** 0.5)
        assert weights.shape == tensor.shape and weights.dtype == np.float32 and tensor.format == format
        assert np.isfinite(weights).all()
        assert (
            abs(weights.mean()) < 0.05 and weights.std() == pytest.approx(1.0, abs=0.05) and np.abs(weights).max() < 8
        )
    norm = model.tensors["blk.1.ffn_norm.weight"]
    assert norm.format == "f32" and norm.dequantize().mean() == pytest.approx(1.0, abs=0.05)


@pytest.mark.parametrize("format", ["q4_0", "q6_k", "f16"])
def test_rows_do_not_depend_on_how_they_are_asked_for(format):
    whole = synthetic(f"llama3-1b:{format}").tensors["blk.3.attn_k.weight"]
    again = synthetic(f"llama3-1b:{format}").tensors["blk.3.attn_k.weight"]
    blocks = whole.blocks()
    assert blocks.shape == (512, whole.row_bytes) and blocks.dtype == np.uint8
    parts = [again.blocks(start, stop) for start, stop in ((0, 1), (1, 100), (100, 100), (100, 511), (511, 512))]
    assert (np.concatenate(parts) == blocks).all()
    assert (synthetic(f"llama3-1b:{format}", seed=1).tensors[whole.name].blocks() != blocks).any()
    assert (synthetic(f"llama3-1b:{format}").tensors["blk.3.attn_v.weight"].blocks() != blocks).any()
    with pytest.raises(IndexError):
        whole.blocks(500, 513)


@pytest.mark.parametrize(
    "spec, message",
    [
        ("llama9:q4_0", r"llama9:q4_0: unknown preset 'llama9'; .*llama3-8b, .*qwen3-0.6b"),
        ("tiny:q9_9", r"tiny:q9_9: unknown format 'q9_9'; .*q4_k, .*iq4_xs"),
        ("tiny", r"tiny: the format is missing; write tiny:q4_0"),
        ("", r": unknown preset ''"),
    ],
)
def test_unknown_specs(spec, message):
    with pytest.raises(UserError, match=message):
        synthetic(spec)


def test_tokenizer_covers_every_byte():
    metadata = synthetic("tiny:q8_0").metadata
    tokens = metadata["tokenizer.ggml.tokens"]
    demo_alphabet = {
        "!",
        "~",
        "Ġ",
        "Ċ",
        "ĉ",
        "ÿ",
        "¡",
        "Ń",
        "Ā",
    }  # bytes 33, 126, 32, 10, 9, 255, 161, 173, 0 in GPT-2's alphabet
    assert demo_alphabet <= set(tokens[:256]) and all(len(t) == 1 for t in tokens[:256])
    assert tokens[metadata["tokenizer.ggml.eos_token_id"]] == "<|im_end|>"
    for merge in metadata["tokenizer.ggml.merges"]:
        assert merge.replace(" ", "") in tokens and all(part in tokens for part in merge.split(" "))


def test_tokens_are_different_words():
    tokens = synthetic("llama3-8b:q4_0").metadata["tokenizer.ggml.tokens"]
    assert len(set(tokens)) == len(tokens) == 128256
    assert sum(any(character.isdigit() for character in token) for token in tokens) < 20


@pytest.mark.parametrize("spec", ["tiny:q4_k", "tiny-qwen2:f16", "tiny-qwen3:iq4_xs"])
def test_written_file_is_the_model(tmp_path, spec):
    model, path = synthetic(spec), tmp_path / "model.gguf"
    write_gguf(model, path)
    assert [p.name for p in tmp_path.iterdir()] == ["model.gguf"]
    with GGUFModel.open(path) as back:
        approximately = {
            k: pytest.approx(v, rel=1e-6) if isinstance(v, float) else v for k, v in model.metadata.items()
        }
        assert back.metadata == approximately
        assert list(back.tensors) == list(model.tensors)
        for name, tensor in model.tensors.items():
            assert (back.tensors[name].format, back.tensors[name].shape) == (tensor.format, tensor.shape)
            assert (back.tensors[name].blocks() == tensor.blocks()).all()
    reader = gguf.GGUFReader(path)  # an independent reader agrees
    assert {t.name: t.tensor_type.value for t in reader.tensors} == {
        t.name: FORMATS[t.format].gguf_type for t in model.tensors.values()
    }
    for tensor in reader.tensors:
        assert (
            np.asarray(tensor.data).view(np.uint8).reshape(-1) == model.tensors[tensor.name].blocks().reshape(-1)
        ).all()
    arch = model.config.architecture
    for key in ("context_length", "block_count", "attention.head_count"):  # llama.cpp insists on these types
        assert reader.fields[f"{arch}.{key}"].types == [gguf.GGUFValueType.UINT32]
    assert reader.fields[f"{arch}.rope.freq_base"].types == [gguf.GGUFValueType.FLOAT32]
    assert reader.fields["tokenizer.ggml.token_type"].types == [gguf.GGUFValueType.ARRAY, gguf.GGUFValueType.INT32]
    assert reader.fields["tokenizer.ggml.add_bos_token"].types == [gguf.GGUFValueType.BOOL]


def test_opened_model_can_be_written(tmp_path, demo_gguf):
    with GGUFModel.open(demo_gguf) as model:
        write_gguf(model, tmp_path / "copy.gguf")
        with GGUFModel.open(tmp_path / "copy.gguf") as copy:
            assert copy.metadata == model.metadata and copy.config == model.config
            assert all((copy.tensors[n].blocks() == t.blocks()).all() for n, t in model.tensors.items())


def run(code: str) -> str:
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], check=True, capture_output=True, text=True
    ).stdout


def test_big_models_stream():
    """Walking through 136 MiB of an 8B model, some rows at a time as the packer does, takes little memory."""
    used = run("""
        import resource
        from mlc_amd.compiler.gguf import synthetic
        model = synthetic("llama3-8b:q8_0")
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        tensor = model.tensors["output.weight"]
        for start in range(0, 32768, 1024):
            tensor.blocks(start, start + 1024)
        print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
    """)
    assert int(used) < 40_000  # KiB


def test_full_disk_leaves_nothing_behind(tmp_path):
    """A limit on the file size stands in for a full disk; an existing file survives."""
    path = tmp_path / "model.gguf"
    path.write_bytes(b"precious")
    printed = run(f"""
        import resource
        from mlc_amd.compiler.gguf import synthetic, write_gguf
        from mlc_amd.runtime.errors import UserError
        for limit in (1000, 300_000):       # inside the header, inside the weights
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
            try:
                write_gguf(synthetic("tiny:q4_0"), {str(path)!r})
            except UserError as error:
                print(error)
    """).splitlines()
    assert len(printed) == 2 and all(line.startswith(f"{path}: the file cannot be written (") for line in printed)
    assert [p.name for p in tmp_path.iterdir()] == ["model.gguf"] and path.read_bytes() == b"precious"


def test_missing_folder(tmp_path):
    with pytest.raises(UserError, match="cannot be written"):
        write_gguf(synthetic("tiny:q4_0"), tmp_path / "nowhere" / "model.gguf")


@pytest.mark.parametrize("preset", ["qwen35-35b-a3b", "nemotron-3-nano", "kimi-linear-48b-a3b"])
def test_states_decay(preset):
    """Or logits would not be finite after some hundred tokens."""
    factors = [tensor for name, tensor in synthetic(f"{preset}:q4_0").tensors.items() if name.endswith("ssm_a")]
    assert factors and all(tensor.dequantize().max() < 0 for tensor in factors)
