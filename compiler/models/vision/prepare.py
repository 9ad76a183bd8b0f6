"""Prepares the tensors of an image encoder for its graph.

In: the file's tensors; convolutions are matrices with one row for each output. Out: `prepared`: separate q, k and v,
one matrix for the patches, whole blocks of columns, and vectors for what the host reads (learned positions, the class
token). Matrices that change become float32, or float16 if they were 16-bit floats and no number changes.
"""

from collections.abc import Mapping
from math import isqrt

import numpy as np

from mlc_amd.compiler.gguf.tensor import Tensor
from mlc_amd.compiler.models.vision.config import VisionConfig
from mlc_amd.compiler.models.vision.registry import projectors
from mlc_amd.runtime.errors import UserError
from mlc_amd.schedules.formats import FORMATS

BLOCK = 32  # columns
PATCH, BIAS = "v.patch_embd.weight", "v.patch_embd.bias"
TABLE, CLASS, BREAK = "v.position_embd.weight", "v.class_embd", "v.token_embd.img_break"
ON_HOST = (TABLE, CLASS, BREAK, BIAS)  # tensors that runtime/images/encoder.py reads
# Prefixes of tensors that are not part of the encoder: layouts of tiles for the decoder, audio encoders
OTHERS = ("v.image_newline", "v.view_seperator", "a.", "mm.a.")

Tensors = dict[str, Tensor]


def prepared(config: VisionConfig, stored: Mapping[str, Tensor], path: str) -> Tensors:
    """The tensors for the graph, by name. Raises UserError (beginning with `path`) for shapes that do not match the
    metadata."""
    tensors = {name: tensor for name, tensor in stored.items() if not name.startswith(OTHERS)}
    unused = tuple(f"v.blk.{config.layers + i}." for i in range(config.unused))
    tensors = {name: tensor for name, tensor in tensors.items() if not name.startswith(unused)}
    try:
        _patches(config, tensors)
        for name in list(tensors):
            if name.endswith(".attn_qkv.weight"):
                _split(tensors, name.removesuffix("_qkv.weight"))
        projectors()[config.projector].prepare(config, tensors)
        _check_positions(config, tensors)
        for name in ON_HOST:
            if name in tensors:
                _vector(tensors, name)
        for name, tensor in tensors.items():
            if len(tensor.shape) == 1 and FORMATS[tensor.format].kind != "float":
                raise ValueError(f"{name} is {tensor.format}, vectors must be floats")
        _whole_blocks(tensors)
    except (ValueError, KeyError, IndexError) as error:
        raise UserError(f"{path}: metadata and tensors do not match ({error}); convert the encoder again") from error
    return tensors


def _check_positions(config: VisionConfig, tensors: Tensors) -> None:
    """Raises ValueError unless learned positions and class token exist, in right shapes, exactly if configured."""
    for name, wanted in ((TABLE, config.table), (CLASS, config.class_row), (BREAK, config.breaks)):
        if bool(wanted) != (name in tensors):
            raise ValueError(f"{name} {'is missing' if wanted else 'is not part of such an encoder'}")
    if config.class_row and tensors[CLASS].rows * tensors[CLASS].shape[-1] != config.hidden:
        raise ValueError(f"{tensors[CLASS]} of {config.hidden} columns")
    if config.table:
        table, places = tensors[TABLE], (config.image // config.patch) ** 2 + bool(config.class_row)
        count, rest = divmod(table.rows * table.shape[-1], config.hidden)
        fits = {"rows": count == places, "axes": count % 2 == 0 and len(table.shape) == 2}
        square = isqrt(count - bool(config.class_row)) ** 2 == count - bool(config.class_row)
        if rest or count < 2 or not fits.get(config.table, square):
            raise ValueError(f"{table} of {config.hidden} columns")


def _patches(config: VisionConfig, tensors: Tensors) -> None:
    """Makes one matrix for the patches. An image is a video of two equal frames, so their matrices are added."""
    size = 3 * config.patch**2
    sources = [tensors[PATCH], *([tensors.pop(PATCH + ".1")] if PATCH + ".1" in tensors else [])]
    if any(one.shape != (config.hidden, size) for one in sources):
        raise ValueError(f"{sources} of patches of {config.patch} pixels")
    tensors[PATCH] = Tensor.made(PATCH, (config.hidden, size), lambda: np.sum([one.dequantize() for one in sources], 0))


def _split(tensors: Tensors, name: str) -> None:
    """Divides the matrix attn_qkv into q, k and v. name: prefix of the layer's attention."""
    weight, bias = tensors.pop(f"{name}_qkv.weight"), tensors.pop(f"{name}_qkv.bias", None)
    rows, rest = divmod(weight.rows, 3)
    if rest or (bias and bias.shape != (3 * rows,)):
        raise ValueError(f"{weight!r} is not q, k and v")
    for i, which in enumerate("qkv"):
        part = f"{name}_{which}"
        tensors[part + ".weight"] = weight.part(part + ".weight", i * rows, (rows, weight.shape[-1]))
        if bias:
            tensors[part + ".bias"] = bias.entries(part + ".bias", i * rows, rows)


def _vector(tensors: Tensors, name: str) -> None:
    source = tensors[name]
    tensors[name] = Tensor.made(name, (source.rows * source.shape[-1],), source.dequantize)


def _whole_blocks(tensors: Tensors) -> None:
    """Adds columns of zeros to matrices without whole blocks of columns. For ffn_down, adds as many rows of zeros to
    the matrices before it and to their biases."""
    for name, tensor in list(tensors.items()):
        columns = tensor.shape[-1]
        if len(tensor.shape) == 2 and (more := -columns % BLOCK):
            tensors[name] = tensor.filled((tensor.rows, columns + more))
            if name.endswith(".ffn_down.weight"):
                for which in ("up", "gate"):
                    _more_rows(tensors, name.removesuffix("down.weight") + which, columns, more)


def _more_rows(tensors: Tensors, name: str, rows: int, more: int) -> None:
    matrix, bias = tensors.get(name + ".weight"), tensors.get(name + ".bias")
    if matrix and matrix.rows == rows:
        tensors[name + ".weight"] = matrix.some_rows(name + ".weight", [(0, rows)], rows + more)
    if bias and bias.shape == (rows,):
        tensors[name + ".bias"] = Tensor.made(
            name + ".bias", (rows + more,), lambda: np.pad(bias.dequantize(), (0, more))
        )


def _changed(tensors: Tensors, name: str, shape: tuple[int, int], change) -> None:
    source = tensors[name]
    if source.rows * source.shape[-1] != shape[0] * shape[1]:
        raise ValueError(f"{source!r} cannot become {shape}")
    kept = "f16" if source.format == "f16" else "f32"
    tensors[name] = Tensor.made(name, shape, lambda: change(source.dequantize()), kept)


def transposed(tensors: Tensors, name: str) -> None:
    """Transposes a matrix that has inputs as rows in the file."""
    rows, columns = tensors[name].shape
    _changed(tensors, name, (columns, rows), lambda values: values.T)


def patches_first(tensors: Tensors, name: str, count: int) -> None:
    """Reorders columns: by patch of a token, then by column of the patch, instead of the other way round."""
    rows, columns = tensors[name].shape
    size = (rows, columns // count, count)
    _changed(tensors, name, (rows, columns), lambda values: values.reshape(size).transpose(0, 2, 1))


def centered_pixels(tensors: Tensors) -> None:
    """Changes the matrix of patches for encoders that read 2 * pixel - 1."""
    source = tensors[PATCH]
    tensors[PATCH] = Tensor.made(PATCH, source.shape, lambda: 2 * source.dequantize())
    tensors[BIAS] = Tensor.made(BIAS, source.shape[:1], lambda: -source.dequantize().sum(1, dtype=np.float64))
