"""Models of real shapes with random weights, for tests and benchmarks without downloads.

In: a spec `preset:format`, say `llama3-8b:q4_0`. Out: a `GGUFModel` like one opened from a file. Every matrix has that
format, every vector is f32. Weights are generated on demand and not stored; they depend on (spec, seed) only, not on
how they are sliced. Activations stay finite: matrices ~ N(0, 1/columns), norms near 1. The tokenizer is real
(byte-level BPE with the ChatML tokens), so chat works, but the output is noise.
"""

import zlib
from collections.abc import Mapping
from functools import lru_cache

import gguf
import numpy as np

from mlc_amd.compiler.gguf.check import check_tensors
from mlc_amd.compiler.gguf.reader import GGUFModel, Tensor, row_bytes
from mlc_amd.compiler.models import expected_tensors, read_config
from mlc_amd.compiler.quant.draws import either
from mlc_amd.runtime.errors import UserError
from mlc_amd.schedules.formats import FORMATS

_COLUMNS = (
    "architecture",
    "layers",
    "hidden",
    "ffn",
    "heads",
    "kv_heads",
    "head_dim",
    "vocab",
    "context",
    "norm_eps",
    "rope_base",
    "llama3_rope_factor",
    "tied",
)
PRESETS = {
    name: dict(zip(_COLUMNS, row, strict=True))
    for name, row in {
        # The shapes of the models they are named after; llama3-1b has its own output matrix (Llama-3.2-1B is tied).
        #               arch    layers hidden   ffn heads kv  dim   vocab context   eps   rope  factor  tied
        "tiny": ("llama", 2, 256, 768, 4, 2, 64, 1024, 2048, 1e-5, 10000.0, None, False),
        "tiny-qwen2": ("qwen2", 2, 256, 768, 4, 2, 64, 1024, 2048, 1e-6, 1e6, None, True),
        "tiny-qwen3": ("qwen3", 2, 256, 768, 4, 2, 128, 1024, 2048, 1e-6, 1e6, None, True),
        "llama3-1b": ("llama", 16, 2048, 8192, 32, 8, 64, 128256, 131072, 1e-5, 5e5, 32.0, False),
        "llama3-8b": ("llama", 32, 4096, 14336, 32, 8, 128, 128256, 131072, 1e-5, 5e5, 8.0, False),
        "llama2-7b": ("llama", 32, 4096, 11008, 32, 32, 128, 32000, 4096, 1e-5, 10000.0, None, False),
        "qwen3-8b": ("qwen3", 36, 4096, 12288, 32, 8, 128, 151936, 40960, 1e-6, 1e6, None, False),
        "qwen3-0.6b": ("qwen3", 28, 1024, 3072, 16, 8, 128, 151936, 40960, 1e-6, 1e6, None, True),
    }.items()
}

# float16 fields of a GGUF block: {byte offset: factor}. All other bytes are random (every code and sub-scale is
# valid). The factors of minimums center the weights: minimum = mean(code) * mean(sub-scale) / mean(sub-minimum).
# Layouts: ggml/src/ggml-common.h.
_SCALE_FIELDS = {
    "q4_0": {0: 1.0},
    "q4_1": {0: 1.0, 2: -7.5},
    "q5_0": {0: 1.0},
    "q5_1": {0: 1.0, 2: -15.5},
    "q8_0": {0: 1.0},
    "q2_k": {80: 1.0, 82: 1.5},
    "q3_k": {108: 1.0},
    "q4_k": {0: 1.0, 2: 7.5},
    "q5_k": {0: 1.0, 2: 15.5},
    "q6_k": {208: 1.0},
    "iq4_nl": {0: 1.0},
    "iq4_xs": {0: 1.0},
    "tq1_0": {52: 1.0},
    "tq2_0": {64: 1.0},
    "iq1_s": {0: 1.0},
    "iq2_xxs": {0: 1.0},
    "iq2_xs": {0: 1.0},
    "iq2_s": {0: 1.0},
    "iq3_xxs": {0: 1.0},
    "iq3_s": {0: 1.0},
}
_SPREAD_SCALE = {"iq1_m": 48}  # byte offset of four uint16, whose top nibbles are one float16
# Bytes at the beginning of a block that are its scales: how many, and the numbers that they stand for, ascending
_BYTE_SCALES = {
    "mxfp4": (1, gguf.quants.MXFP4.e8m0_to_fp32_half(np.arange(0xFF, dtype=np.uint8)).tolist()),
    "nvfp4": (4, gguf.quants.NVFP4.ue4m3_to_fp32(np.arange(0x7F, dtype=np.uint8)).tolist()),
}
_GROUP_BYTES = 1 << 18  # rows are drawn in groups of about this size, each with its own generator
_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + "
    "'\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def synthetic(spec: str, seed: int = 0, keys: Mapping[str, object] | None = None) -> GGUFModel:
    """The model of that spec, `preset:format`. UserError for an unknown preset or format, naming the known ones.

    keys: metadata instead of the preset's or besides it, without the architecture in front; "general.architecture"
    makes a model of another architecture with the preset's sizes.
    """
    preset, _, format = spec.partition(":")
    if preset not in PRESETS:
        raise UserError(f"{spec}: unknown preset {preset!r}; use preset:format with one of {', '.join(PRESETS)}")
    if format not in FORMATS:
        raise UserError(f"{spec}: unknown format {format!r}; use preset:format with one of {', '.join(FORMATS)}")
    shape, keys = PRESETS[preset], keys or {}
    arch = str(keys.get("general.architecture", shape["architecture"]))
    named = {key if key.startswith(("general.", "tokenizer.")) else f"{arch}.{key}": keys[key] for key in keys}
    metadata = _metadata(preset, arch, shape) | named
    optional = {"output.weight": not shape["tied"], "rope_freqs.weight": shape["llama3_rope_factor"] is not None}
    config = read_config(metadata, {name for name, present in optional.items() if present}, spec)
    tensors = {
        name: _tensor(name, format if len(dims) == 2 else "f32", dims, shape, seed)
        for name, dims in expected_tensors(config)
    }
    check_tensors(config, tensors, spec)
    return GGUFModel(spec, metadata, tensors, config)


def _metadata(preset: str, arch: str, shape: dict) -> dict[str, object]:
    vocab = shape["vocab"]
    # The names that byte-level BPE gives to the 256 bytes, by way of GPT-2's table: printable ones are themselves.
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [b for b in range(256) if b not in printable]
    tokens = [chr(b) for b in printable] + [chr(256 + i) for i in range(len(others))]
    merges = [("Ġ", "t"), ("h", "e"), ("i", "n"), ("Ġ", "a")]
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    tokens += [left + right for left, right in merges]
    tokens += [f"Ġ{i}" for i in range(vocab - len(tokens) - len(special))] + special
    normal, control = int(gguf.TokenType.NORMAL), int(gguf.TokenType.CONTROL)
    return {
        "general.architecture": arch,
        "general.name": f"Synthetic {preset}",
        "general.type": "model",
        f"{arch}.context_length": shape["context"],
        f"{arch}.embedding_length": shape["hidden"],
        f"{arch}.block_count": shape["layers"],
        f"{arch}.feed_forward_length": shape["ffn"],
        f"{arch}.attention.head_count": shape["heads"],
        f"{arch}.attention.head_count_kv": shape["kv_heads"],
        f"{arch}.attention.key_length": shape["head_dim"],
        f"{arch}.attention.value_length": shape["head_dim"],
        f"{arch}.attention.layer_norm_rms_epsilon": shape["norm_eps"],
        f"{arch}.rope.freq_base": shape["rope_base"],
        f"{arch}.rope.dimension_count": shape["head_dim"],
        f"{arch}.vocab_size": vocab,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "qwen2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [normal] * (vocab - len(special)) + [control] * len(special),
        "tokenizer.ggml.merges": [f"{left} {right}" for left, right in merges],
        "tokenizer.ggml.bos_token_id": vocab - 3,
        "tokenizer.ggml.padding_token_id": vocab - 3,
        "tokenizer.ggml.eos_token_id": vocab - 1,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": _TEMPLATE,
    }


def _tensor(name: str, format: str, dims: tuple[int, ...], shape: dict, seed: int) -> Tensor:
    columns = dims[-1]
    if len(dims) == 1:
        values = _vector(name, columns, shape, np.random.default_rng([seed, zlib.crc32(name.encode())]))
        return Tensor(name, format, dims, lambda start, stop: values.view(np.uint8)[None][start:stop])
    size = row_bytes(format, columns)
    group = max(1, _GROUP_BYTES // size)

    def fetch(start: int, stop: int) -> np.ndarray:
        rows = np.empty((stop - start, size), np.uint8)
        for first in range(start - start % group, stop, group):
            # Always the whole group (but for the matrix's end), so that a row does not depend on what is asked for with
            # it.
            drawn = _rows(
                format,
                min(group, dims[0] - first),
                columns,
                np.random.Generator(np.random.SFC64([seed, zlib.crc32(name.encode()), first])),
            )
            begin, end = max(first, start), min(first + group, stop)
            rows[begin - start : end - start] = drawn[begin - first : end - first]
        rows.flags.writeable = False  # as a file's blocks are
        return rows

    return Tensor(name, format, dims, fetch)


def _vector(name: str, columns: int, shape: dict, rng: np.random.Generator) -> np.ndarray:
    """float32 [columns], read-only: RoPE's factors as published, norms near 1, biases near 0."""
    if name == "rope_freqs.weight":
        values = _llama3_factors(columns, shape["rope_base"], shape["llama3_rope_factor"])
    else:
        values = rng.standard_normal(columns, np.float32) * np.float32(0.1) + np.float32(name.endswith("norm.weight"))
    values.flags.writeable = False
    return values


def _llama3_factors(pairs: int, base: float, factor: float) -> np.ndarray:
    """Llama 3.1's frequency factors, as llama.cpp's converter writes them (low_freq_factor 1, high_freq_factor 4, 8192
    tokens before): 1 for wavelengths below 8192/4, `factor` above 8192, between them a blend of the two."""
    wavelength = 2 * np.pi * base ** (np.arange(pairs) / pairs)
    smooth = np.clip((8192 / wavelength - 1.0) / (4.0 - 1.0), 0.0, 1.0)
    return (1.0 / ((1.0 - smooth) / factor + smooth)).astype(np.float32)


def _rows(format: str, rows: int, columns: int, rng: np.random.Generator) -> np.ndarray:
    """uint8 [rows, row_bytes]: weights with mean 0 and standard deviation 1/sqrt(columns)."""
    deviation = columns**-0.5
    if FORMATS[format].kind == "float":
        values = rng.standard_normal((rows, columns), np.float32) * np.float32(deviation)
        if format == "bf16":
            return np.ascontiguousarray(values.view(np.uint16)[:, 1::2]).view(np.uint8)  # the upper half of a float32
        return values.astype({"f32": np.float32, "f16": np.float16}[format]).view(np.uint8)
    count = rows * columns // FORMATS[format].block
    blocks = np.frombuffer(rng.bytes(count * FORMATS[format].block_bytes), np.uint8).reshape(count, -1).copy()
    scale = deviation / _unit_deviation(format)
    if format in _BYTE_SCALES:
        number, values = _BYTE_SCALES[format]
        low, share = either(values, scale)
        blocks[:, :number] = low + (rng.random((count, number), np.float32) < share)
        return blocks.reshape(rows, -1)
    # Scales vary by a quarter around what gives the deviation; their random sign takes out the mean of the codes.
    vary = rng.random(count, np.float32) - np.float32(0.5)
    _set_scales(format, blocks, np.copysign(0.75 + np.abs(vary), vary) * np.float32(scale))
    return blocks.reshape(rows, -1)


def _set_scales(format: str, blocks: np.ndarray, scales: np.ndarray) -> None:
    """Sets the float16 fields of blocks to these scales."""
    for offset, factor in _SCALE_FIELDS.get(format, {}).items():
        blocks[:, offset : offset + 2] = (scales * factor).astype(np.float16).view(np.uint8).reshape(-1, 2)
    if format in _SPREAD_SCALE:
        offset, bits = _SPREAD_SCALE[format], scales.astype(np.float16).view(np.uint16)
        fields = blocks[:, offset : offset + 8].view(np.uint16)
        fields[...] = fields & 0x0FFF | (bits[:, None] >> np.arange(0, 16, 4, dtype=np.uint16)) << 12


@lru_cache
def _unit_deviation(format: str) -> float:
    """Root mean square of the weights in random blocks of scale 1."""
    blocks = np.random.default_rng(0).integers(0, 256, (4096, FORMATS[format].block_bytes), np.uint8)
    if format in _BYTE_SCALES:
        number, values = _BYTE_SCALES[format]
        blocks[:, :number] = values.index(1.0)
    _set_scales(format, blocks, np.ones(len(blocks)))
    values = gguf.dequantize(blocks, gguf.GGMLQuantizationType(FORMATS[format].gguf_type))
    return float(np.sqrt(np.mean(np.square(values, dtype=np.float64))))
