"""The parts of an artifact that was compiled for several GPUs by tensor (compiler/models/shards.py): one for each, with
its own weights and the same launches.

In: an artifact. Out: `RankArtifact` for each GPU. Its manifest has each function cut into segments before the launches
that need what other GPUs computed: "decode", "decode.1" and so on. What a segment "sends", of all GPUs in their order,
the next one "receives": bytes of the arena, as of the stages of stages.py.
"""

from collections.abc import Collection, Iterator, Mapping
from typing import cast

from mlc_amd.runtime.artifact.manifest import LaunchArgument, Manifest, ManifestFunction, ManifestLaunch
from mlc_amd.runtime.artifact.weight_block import WeightBlock, byte_count

EXCHANGES = ("all_reduce", "all_gather")  # operators that take what all GPUs computed
RANK = "@"  # see compiler/models/shards.py
SENT, RECEIVED = "X", "P"  # parameters of these: what the GPU computed, and the parts of all


class RankWeights(WeightBlock):
    """The tensors of a part, under the names that launches have. tensors: the file's names by these."""

    def __init__(self, block: WeightBlock, tensors: Mapping[str, str]):
        super().__init__({name: block.header[stored] for name, stored in tensors.items()})
        self._block, self._tensors = block, tensors

    def read(self, at: int, target, keep: bool = True) -> None:
        self._block.read(at, target, keep)

    def __getitem__(self, name: str):
        return self._block[self._tensors[name]]


class RankArtifact:
    """What a device takes of an artifact, for one GPU."""

    def __init__(self, artifact, rank: int):
        self._artifact = artifact
        self.path, sizes = artifact.path, {name: size for name, (_, size) in artifact.weights.places.items()}
        self._tensors = _tensors(sizes, rank)
        self.manifest = _part(artifact.manifest, rank, self._tensors, sizes)
        self._weights: RankWeights | None = None

    @property
    def weights(self) -> RankWeights:
        if self._weights is None:
            self._weights = RankWeights(self._artifact.open_weights(), self._tensors)
        return self._weights

    def release_weights(self) -> None:
        self._weights = None


def segments(manifest: Manifest, name: str) -> list[str]:
    """The names of a function's segments."""
    count = sum(_is_exchange(manifest)[launch["kernel"]] for launch in manifest["functions"][name]["launches"])
    return [segment(name, i) for i in range(count + 1)]


def segment(name: str, number: int) -> str:
    return f"{name}.{number}" if number else name


def _tensors(names: Collection[str], rank: int) -> dict[str, str]:
    """The file's name of each tensor that launches name: the part of that rank, if there is one."""

    def stored(name: str) -> str:
        tensor, slash, plane = name.partition("/")
        own = f"{tensor}{RANK}{rank}{slash}{plane}"
        return own if own in names else name

    return {name: stored(name) for name in names if RANK not in name}


def _part(manifest: Manifest, rank: int, tensors: Mapping[str, str], sizes: Mapping[str, int]) -> Manifest:
    functions = {
        segment(name, i): one
        for name, function in manifest["functions"].items()
        for i, one in enumerate(_segments(manifest, function, rank))
    }
    drawn = manifest["tensors"]
    return cast(Manifest, {
        **manifest,
        "functions": functions,
        "tensors": {name: drawn[stored] for name, stored in tensors.items() if stored in drawn},
        "weight_bytes": sum(sizes[stored] for stored in tensors.values()),
    })  # fmt: skip


def _is_exchange(manifest: Manifest) -> dict[str, bool]:
    return {kernel["name"]: kernel["operator"] in EXCHANGES for kernel in manifest["kernels"]}


def _segments(manifest: Manifest, function: ManifestFunction, rank: int) -> Iterator[ManifestFunction]:
    exchange = _is_exchange(manifest)
    params = {kernel["name"]: [param["name"] for param in kernel["params"]] for kernel in manifest["kernels"]}
    launches: list[ManifestLaunch] = []
    received: list[list[int]] = []
    for launch in function["launches"]:
        if exchange[launch["kernel"]]:
            args = dict(zip(params[launch["kernel"]], launch["args"], strict=True))
            (first, end) = sent = _bytes(args[SENT])
            cut = {"receives": received, "sends": [sent], "sends_at": rank * (end - first)}
            yield cast(ManifestFunction, {**function, "launches": launches, **cut})
            launches, received = [], [_bytes(args[RECEIVED])]
        launches.append(launch)
    yield cast(ManifestFunction, {**function, "launches": launches, "receives": received, "sends": []})


def _bytes(arg: LaunchArgument) -> list[int]:
    _, first, dtype, shape = cast(tuple[str, int, str, list[int]], tuple(arg))
    return [first, first + byte_count(dtype, shape)]
