"""The weights of an artifact: which tensors its files hold, and their values.

In: a model, its target's layout of planes, and the parameters of its functions. Out: `weight_sources`, the tensors of
the two files, grouped by source; `write`, which streams them to disk in chunks of rows; `key`, which identifies the
packed weights: different weights have different keys.
"""

import hashlib
import json
import math
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Literal

import numpy as np

from mlc_amd.compiler.models.graph import ONES, table_columns
from mlc_amd.compiler.models.rope import position_table
from mlc_amd.compiler.models.shards import parts_of
from mlc_amd.compiler.models.tensors import is_vector
from mlc_amd.compiler.models.vision.prepare import ON_HOST
from mlc_amd.compiler.quant import repack
from mlc_amd.compiler.quant.draws import draws
from mlc_amd.runtime.artifact.manifest import RANK, RandomTensor
from mlc_amd.runtime.artifact.weight_block import TensorSpec
from mlc_amd.runtime.artifact.weights_file import WeightsWriter
from mlc_amd.schedules.operators.layouts import padded

CHUNK_BYTES = 4 << 20  # packed GGUF bytes that one worker repacks at a time
# The source files that determine the bytes of packed weights. Their contents are part of `key`, so that weights that
# other versions of this code packed are not used.
_PACKING = (
    ("mlc_amd.compiler", ("weights.py", "quant/blocks.py", "quant/pack.py")),
    (
        "mlc_amd.compiler",
        (
            "gguf/draft.py",
            "gguf/parts.py",
            "gguf/reader.py",
            "gguf/tensor.py",
            "gguf/synthetic.py",
            "models/tensors.py",
            "models/shards.py",
        ),
    ),
    ("mlc_amd.compiler", ("models/vision/prepare.py",)),
    ("mlc_amd.schedules", ("formats.py", "cpu/linear/planes.py", "gpu/base/planes.py")),
)


@dataclass(frozen=True)
class WeightSource:
    """A source of weights, and the tensors that it becomes in the weights' files.

    kind: "matrix": a matrix of the model; "vector": a vector of the model (a norm, a bias, a convolution); "ones": a
    vector of ones; "table": a table by position. planes: the tensors; one, except for a matrix.
    """

    name: str
    kind: Literal["matrix", "vector", "ones", "table"]
    planes: tuple[TensorSpec, ...]

    @property
    def nbytes(self) -> int:
        return sum(spec.nbytes for spec in self.planes)


def weight_sources(model, target, parameters, ctx: int) -> list[WeightSource]:
    """The sources of all weights that the functions take, in the order of the parameters. parameters: see `make_plan`.
    ctx: capacity in tokens."""
    names = dict.fromkeys(name for function in parameters.values() for kind, name in function if kind == "weight")
    if model.vision:  # the host also reads weights of image encoders
        names |= dict.fromkeys(name for name in ON_HOST if name in model.tensors)
    tables, found = table_columns(model.config), []
    for name in names:
        if name in tables:
            found.append(WeightSource(name, "table", (TensorSpec(name, "float32", (ctx, tables[name])),)))
        elif name.startswith(ONES):
            found.append(WeightSource(name, "ones", (_vector_spec(name, int(name.removeprefix(ONES))),)))
        else:
            found += (tensor_source(model, target, one) for one in parts_of(model, name))
    return found


def tensor_source(model, target, name: str) -> WeightSource:
    """The source for a tensor of the model: a vector (of all experts together), or a matrix with its planes."""
    tensor = model.tensors[name]
    if is_vector(name.partition(RANK)[0], tensor.shape):
        return WeightSource(name, "vector", (_vector_spec(name, math.prod(tensor.shape)),))
    planes = target.planes(tensor.format, tensor.rows, tensor.shape[-1])
    specs = (TensorSpec(f"{name}/{plane}", dtype, shape) for plane, (shape, dtype) in planes.items())
    return WeightSource(name, "matrix", tuple(specs))


def _vector_spec(name: str, size: int) -> TensorSpec:
    return TensorSpec(name, "float32", (padded(size),))


def random_tensors(model, sources: list[WeightSource]) -> dict[str, RandomTensor]:
    """The planes of all matrices, each with the distribution of its random values
    (runtime/artifact/random_weights.py)."""
    found: dict[str, RandomTensor] = {}
    for source in sources:
        if source.kind == "matrix":
            kinds = draws(model.tensors[source.name].format, model.tensors[source.name].shape[-1])
            for spec in source.planes:
                draw = kinds[spec.name.split("/")[1]]
                found[spec.name] = {"dtype": spec.dtype, "shape": list(spec.shape), "draw": draw}
    return found


def key(model, layout: str, sources: list[WeightSource]) -> str:
    """A name for the file that `write` makes of these sources. It differs if the file's bytes could differ."""
    files = [[str(file.resolve()), file.stat().st_size, file.stat().st_mtime_ns] for file in model.files]
    tensors = [[spec.name, spec.dtype, spec.shape] for source in sources for spec in source.planes]
    parts = [files or model.path, layout, tensors, _packing()]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:24]


@cache
def _packing() -> str:
    """A digest of the source files in _PACKING."""
    digest = hashlib.sha256()
    for package, names in _PACKING:
        root = Path(str(resources.files(package)))
        for name in names:
            digest.update((root / name).read_bytes())
    return digest.hexdigest()


def write(model, layout: str, sources: list[WeightSource], path: Path, progress, workers: int) -> None:
    """Writes the weights file `path` with the tensors of these sources; several threads repack matrices.
    progress(stage, done, total): called with bytes."""
    writer = WeightsWriter(path, (spec for source in sources for spec in source.planes))
    total, done = sum(source.nbytes for source in sources), [0]

    def repack_chunk(source: WeightSource, start: int, stop: int) -> None:
        tensor = model.tensors[source.name]
        planes = repack(tensor.format, tensor.blocks(start, stop), tensor.shape[-1], layout)
        for spec, plane in zip(source.planes, planes.values(), strict=True):
            writer.write(spec.name, spec.nbytes * start // padded(tensor.rows), plane)
            done[0] += plane.nbytes
        progress("weights", min(done[0], total), total)

    try:
        with ThreadPoolExecutor(workers) as pool:
            jobs = []
            for source in sources:
                if source.kind != "matrix":
                    writer.write(source.name, 0, _values(model, source))
                    done[0] += source.nbytes
                    continue
                tensor = model.tensors[source.name]
                rows = max(16, CHUNK_BYTES // max(1, tensor.row_bytes) // 16 * 16)
                for start in range(0, tensor.rows, rows):
                    jobs.append(pool.submit(repack_chunk, source, start, min(start + rows, tensor.rows)))
            try:
                for job in jobs:
                    job.result()
            finally:  # after an error or Ctrl-C, jobs that have not begun are cancelled
                pool.shutdown(wait=True, cancel_futures=True)
    finally:
        writer.close()


def _values(model, source: WeightSource) -> np.ndarray:
    """The values of a table by position or of a vector, float32, padded with zeros."""
    (spec,) = source.planes
    if source.kind == "table":
        return position_table(model.config, source.name, spec.shape[0], lambda name: model.tensors[name].dequantize())
    ones = source.kind == "ones"
    values = np.ones(int(source.name.removeprefix(ONES))) if ones else model.tensors[source.name].dequantize()
    return np.pad(values.reshape(-1).astype(np.float32), (0, spec.shape[0] - values.size))
