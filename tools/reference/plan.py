"""Whole functions of an artifact, launch by launch: the model's logits without its kernels.

In: an artifact; the plan, the shapes of all kernels' parameters and the weights are in it. Out: `Plan.run`, which does
what a device's `write`, `run` and `read` do. Weights are decoded once and kept as float32.
"""

import numpy as np

from mlc_amd.tools.reference import activations
from mlc_amd.tools.reference.compare import expected_of
from mlc_amd.tools.reference.operators import OPERATORS, SLOTS, Case, Result, results, used_slots


def layout_of(artifact) -> str:
    """Of weights and caches, as operators.py names it."""
    return "cpu" if artifact.manifest["target"]["kind"] == "cpu" else "gpu"


def without_reference(artifact) -> list[str]:
    """The kernels that operators.py does not compute."""
    return [entry["name"] for entry in artifact.manifest["kernels"] if entry["operator"] not in OPERATORS]


class Plan:
    """Keeps arena, cache and io, as a device does."""

    def __init__(self, artifact):
        self.artifact, manifest = artifact, artifact.manifest
        self._kernels = {entry["name"]: entry for entry in manifest["kernels"]}
        self._arena = np.zeros(manifest["arena_bytes"], np.uint8)
        self._kv = {entry["name"]: np.zeros(entry["shape"], entry["dtype"]) for entry in manifest["kv"]}
        self._io = {name: np.zeros(entry["shape"], entry["dtype"]) for name, entry in manifest["io"].items()}
        self._weights: dict[str, np.ndarray] = {}
        self._decoded: dict[int, np.ndarray] = {}

    def run(self, function: str, position: int, ids: np.ndarray) -> np.ndarray:
        """Logits [rows, vocab] of a step: of all `ids`, or of the last one, as the function gives them."""
        about = self.artifact.manifest["functions"][function]
        self._io["state"][:2] = position, len(ids)
        self._io["tokens"][: len(ids)] = ids
        for launch in about["launches"]:
            self._call(self._kernels[launch["kernel"]], launch["args"], (position, len(ids)))
        rows = len(ids) if about["all_logits"] else 1
        return self._io["logits"][:rows, : self.artifact.manifest["model"]["vocab"]].copy()

    def _call(self, kernel: dict, args: list, state: tuple[int, int]) -> None:
        arrays = {p["name"]: self._array(p, arg) for p, arg in zip(kernel["params"], args, strict=True)}
        op, own = kernel["operator"], kernel["args"]
        rows = used_slots(arrays, own, state[1]) if op in SLOTS else np.arange(min(state[1], own.get("m", 1)))
        case = Case(op, own, arrays, layout_of(self.artifact), state, rows, decoded=self._decoded)
        found, layout = results(case), own.get("layout", "")
        for param in kernel["params"]:
            name = param["name"]
            wanted = expected_of(param, found) if param["role"] in ("output", "cache") else None
            if wanted is None:
                continue
            if param["dtype"] == "int8":
                activations.write(layout, wanted.value, arrays, name[1:], _rows(wanted))
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
        return self._kv[where].reshape(shape) if kind == "kv" else self._io[where][: shape[0]]


def _rows(wanted: Result) -> np.ndarray:
    return np.arange(len(wanted.value)) if wanted.rows is None else wanted.rows


def _store(array: np.ndarray, wanted: Result, layout: str, role: str) -> None:
    if role == "cache" or wanted.rows is None:
        array.reshape(-1)[: wanted.value.size] = wanted.value.reshape(-1)
        return
    value = activations.in_layout(layout, wanted.value) if layout else wanted.value
    if array.ndim == 2 and wanted.columns is not None:
        array[np.ix_(wanted.rows, wanted.columns)] = value
    else:
        array[wanted.rows, ..., : value.shape[-1]] = value
