"""Opens the file of an image encoder: an mmproj file of GGUF's architecture `clip`.

In: its path. Out: `VisionFile`: metadata, `VisionConfig`, and the tensors for the graph, read on demand. Raises a
`UserError` of one line for any defect. Names and shapes of tensors are checked when the graph uses them.
"""

import math
from pathlib import Path

from mlc_amd.compiler.gguf.header import FETCH_AGAIN
from mlc_amd.compiler.gguf.reader import open_file
from mlc_amd.compiler.gguf.tensor import Tensor
from mlc_amd.compiler.models.vision.config import VisionConfig
from mlc_amd.compiler.models.vision.prepare import prepared
from mlc_amd.compiler.models.vision.registry import read_vision
from mlc_amd.runtime.errors import UserError
from mlc_amd.runtime.images.projectors import Preparation

LISTED = 64  # longest list in the metadata that is kept


class VisionFile:
    """An opened image encoder, see the module. `close` releases the file; blocks that were read stay valid. kept: the
    metadata that are needed to prepare pictures, for the manifest: keys `clip.*`, without long lists."""

    def __init__(self, path: str | Path):
        self.path = str(path)
        self._file = open_file(self.path)
        self.close, self.check_unchanged, self.size = self._file.close, self._file.check_unchanged, self._file.size
        try:
            header = self._file.header
            self.metadata = header.metadata
            names = {entry.name for entry in header.tensors}
            self.config: VisionConfig = read_vision(header.metadata, names, self.path)
            self.kept = self._checked()
            stored = {entry.name: self._file.tensor(entry, flat=True) for entry in header.tensors}
            if len(stored) != len(header.tensors):
                raise UserError(f"{self.path}: two tensors have the same name; {FETCH_AGAIN}")
            self._file.check_overlap(stored)
            self.tensors: dict[str, Tensor] = prepared(self.config, stored, self.path)
        except BaseException:
            self.close()
            raise

    def _checked(self) -> dict[str, object]:
        """The metadata `kept`. Raises UserError for values with which pictures cannot be prepared."""
        kept = {
            key: value
            for key, value in self.metadata.items()
            if key.startswith("clip.") and not (isinstance(value, list) and len(value) > LISTED)
        }
        for key, value in kept.items():
            for one in value if isinstance(value, list) else [value]:
                if isinstance(one, float) and not math.isfinite(one):
                    raise UserError(f"{self.path}: metadata key {key} is {one}; convert the model again")
        try:
            Preparation({"projector": self.config.projector, "metadata": kept})
        except UserError as error:
            raise UserError(f"{self.path}: {error}") from error
        return kept

    @property
    def exact(self) -> bool:
        """Whether its layers have float32 matrices. Products with others round their input to 16 bits or less."""
        of_layers = (tensor for name, tensor in self.tensors.items() if name.startswith("v.blk."))
        return any(tensor.format == "f32" and len(tensor.shape) == 2 for tensor in of_layers)

    def check_used(self, used: set[str]) -> None:
        """Raises UserError for a tensor that the graph did not use: a variant's results would be wrong."""
        if extra := next((name for name in self.tensors if name not in used), None):
            raise UserError(
                f"{self.path}: tensor {extra!r} is not part of the encoder of a {self.config.projector} projector as "
                "supported here; use another mmproj file"
            )
