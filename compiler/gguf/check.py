"""Compares a file's tensors with those that its architecture lists (`compiler/models`)."""

from collections.abc import Mapping
from typing import Protocol

from mlc_amd.compiler.gguf.header import FETCH_AGAIN
from mlc_amd.compiler.models.config import ModelConfig
from mlc_amd.compiler.models.registry import expected_tensors
from mlc_amd.compiler.models.tensors import is_vector
from mlc_amd.runtime.errors import UserError
from mlc_amd.schedules.formats import FORMATS

MATRIX_SCALES = (".scale", ".input_scale")  # beside a matrix' .weight: llama.cpp's src/llama-model.cpp


class TensorLike(Protocol):
    format: str
    shape: tuple[int, ...]


def _plain(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Without dimensions of 1, which programs that write files keep or leave out."""
    return tuple(size for size in shape if size != 1)


def check_tensors(config: ModelConfig, tensors: Mapping[str, TensorLike], path: str) -> None:
    """UserError (with `path` in front) unless `tensors` are exactly those of `expected_tensors`, vectors as floats. An
    additional tensor is an error, too, as in llama.cpp: it belongs to a variant whose results would be wrong without
    it."""
    known = set()
    for name, shape in expected_tensors(config):
        if name not in tensors:
            raise UserError(f"{path}: tensor {name} is missing; {FETCH_AGAIN}")
        tensor = tensors[name]
        if tensor.shape != shape and not (is_vector(name, shape) and _plain(tensor.shape) == _plain(shape)):
            raise UserError(
                f"{path}: tensor {name} has shape {tensor.shape}, expected {shape}; its metadata and tensors "
                "do not match: convert the model again"
            )
        if is_vector(name, shape) and FORMATS[tensor.format].kind != "float":
            raise UserError(
                f"{path}: tensor {name} is {tensor.format}, but norms, biases and convolutions must be floats; "
                "quantize the model again"
            )
        known.add(name)
    extra = next((name for name in tensors if name not in known.union(config.unused)), None)
    if extra is not None and extra.endswith(MATRIX_SCALES):
        raise UserError(
            f"{path}: tensor {extra!r} is a scale of a whole matrix, as files converted from NVFP4 checkpoints have: "
            "these are not supported; use another quantization of this model"
        )
    if extra is not None:
        raise UserError(
            f"{path}: tensor {extra!r} is not part of a {config.architecture} model as supported here; "
            "use a model of the plain architecture"
        )
