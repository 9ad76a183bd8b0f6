"""Divides an artifact between GPUs by layers. Each stage has consecutive layers, their weights and their part of the
cache. The first stage also has what comes before the layers, the last one what comes after them.

In: a manifest. Out: a `Stage` for each GPU, whose manifest is that of an artifact with fewer launches. All stages have
the same layout of the arena. A step continues in the next stage after the bytes that its launches still read have been
copied from one arena to the other. These bytes are "sends" of the function in one stage and "receives" in the next one.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import cast

from mlc_amd.runtime.artifact.manifest import LaunchArgument, Manifest, ManifestFunction, ManifestLaunch, is_draft
from mlc_amd.runtime.artifact.memory import nbytes
from mlc_amd.runtime.artifact.parts import PartArtifact
from mlc_amd.runtime.artifact.weight_block import byte_count
from mlc_amd.runtime.errors import UserError

BEFORE = -1  # the number that launches before the first layer have as their layer
_LAYER = re.compile(r"blk\.(\d+)\.")
_READ = ("input",)  # roles of parameters through which kernels read the arena
_WRITTEN = ("output", "work", "zero")
_OWN = ("cache", "states")  # roles of what a layer keeps from step to step

Bytes = tuple[int, int]  # first, end


@dataclass(frozen=True)
class Stage:
    """manifest: of the part. weights: the names of its tensors. layers: the number of its layers."""

    manifest: Manifest
    weights: frozenset[str]
    layers: int

    def of(self, artifact) -> PartArtifact:
        """The part of `artifact`, which was divided, for the stage's device."""
        return PartArtifact(artifact, self.manifest, {name: name for name in self.weights})


def layer_bytes(manifest: Manifest, sizes: Mapping[str, int]) -> list[int]:
    """Bytes of weights and cache that a step reads, for each layer. What comes after the last layer counts as part of
    it. sizes: bytes of the weights' tensors."""
    kept = {entry["name"]: nbytes(entry) for entry in manifest["kv"]}
    found, seen = [0] * _count(manifest), set()
    for function in _steps(manifest):
        for launch, layer in zip(function["launches"], _layers(function), strict=True):
            for kind, where, *_ in launch["args"]:
                if layer > BEFORE and kind in ("weight", "kv") and (key := (kind, where, layer)) not in seen:
                    seen.add(key)
                    found[layer] += sizes.get(str(where), 0) if kind == "weight" else kept[str(where)]
    return found


def divide(manifest: Manifest, sizes: Mapping[str, int], shares: Sequence[float]) -> list[int]:
    """The first layer of each stage except the first stage, chosen so that the bytes of the stages are closest to
    `shares`. Raises UserError if the model has too few layers."""
    ends = [0, *accumulate(layer_bytes(manifest, sizes))]
    if manifest["model"]["draft"]:
        raise UserError("a model that is compiled with a draft runs on one GPU: leave --devices or the draft out")
    allowed, found = _borders(manifest), []
    for i, wanted in enumerate(accumulate(shares[:-1])):
        left = len(shares) - 2 - i  # borders still to be found after this one
        rest = [border for border in allowed if border > (found[-1] if found else 0)]
        if len(rest) <= left:
            raise UserError(
                f"{len(shares)} GPUs: this model can only be divided between {most_stages(manifest)} at most"
            )
        target = ends[-1] * wanted / sum(shares)
        found.append(min(rest[: len(rest) - left], key=lambda border: abs(ends[border] - target)))
    return found


def most_stages(manifest: Manifest) -> int:
    """The largest number of GPUs that a model can be divided between."""
    return len(_borders(manifest)) + 1


def stages(manifest: Manifest, borders: Sequence[int], sizes: Mapping[str, int]) -> list[Stage]:
    """The stages. borders: the result of `divide`. sizes: see `divide`."""
    launched = {name: _by_stage(name, function, borders) for name, function in manifest["functions"].items()}
    roles = _roles(manifest)
    crossing = {
        name: _crossing(manifest["functions"][name]["launches"], stages_of, len(borders), roles)
        for name, stages_of in launched.items()
    }
    ends = [0, *borders, _count(manifest)]
    return [
        _stage(manifest, number, ends[number + 1] - ends[number], launched, crossing, sizes)
        for number in range(len(borders) + 1)
    ]


def _stage(
    manifest: Manifest,
    number: int,
    layers: int,
    launched: Mapping[str, Sequence[int]],
    crossing: Mapping[str, Sequence[list[Bytes]]],
    sizes: Mapping[str, int],
) -> Stage:
    functions: dict[str, ManifestFunction] = {}
    used: dict[str, set[str]] = {"weight": set(), "kv": set(), "kernel": set()}
    for name, function in manifest["functions"].items():
        places = zip(function["launches"], launched[name], strict=True)
        own = [launch for launch, stage in places if stage == number]
        if not own:
            continue
        cuts = crossing[name]
        functions[name] = cast(ManifestFunction, {
            **function,
            "launches": own,
            "receives": [[*part] for part in cuts[number - 1]] if number else [],
            "sends": [[*part] for part in cuts[number]] if number < len(cuts) else [],
        })  # fmt: skip
        for launch in own:
            used["kernel"].add(launch["kernel"])
            for kind, where, *_ in launch["args"]:
                if kind in used:
                    used[kind].add(str(where))
    kept = [entry for entry in manifest["kv"] if entry["name"] in used["kv"]]
    tensors = {name: entry for name, entry in manifest["tensors"].items() if name in used["weight"]}
    others = _called(manifest) - used["kernel"]
    launches = {
        arch: {name: entry for name, entry in found.items() if name not in others}
        for arch, found in manifest["launches"].items()
    }
    part = {**manifest, "functions": functions, "kv": kept, "tensors": tensors, "launches": launches}
    part["weight_bytes"] = sum(sizes[name] for name in used["weight"])
    return Stage(cast(Manifest, part), frozenset(used["weight"]), layers)


def _called(manifest: Manifest) -> set[str]:
    """The kernels that functions call. The device launches the other kernels itself."""
    return {launch["kernel"] for function in manifest["functions"].values() for launch in function["launches"]}


def _steps(manifest: Manifest) -> list[ManifestFunction]:
    """The functions that compute all layers."""
    return [function for name, function in manifest["functions"].items() if not is_draft(name)]


def _roles(manifest: Manifest) -> dict[str, list[str]]:
    """The roles of each kernel's parameters."""
    return {entry["name"]: [param["role"] for param in entry["params"]] for entry in manifest["kernels"]}


def _count(manifest: Manifest) -> int:
    """The number of layers, without layers that guess tokens."""
    return 1 + max(max(_layers(function)) for function in _steps(manifest))


def _layers(function: ManifestFunction) -> list[int]:
    """The layer of each launch: the smallest layer whose tensors it has (it may also have the norm of the next layer),
    but not less than the layer of the launch before."""
    layer, found = BEFORE, []
    for launch in function["launches"]:
        named = [int(match[1]) for _, where, *_ in launch["args"] if (match := _LAYER.match(str(where)))]
        layer = max(layer, min(named, default=layer))
        found.append(layer)
    return found


def _by_stage(name: str, function: ManifestFunction, borders: Sequence[int]) -> list[int]:
    """The stage of each launch. Functions that guess tokens are in the last stage."""
    if is_draft(name):
        return [len(borders)] * len(function["launches"])
    return [sum(border <= layer for border in borders) for layer in _layers(function)]


def _borders(manifest: Manifest) -> list[int]:
    """The layers with which a stage may begin. Layers that share a cache must be in one stage."""
    roles, users = _roles(manifest), dict[str, set[int]]()
    for function in _steps(manifest):
        for launch, layer in zip(function["launches"], _layers(function), strict=True):
            for (kind, where, *_), role in zip(launch["args"], roles[launch["kernel"]], strict=True):
                if kind == "kv" and role in _OWN:
                    users.setdefault(str(where), set()).add(layer)
    shared = [(min(of), max(of)) for of in users.values()]
    return [
        border for border in range(1, _count(manifest)) if not any(first < border <= last for first, last in shared)
    ]


def _crossing(
    launches: Sequence[ManifestLaunch], stage_of: Sequence[int], cuts: int, roles: Mapping[str, Sequence[str]]
) -> list[list[Bytes]]:
    """For each border between stages: the ranges of the arena that earlier stages write and later stages read."""
    crossing: list[set[Bytes]] = [set() for _ in range(cuts)]
    written: list[tuple[Bytes, int]] = []  # disjoint ranges, each with the stage of the last launch that wrote it
    for launch, stage in zip(launches, stage_of, strict=True):
        parts = [
            (_bytes(arg), role)
            for arg, role in zip(launch["args"], roles[launch["kernel"]], strict=True)
            if arg[0] == "arena"
        ]
        for (first, end), role in parts:
            if role in _READ:
                for (begin, stop), writer in written:
                    if begin < end and first < stop:
                        for cut in range(writer, stage):
                            crossing[cut].add((max(begin, first), min(stop, end)))
        for (first, end), role in parts:
            if role in _WRITTEN:
                written = [
                    (piece, writer)
                    for (begin, stop), writer in written
                    for piece in ((begin, min(stop, first)), (max(begin, end), stop))
                    if piece[0] < piece[1]
                ]
                written.append(((first, end), stage))
    return [_merged(parts) for parts in crossing]


def _bytes(arg: LaunchArgument) -> Bytes:
    """The range of an argument in the arena."""
    _, first, dtype, shape = cast(tuple[str, int, str, list[int]], tuple(arg))
    return first, first + byte_count(dtype, shape)


def _merged(parts: set[Bytes]) -> list[Bytes]:
    found: list[Bytes] = []
    for first, end in sorted(parts):
        if found and first <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], end)
        else:
            found.append((first, end))
    return found
