"""Models of real shapes with random weights, for tests and benchmarks without downloads.

In: a spec `preset:format`, such as `llama3-8b:q4_0`. Out: a `GGUFModel` like one that was opened from a file. Matrices
have the given format; vectors are f32. Weights are generated on demand and not stored; they depend on (spec, seed)
only, not on the order in which rows are read. Activations stay finite: matrices ~ N(0, 1/columns), norms near 1. The
tokenizer is real (byte-level BPE with the ChatML tokens), so chat works, but answers are noise.
"""

import itertools
import string
import zlib
from collections.abc import Collection, Mapping
from functools import lru_cache, partial
from math import prod

import gguf
import numpy as np

from mlc_amd.compiler.gguf.presets import PRESETS, Preset
from mlc_amd.compiler.gguf.reader import GGUFModel, check_tensors
from mlc_amd.compiler.gguf.tensor import Tensor, row_bytes
from mlc_amd.compiler.models.config import ExpertsConfig
from mlc_amd.compiler.models.registry import expected_tensors, read_config
from mlc_amd.compiler.models.tensors import EXPERT_TABLE, STATE_SPACE, is_vector, optional
from mlc_amd.compiler.quant.draws import either
from mlc_amd.runtime.errors import UserError
from mlc_amd.schedules.formats import FORMATS

# float16 fields of a GGUF block: {byte offset: factor}. All other bytes are random (every code and sub-scale is
# valid). The factors of minimums center the weights: minimum = mean(code) * mean(sub-scale) / mean(sub-minimum).
# Layouts: ggml/src/ggml-common.h.
FIRST = ("q4_0", "q5_0", "q8_0", "iq4_nl", "iq4_xs", "iq1_s", "iq2_xxs", "iq2_xs", "iq2_s", "iq3_xxs", "iq3_s")
SCALE_FIELDS = {name: {0: 1.0} for name in FIRST} | {
    "q4_1": {0: 1.0, 2: -7.5}, "q5_1": {0: 1.0, 2: -15.5}, "q4_k": {0: 1.0, 2: 7.5}, "q5_k": {0: 1.0, 2: 15.5},
    "q2_k": {80: 1.0, 82: 1.5}, "q3_k": {108: 1.0}, "q6_k": {208: 1.0}, "tq1_0": {52: 1.0}, "tq2_0": {64: 1.0},
}  # fmt: skip
SPREAD_SCALE = {"iq1_m": 48}  # byte offset of four uint16, whose top nibbles are one float16
# Formats whose blocks begin with scales of one byte: (number of these bytes, the values of a byte, ascending)
_BYTE_SCALES = {
    "mxfp4": (1, gguf.quants.MXFP4.e8m0_to_fp32_half(np.arange(0xFF, dtype=np.uint8)).tolist()),
    "nvfp4": (4, gguf.quants.NVFP4.ue4m3_to_fp32(np.arange(0x7F, dtype=np.uint8)).tolist()),
}
# The formats for rows that are not whole blocks of 256 columns, as in llama-quantize (src/llama-quant.cpp).
FALLBACKS = {"q2_k": "iq4_nl", "q3_k": "iq4_nl", "q4_k": "q5_0", "q5_k": "q5_1", "q6_k": "q8_0", "iq4_xs": "iq4_nl"}
_EXACT = EXPERT_TABLE, "ffn_gate_inp.weight", "token_types.weight", "position_embd.weight"
_TOKENS = "tokenizer.ggml.tokens"
_GROUP_BYTES = 1 << 18  # rows are drawn in groups of about this size, each with its own generator
_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + "
    "'\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def synthetic(
    spec: str,
    seed: int = 0,
    keys: Mapping[str, object] | None = None,
    tensors: Collection[str] = (),
    pooling: str = "",
) -> GGUFModel:
    """The model of the spec `preset:format`. Raises UserError, which lists the known names, for an unknown preset or
    format.

    A matrix whose rows are not whole blocks of the format has a format of FALLBACKS, as in llama-quantize. In a mixture
    of experts, mxfp4 only applies to the experts; other matrices are q8_0, as in published files.

    keys: metadata that are added or replace the preset's, with or without the architecture as a prefix.
    "general.architecture" makes a model of another architecture with the preset's sizes; "tokenizer.ggml.tokens" and
    related keys give it another tokenizer. tensors: names of optional tensors, in addition to those of the preset's
    architecture; * stands for a layer's number. pooling: see `read_config`.
    """
    name, _, format = spec.partition(":")
    if name not in PRESETS:
        raise UserError(f"{spec}: unknown preset {name!r}; use preset:format with one of {', '.join(PRESETS)}")
    if not format:
        raise UserError(f"{spec}: the format is missing; write {spec}:q4_0, or another of {', '.join(FORMATS)}")
    if format not in FORMATS:
        raise UserError(f"{spec}: unknown format {format!r}; use preset:format with one of {', '.join(FORMATS)}")
    preset, keys = PRESETS[name], keys or {}
    metadata = _metadata(name, preset, keys)
    own = preset.present() if metadata["general.architecture"] == preset.architecture else set()
    names = own | _of_layers(tensors, metadata)
    config = read_config(metadata, names, spec, pooling)
    shapes = dict(expected_tensors(config))
    beside = (one for name, dims in shapes.items() for one in optional(name, dims))
    shapes |= {name: dims for name, dims in beside if name in names and name not in config.unused}
    experts = any(len(dims) == 3 for dims in shapes.values())
    formats = {2: "q8_0" if experts and format == "mxfp4" else format}  # by dimensions
    made = {
        name: _tensor(name, _format_of(name, dims, formats.get(len(dims), format)), dims, preset, seed)
        for name, dims in shapes.items()
    }
    for i, layer in enumerate(config.layers):
        if isinstance(e := layer.feed_forward, ExpertsConfig) and e.table:
            name = f"blk.{i}.{EXPERT_TABLE}"
            made[name] = Tensor.made(name, shapes[name], partial(_experts_of_tokens, e, seed + i))
    check_tensors(config, made, spec)
    return GGUFModel(spec, metadata, made, config)


def _experts_of_tokens(e: ExpertsConfig, seed: int) -> np.ndarray:
    """The experts of each token, float32 [tokens, used]; a token has different experts."""
    return np.argsort(np.random.default_rng(seed).random((e.table, e.count)), 1)[:, : e.used].astype(np.float32)


def _of_layers(names: Collection[str], metadata: Mapping[str, object]) -> set[str]:
    """The names, in which * is replaced by the number of each layer."""
    layers = int(str(metadata[f"{metadata['general.architecture']}.block_count"]))
    return {name.replace("*", str(i)) for name in names for i in range(layers)}


def _format_of(name: str, dims: tuple[int, ...], format: str) -> str:
    if is_vector(name, dims) or name.endswith(_EXACT):  # as in all published files
        return "f32"
    while dims[-1] % FORMATS[format].block:
        format = FALLBACKS.get(format, "f16")
    return format


def _metadata(name: str, preset: Preset, keys: Mapping[str, object]) -> dict[str, object]:
    arch = str(keys.get("general.architecture", preset.architecture))
    own = {"general.architecture": arch, "general.name": f"Synthetic {name}", "general.type": "model"}
    named = {
        key if key.startswith(("general.", "tokenizer.")) else f"{arch}.{key.removeprefix(f'{arch}.')}": value
        for key, value in (dict(preset.keys) | dict(keys)).items()
    }
    if isinstance(tokens := named.get(_TOKENS), list):
        return own | named | {f"{arch}.vocab_size": len(tokens)}
    return own | named | _tokenizer(int(str(named[f"{arch}.vocab_size"])))


def _tokenizer(vocab: int) -> dict[str, object]:
    # Byte-level BPE's names of the 256 bytes, as in GPT-2's table: printable bytes stand for themselves.
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [b for b in range(256) if b not in printable]
    tokens = [chr(b) for b in printable] + [chr(256 + i) for i in range(len(others))]
    merges = [("Ġ", "t"), ("h", "e"), ("i", "n"), ("Ġ", "a")]
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    tokens += [left + right for left, right in merges]
    # Words of four letters, so that masks of grammars cost as much as with real vocabularies.
    words = map("".join, itertools.product("Ġ", *[string.ascii_lowercase] * 4))
    tokens += [*itertools.islice(words, vocab - len(tokens) - len(special)), *special]
    normal, control = int(gguf.TokenType.NORMAL), int(gguf.TokenType.CONTROL)
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "qwen2",
        _TOKENS: tokens,
        "tokenizer.ggml.token_type": [normal] * (vocab - len(special)) + [control] * len(special),
        "tokenizer.ggml.merges": [f"{left} {right}" for left, right in merges],
        "tokenizer.ggml.bos_token_id": vocab - 3,
        "tokenizer.ggml.padding_token_id": vocab - 3,
        "tokenizer.ggml.eos_token_id": vocab - 1,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": _TEMPLATE,
    }


def _tensor(name: str, format: str, dims: tuple[int, ...], preset: Preset, seed: int) -> Tensor:
    columns, rows_in_all = dims[-1], prod(dims[:-1])
    if len(dims) == 1:
        values = _vector(name, columns, preset, np.random.default_rng([seed, zlib.crc32(name.encode())]))
        return Tensor(name, format, dims, lambda start, stop: values.view(np.uint8)[None][start:stop])
    if name.endswith(STATE_SPACE):
        values = _vector(name, prod(dims), preset, np.random.default_rng([seed, zlib.crc32(name.encode())]))
        return Tensor(name, format, dims, lambda start, stop: values.reshape(-1, columns)[start:stop].view(np.uint8))
    size = row_bytes(format, columns)
    group = max(1, _GROUP_BYTES // size)

    def fetch(start: int, stop: int) -> np.ndarray:
        rows = np.empty((stop - start, size), np.uint8)
        for first in range(start - start % group, stop, group):
            # Always draws the whole group (or up to the matrix's end), so that a row does not depend on which rows are
            # read together.
            drawn = _rows(
                format,
                min(group, rows_in_all - first),
                columns,
                np.random.Generator(np.random.SFC64([seed, zlib.crc32(name.encode()), first])),
            )
            begin, end = max(first, start), min(first + group, stop)
            rows[begin - start : end - start] = drawn[begin - first : end - first]
        rows.flags.writeable = False  # like blocks of a file
        return rows

    return Tensor(name, format, dims, fetch)


def _vector(name: str, columns: int, preset: Preset, rng: np.random.Generator) -> np.ndarray:
    """float32 [columns], read-only: RoPE's factors as published, norms and scales near 1, biases near 0, and factors
    with which states decay."""
    if name == "rope_freqs.weight" and preset.rope_freqs:
        values = preset.rope_freqs(columns)
    else:
        center = (
            name.endswith(("norm.weight", "scale.weight", ".scale", ".scales"))
            or "_norm_" in name
            or name.startswith("rope")
        )
        values = rng.standard_normal(columns, np.float32) * np.float32(0.1) + np.float32(center)
        if name.endswith("ssm_a"):
            values = -0.1 - 5 * np.abs(values)
    values.flags.writeable = False
    return values


def _rows(format: str, rows: int, columns: int, rng: np.random.Generator) -> np.ndarray:
    """Rows of blocks, uint8 [rows, row_bytes]: weights with mean 0 and standard deviation 1/sqrt(columns)."""
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
    # Scales vary by a quarter around the one that yields the deviation. Their random signs make the mean 0.
    vary = rng.random(count, np.float32) - np.float32(0.5)
    _set_scales(format, blocks, np.copysign(0.75 + np.abs(vary), vary) * np.float32(scale))
    return blocks.reshape(rows, -1)


def _set_scales(format: str, blocks: np.ndarray, scales: np.ndarray) -> None:
    """Sets the float16 fields of blocks to these scales."""
    for offset, factor in SCALE_FIELDS.get(format, {}).items():
        blocks[:, offset : offset + 2] = (scales * factor).astype(np.float16).view(np.uint8).reshape(-1, 2)
    if format in SPREAD_SCALE:
        offset, bits = SPREAD_SCALE[format], scales.astype(np.float16).view(np.uint16)
        fields = blocks[:, offset : offset + 8].view(np.uint16)
        fields[...] = fields & 0x0FFF | (bits[:, None] >> np.arange(0, 16, 4, dtype=np.uint16)) << 12


@lru_cache
def _unit_deviation(format: str) -> float:
    """The root mean square of the weights in random blocks of scale 1."""
    blocks = np.random.default_rng(0).integers(0, 256, (4096, FORMATS[format].block_bytes), np.uint8)
    if format in _BYTE_SCALES:
        number, values = _BYTE_SCALES[format]
        blocks[:, :number] = values.index(1.0)
    _set_scales(format, blocks, np.ones(len(blocks)))
    values = gguf.dequantize(blocks, gguf.GGMLQuantizationType(FORMATS[format].gguf_type))
    return float(np.sqrt(np.mean(np.square(values, dtype=np.float64))))
