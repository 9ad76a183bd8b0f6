"""Computes whole functions of an artifact, launch by launch: the model's logits without its kernels.

In: an artifact, which has the plan, the shapes of all kernels' parameters and the weights. Out: a `Plan`, with the
interface of a device (runtime/devices/__init__.py). Weights are decoded once and kept as float32.
"""

from collections.abc import Mapping

import numpy as np

from mlc_amd.runtime.artifact.manifest import is_draft, is_encoder
from mlc_amd.runtime.artifact.ranks import rank_artifact, segments
from mlc_amd.runtime.cache.cache_types import kv_types
from mlc_amd.runtime.devices.handover import spans
from mlc_amd.runtime.measure.candidate import WRITTEN
from mlc_amd.schedules.operators import from_json
from mlc_amd.schedules.operators.layouts import kind_of
from mlc_amd.tools.reference import activations
from mlc_amd.tools.reference.case import Case, Result
from mlc_amd.tools.reference.compare import expected_of
from mlc_amd.tools.reference.operators import has_reference, results, wanted_rows


def layout_of(artifact) -> str:
    """The layout of weights and caches, by its name in operators.py."""
    return "cpu" if artifact.manifest["target"]["kind"] == "cpu" else "gpu"


def without_reference(artifact) -> list[str]:
    """The kernels of the decoder for which operators.py has no reference."""
    return [
        entry["name"]
        for entry in artifact.manifest["kernels"]
        if not has_reference(entry["operator"]) and not all(is_draft(one) or is_encoder(one) for one in entry["calls"])
    ]


class Plan:
    """Has arena, cache and io, like a device. pages: of the cache, by span; see `kv_types`."""

    def __init__(self, artifact, pages: Mapping[int, int] | None = None):
        self.artifact, manifest = artifact, artifact.manifest
        self.kv_types = kv_types(manifest, pages)
        self._kernels = {entry["name"]: entry for entry in manifest["kernels"]}
        self._arena = np.zeros(manifest["arena_bytes"], np.uint8)
        self._kv = {name: np.zeros(shape, dtype) for name, (shape, dtype) in self.kv_types.items()}
        self._io = {name: np.zeros(entry["shape"], entry["dtype"]) for name, entry in manifest["io"].items()}
        self._weights: dict[str, np.ndarray] = {}
        self._decoded: dict[int, np.ndarray] = {}

    def take_over(self, function: str, sent: np.ndarray) -> None:
        """Called before a segment that needs results of other parts. sent: bytes that the segment before computed on
        all parts of the model."""
        entry = self.artifact.manifest["functions"][function]
        for first, end, at in spans(entry, "receives"):
            self._arena[first:end] = sent[at : at + end - first]
        if "own" in entry:
            source, target, count = entry["own"]
            self._arena[target : target + count] = self._arena[source : source + count]

    def sent(self, function: str) -> list[np.ndarray]:
        """The bytes of a segment that are sent to the other parts of the model."""
        entry = self.artifact.manifest["functions"][function]
        return [self._arena[first:end].copy() for first, end, _ in spans(entry, "sends")]

    def write(self, name: str, values) -> None:
        self._io[name][: len(values)] = values

    def run(self, function: str) -> None:
        for launch in self.artifact.manifest["functions"][function]["launches"]:
            self._call(self._kernels[launch["kernel"]], launch["args"])

    def read(self, name: str, rows: int) -> np.ndarray:
        return self._io[name][:rows]

    def clear(self) -> None:
        for array in self._kv.values():
            array[:] = 0

    def _call(self, kernel: dict, args: list) -> None:
        arrays = {p["name"]: self._array(p, arg) for p, arg in zip(kernel["params"], args, strict=True)}
        op = from_json({"op": kernel["operator"], "args": kernel["args"]})
        case = Case(op, arrays, layout_of(self.artifact), wanted_rows(op, arrays), decoded=self._decoded)
        found, layout = results(case), getattr(op, "norm_out", "") or getattr(op, "layout", "")
        for param in kernel["params"]:
            name = param["name"]
            wanted = expected_of(param, found) if param["role"] in WRITTEN else None
            if wanted is None:
                continue
            if param["dtype"] == "int8" and param["role"] == "output":
                rows = np.arange(len(wanted.value)) if wanted.rows is None else wanted.rows
                activations.write(layout, wanted.value, arrays, name[1:], rows)
            elif not (name[0] == "S" and "A" + name[1:] in arrays):
                _store(arrays[name], wanted, layout if arrays[name].dtype == np.float16 else "", param["role"])

    def _array(self, param: dict, arg: list) -> np.ndarray:
        kind, where = arg[0], arg[1]
        shape, dtype = param["shape"], np.dtype(param["dtype"].replace("bfloat16", "uint16"))
        if kind == "arena":
            nbytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
            return self._arena[where : where + nbytes].view(dtype).reshape(shape)
        if kind == "weight":
            if where not in self._weights:
                self._weights[where] = self.artifact.weights[where]
            flat = self._weights[where].reshape(-1).view(dtype)
            return flat[: int(np.prod(shape, dtype=np.int64))].reshape(shape)  # vectors are padded
        if kind == "kv":  # caches may have another number of pages than the parameter
            return self._kv[where]
        return self._io[where][: shape[0]]


class PartPlans:
    """`Plan` for a model that was compiled for several GPUs by tensor: has a `Plan` for each part and runs one after
    the other."""

    def __init__(self, artifact, pages: Mapping[int, int] | None = None):
        self._parts = [Plan(rank_artifact(artifact, rank), pages) for rank in range(artifact.manifest["gpus"])]
        self.kv_types = self._parts[0].kv_types

    def write(self, name: str, values) -> None:
        for part in self._parts:
            part.write(name, values)

    def run(self, function: str) -> None:
        sent = np.zeros(0, np.uint8)
        for segment in segments(self._parts[0].artifact.manifest["functions"], function):
            computed = []
            for part in self._parts:
                part.take_over(segment, sent)
                part.run(segment)
                computed += part.sent(segment)
            sent = np.concatenate(computed or [sent])

    def read(self, name: str, rows: int) -> np.ndarray:
        return self._parts[0].read(name, rows)

    def clear(self) -> None:
        for part in self._parts:
            part.clear()


def plan_of(artifact, pages: Mapping[int, int] | None = None) -> Plan | PartPlans:
    return (PartPlans if artifact.manifest["gpus"] > 1 else Plan)(artifact, pages)


def _store(array: np.ndarray, wanted: Result, layout: str, role: str) -> None:
    if role != "output" or wanted.rows is None:
        array.reshape(-1)[: wanted.value.size] = wanted.value.reshape(-1)
        return
    if kind_of(layout) == "lanes":
        held = activations.read(layout, {"H": array})
        held[wanted.rows, : wanted.value.shape[-1]] = wanted.value
        array[...] = activations.in_layout(layout, held)
        return
    value = activations.in_layout(layout, wanted.value) if layout else wanted.value
    if array.ndim == 1:
        array[wanted.rows] = value
    elif array.ndim == 2 and wanted.columns is not None:
        array[np.ix_(wanted.rows, wanted.columns)] = value
    else:
        array[wanted.rows, ..., : value.shape[-1]] = value
