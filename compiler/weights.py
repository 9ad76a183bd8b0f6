"""The weights of an artifact: which tensors its files hold, and their values.

In: a model, its target's layout of planes, and the parameters of its functions. Out: `specs`, the tensors of the two
files by what they are made of; `write`, which streams them to disk in chunks of rows; and `key`, which says when
packed weights are the same.
"""

import hashlib
import json
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from importlib import resources
from pathlib import Path

import numpy as np

from mlc_amd.compiler import memory
from mlc_amd.compiler.models.graph import ONES, table_columns
from mlc_amd.compiler.models.rope import position_table
from mlc_amd.compiler.quant import repack
from mlc_amd.compiler.quant.draws import draws
from mlc_amd.runtime.artifact.manifest import RandomTensor
from mlc_amd.runtime.artifact.weight_block import TensorSpec
from mlc_amd.runtime.artifact.weights_file import WeightsWriter
from mlc_amd.schedules.operators.layouts import padded

Specs = dict[str, list[TensorSpec]]  # by source: a tensor of the file, a vector of ones, a table by position

CHUNK_BYTES = 4 << 20  # packed GGUF bytes that one worker repacks at a time
# What the bytes of packed weights follow from, besides the file: weights that older versions of it packed are others.
_PACKING = (
    ("mlc_amd.compiler", ("weights.py", "quant/blocks.py", "quant/codebooks.py", "quant/pack.py")),
    ("mlc_amd.compiler", ("gguf/reader.py", "gguf/tensor.py", "gguf/synthetic.py", "models/__init__.py")),
    ("mlc_amd.schedules", ("formats.py", "cpu/linear/planes.py", "gpu/base/planes.py")),
)


def specs(model, backend, parameters, ctx: int) -> Specs:
    """The tensors that the functions take, in the order of their parameters."""
    names = dict.fromkeys(name for function in parameters.values() for kind, name in function if kind == "weight")
    found, tables = {}, table_columns(model.config)
    for name in names:
        if name in tables:
            found[name] = [TensorSpec(name, "float32", (ctx, tables[name]))]
        elif size := _vector_size(model, name):
            found[name] = [TensorSpec(name, "float32", (padded(size),))]
        else:
            tensor = model.tensors[name]
            planes = backend.planes(tensor.format, tensor.rows, tensor.shape[-1])
            found[name] = [TensorSpec(f"{name}/{plane}", dtype, shape) for plane, (shape, dtype) in planes.items()]
    return found


def is_matrix(planes: list[TensorSpec]) -> bool:
    return "/" in planes[0].name


def drawn(model, found: Specs) -> dict[str, RandomTensor]:
    """The planes of all matrices, with how to draw them, as runtime/artifact/random_weights.py reads them."""
    listed: dict[str, RandomTensor] = {}
    for name, planes in found.items():
        if is_matrix(planes):
            kinds = draws(model.tensors[name].format, model.tensors[name].shape[-1])
            for spec in planes:
                listed[spec.name] = {
                    "dtype": spec.dtype,
                    "shape": list(spec.shape),
                    "draw": kinds[spec.name.split("/")[1]],
                }
    return listed


def by_context(model, found: Specs) -> tuple[Specs, Specs]:
    """(those that are the same at every capacity, tables by position)."""
    tables = table_columns(model.config)
    return (
        {name: planes for name, planes in found.items() if name not in tables},
        {name: planes for name, planes in found.items() if name in tables},
    )


def key(model, layout: str, found: Specs) -> str:
    """A name for the file that `write` makes of these: another one where its bytes could differ."""
    sources = [[str(file.resolve()), file.stat().st_size, file.stat().st_mtime_ns] for file in model.files]
    tensors = [[spec.name, spec.dtype, spec.shape] for planes in found.values() for spec in planes]
    parts = [sources or model.path, layout, tensors, _packing()]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:24]


@cache
def _packing() -> str:
    """A digest of the sources that pack weights."""
    digest = hashlib.sha256()
    for package, names in _PACKING:
        root = Path(str(resources.files(package)))
        for name in names:
            digest.update((root / name).read_bytes())
    return digest.hexdigest()


def write(model, layout: str, found: Specs, path: Path, ctx: int, progress, workers: int) -> None:
    """Writes the file of these tensors: repacks matrices on several threads. progress(stage, done, total) in bytes."""
    writer = WeightsWriter(path, (spec for planes in found.values() for spec in planes))
    total, done = sum(spec.nbytes for planes in found.values() for spec in planes), [0]

    def repack_chunk(name: str, start: int, stop: int) -> None:
        tensor = model.tensors[name]
        planes = repack(tensor.format, tensor.blocks(start, stop), tensor.shape[-1], layout)
        for spec, plane in zip(found[name], planes.values(), strict=True):
            writer.write(spec.name, spec.nbytes * start // padded(tensor.rows), plane)
            done[0] += plane.nbytes
        progress("weights", min(done[0], total), total)

    try:
        with ThreadPoolExecutor(workers) as pool:
            jobs = []
            for name, planes in found.items():
                if not is_matrix(planes):
                    writer.write(name, 0, _vector(model, name, planes[0], ctx))
                    done[0] += planes[0].nbytes
                    continue
                tensor = model.tensors[name]
                rows = max(16, CHUNK_BYTES // max(1, tensor.row_bytes) // 16 * 16)
                for start in range(0, tensor.rows, rows):
                    jobs.append(pool.submit(repack_chunk, name, start, min(start + rows, tensor.rows)))
            try:
                for job in jobs:
                    job.result()
            finally:  # after an error or Ctrl-C, what has not begun is not wanted
                pool.shutdown(wait=True, cancel_futures=True)
    finally:
        writer.close()


def _vector_size(model, name: str) -> int:
    """Numbers of a vector, that of ones included; 0 for a matrix."""
    return int(name.removeprefix(ONES)) if name.startswith(ONES) else memory.vector_size(model, name)


def _vector(model, name: str, spec: TensorSpec, ctx: int) -> np.ndarray:
    """The values of a table by position, or those of a norm or a bias, padded with zeros."""
    if name in table_columns(model.config):
        return position_table(model.config, name, ctx, lambda name: model.tensors[name].dequantize())
    size = _vector_size(model, name)
    values = np.ones(size) if name.startswith(ONES) else model.tensors[name].dequantize().reshape(-1)
    return np.pad(values.astype(np.float32), (0, spec.shape[0] - size))
