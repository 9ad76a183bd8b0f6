"""The parts of an artifact that was compiled for several GPUs by tensor (compiler/models/shards.py). Each GPU (rank)
gets a part with its own weights and the same launches.

In: an artifact. Out: a `PartArtifact` for each rank. Its manifest has each function cut into segments ("decode",
"decode.1" and so on): a new segment begins before each launch that needs results of other GPUs. The next segment
"receives" what a segment of all ranks, in their order, "sends": bytes of the arena, as in stages.py. If kernels
exchange parts while they run, an exchanging kernel replaces such a launch, perhaps together with the launch before it,
and nothing is cut.

A chunk's function that was cut exists twice: "prefill_512@" has its own inputs and arena, so that one chunk may be
computed while rows of another are copied between GPUs (runtime/devices/tensor.py).
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import groupby
from typing import cast

from mlc_amd.runtime.artifact.io_names import BESIDE, OF_STEP
from mlc_amd.runtime.artifact.manifest import (
    RANK,
    LaunchArgument,
    Manifest,
    ManifestFunction,
    ManifestKernel,
    ManifestLaunch,
    ManifestParam,
    boxes_of,
)
from mlc_amd.runtime.artifact.parts import PartArtifact
from mlc_amd.runtime.artifact.weight_block import byte_count
from mlc_amd.runtime.exchange_layout import EXCHANGING, joint_name, joint_params, kernels_in

EXCHANGES = ("all_reduce", "all_gather")  # operators that take results of all GPUs
SENT, RECEIVED = "X", "P"  # parameters of these operators: the result of this GPU, and the results of all


def rank_artifact(artifact, rank: int, inline: bool = False) -> PartArtifact:
    """The part of one rank. inline: whether kernels exchange parts while they run, if there are exchanging kernels."""
    sizes = {name: size for name, (_, size) in artifact.weights.places.items()}
    tensors = _tensors(sizes, rank)
    return PartArtifact(artifact, _part(_Cutter(artifact.manifest, rank, inline), tensors, sizes), tensors)


def segments(functions: Collection[str], name: str, mark: str = ".") -> list[str]:
    """The names of a function's segments among `functions`. mark: what comes before their numbers. PIECE: the pieces of
    a function that encodes images, in any artifact."""
    found = [name]
    while (following := f"{name}{mark}{len(found)}") in functions:
        found.append(following)
    return found


def _tensors(names: Collection[str], rank: int) -> dict[str, str]:
    """The name in the file for each tensor name in launches: the rank's own part if there is one."""

    def stored(name: str) -> str:
        tensor, slash, plane = name.partition("/")
        own = f"{tensor}{RANK}{rank}{slash}{plane}"
        return own if own in names else name

    return {name: stored(name) for name in names if RANK not in name}


def _part(cutter: "_Cutter", tensors: Mapping[str, str], sizes: Mapping[str, int]) -> Manifest:
    manifest = cutter.manifest
    functions = {
        f"{name}.{i}" if i else name: one
        for name, function in manifest["functions"].items()
        for i, one in enumerate(cutter.segments(function))
    }
    drawn, launches, arena = manifest["tensors"], manifest["launches"], manifest["arena_bytes"]
    chunks = [name for name, of in manifest["functions"].items() if not of["single"] and of["samples"]]
    beside = {
        f"{name}{BESIDE}{one.removeprefix(name)}": _beside(functions[one], arena)
        for name in chunks
        if len(cut := segments(functions, name)) > 1
        for one in cut
    }
    io = manifest["io"]
    return cast(Manifest, {
        **manifest,
        "functions": functions | beside,
        "io": io | ({name + BESIDE: io[name] for name in OF_STEP if name in io} if beside else {}),
        "arena_bytes": arena * (2 if beside else 1),
        "tensors": {name: drawn[stored] for name, stored in tensors.items() if stored in drawn},
        "launches": {arch: {k: of for k, of in found.items() if cutter.uses(k)} for arch, found in launches.items()},
        "kernels": [*manifest["kernels"], *cutter.exchanging()],
        "weight_bytes": (count := sum(sizes[stored] for stored in tensors.values())),
        "part_bytes": count,
        "inline": cutter.inline,
    })  # fmt: skip


def _beside(segment: ManifestFunction, arena: int) -> ManifestFunction:
    """A copy of a segment with its own inputs. What it has in the arena is moved by `arena` bytes."""

    def moved(arg: LaunchArgument) -> LaunchArgument:
        kind, where, *rest = cast(tuple, tuple(arg))
        if kind == "arena":
            return cast(LaunchArgument, [kind, where + arena, *rest])
        return cast(LaunchArgument, [kind, where + BESIDE, *rest] if kind == "io" and where in OF_STEP else arg)

    launches = [
        ManifestLaunch(kernel=launch["kernel"], args=[moved(arg) for arg in launch["args"]])
        for launch in segment["launches"]
    ]
    spans = {
        key: [[first + arena, end + arena] for first, end in of]
        for key in ("sends", "receives")
        if (of := segment.get(key)) is not None
    }
    own = {"own": [place + arena for place in segment["own"][:2]] + segment["own"][2:]} if "own" in segment else {}
    return cast(ManifestFunction, {**segment, "launches": launches, **spans, **own})


def _is_exchange(kernel: ManifestKernel) -> bool:
    return kernel["operator"] in EXCHANGES


def _exchanging(name: str, kernels: Sequence[ManifestKernel]) -> ManifestKernel:
    """The entry of a kernel that exchanges parts while it runs, and replaces `kernels`. The added parameter has the
    role "zero", because its workgroups must all run at the same time, like those of kernels with such memory."""
    box: ManifestParam = {"name": "Inbox", "role": "zero", "dtype": "int64", "shape": [1]}
    return {**kernels[0], "name": name, "params": [*joint_params([one["params"] for one in kernels]), box]}


class _Cutter:
    """Cuts the functions of a manifest for one rank. inline: see `rank_artifact`."""

    def __init__(self, manifest: Manifest, rank: int, inline: bool):
        self.manifest, self.inline, self._rank = manifest, inline, rank
        self._words = manifest["exchange"]["words"] if inline and "exchange" in manifest else {}
        self._kernels = {kernel["name"]: kernel for kernel in manifest["kernels"]}
        self._exchanges = {name for name, kernel in self._kernels.items() if _is_exchange(kernel)}

    def uses(self, kernel: str) -> bool:
        """Whether launches of the part may use that kernel: an exchanging kernel, or the one that it replaces."""
        if kernel.startswith(EXCHANGING):
            return kernel in self._words
        return EXCHANGING + kernel not in self._words

    def exchanging(self) -> Iterator[ManifestKernel]:
        """The entries of the kernels that exchange parts while they run."""
        for name in self._words:
            if all(one in self._kernels for one in kernels_in(name)):
                yield _exchanging(name, [self._kernels[one] for one in kernels_in(name)])

    def _joined(self, launches: Sequence[ManifestLaunch]) -> Iterator[ManifestLaunch]:
        """The launches, where two launches that a joint kernel replaces have become one."""
        left = [*launches]
        while left:
            launch = left.pop(0)
            if left and (name := joint_name(launch["kernel"], left[0]["kernel"])) in self._words:
                yield ManifestLaunch(kernel=name, args=joint_params([launch["args"], left.pop(0)["args"]]))
            else:
                yield launch

    def segments(self, function: ManifestFunction) -> Iterator[ManifestFunction]:
        launches: list[ManifestLaunch] = []
        received: dict[str, list] = {"receives": []}
        rounds: list[list[int]] = []
        for launch in self._joined(function["launches"]):
            kernel = launch["kernel"]
            name = kernel if kernel in self._words else EXCHANGING + kernel
            if (words := self._words.get(name)) is not None:
                boxes: list[LaunchArgument] = [["box", box] for box in boxes_of(self.manifest)]
                launch = ManifestLaunch(kernel=name, args=[*launch["args"], *boxes])
                rounds.append([1, words])
            elif kernel in self._exchanges:
                names = [param["name"] for param in self._kernels[kernel]["params"]]
                args = dict(zip(names, launch["args"], strict=True))
                (first, end), (parts, last) = _bytes(args[SENT]), _bytes(args[RECEIVED])
                count = end - first
                cut = {"sends": [[first, end]], "sends_at": [self._rank * count]}
                yield _segment(function, launches, received, rounds, **cut)
                own = parts + self._rank * count
                spans = [[a, b] for a, b in ((parts, own), (own + count, last)) if a < b]
                received = {"receives": spans, "receives_at": [a - parts for a, _ in spans], "own": [first, own, count]}
                launches, rounds = [], []
            launches.append(launch)
        yield _segment(function, launches, received, rounds, sends=[])


def _segment(function: ManifestFunction, launches, received, rounds, **sent) -> ManifestFunction:
    joined = [[len([*same]), words] for words, same in groupby(words for _, words in rounds)]
    return cast(ManifestFunction, {**function, "launches": launches, "rounds": joined, **received, **sent})


def _bytes(arg: LaunchArgument) -> list[int]:
    _, first, dtype, shape = cast(tuple[str, int, str, list[int]], tuple(arg))
    return [first, first + byte_count(dtype, shape)]
