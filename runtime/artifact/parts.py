"""The part of an artifact that one of several GPUs gets (stages.py, ranks.py): its manifest and its weights."""

from collections.abc import Mapping

from mlc_amd.runtime.artifact.manifest import Manifest
from mlc_amd.runtime.artifact.weight_block import WeightBlock


class PartWeights(WeightBlock):
    """Some tensors of a block. tensors: the name that launches use to the name in the block."""

    def __init__(self, block: WeightBlock, tensors: Mapping[str, str]):
        super().__init__({name: block.header[stored] for name, stored in tensors.items()})
        self._block, self._tensors = block, tensors

    def read(self, at: int, target, keep: bool = True) -> None:
        self._block.read(at, target, keep)

    def __getitem__(self, name: str):
        return self._block[self._tensors[name]]


class PartArtifact:
    """The part of an artifact for one GPU. tensors: see `PartWeights`."""

    def __init__(self, artifact, manifest: Manifest, tensors: Mapping[str, str]):
        self.path, self.manifest = artifact.path, manifest
        self._artifact, self._tensors = artifact, tensors
        self._weights: PartWeights | None = None

    @property
    def weights(self) -> PartWeights:
        if self._weights is None:
            self._weights = PartWeights(self._artifact.open_weights(), self._tensors)
        return self._weights

    def release_weights(self) -> None:
        self._weights = None
