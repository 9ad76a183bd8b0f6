"""Opens the file of an image encoder, an mmproj file of GGUF's architecture `clip`.

In: its path. Out: `VisionFile`: metadata, `VisionConfig`, and the tensors as the graph takes them, read on demand. Any
defect is a `UserError` of one line. Names and shapes of all tensors are compared when the graph takes them.
"""

from pathlib import Path

from mlc_amd.compiler.gguf.header import FETCH_AGAIN
from mlc_amd.compiler.gguf.reader import open_file
from mlc_amd.compiler.gguf.tensor import Tensor
from mlc_amd.compiler.models.vision.config import VisionConfig
from mlc_amd.compiler.models.vision.prepare import prepared
from mlc_amd.compiler.models.vision.registry import read_vision
from mlc_amd.runtime.errors import UserError


class VisionFile:
    """See the module's docstring. `close` releases the file; blocks that were read stay valid."""

    def __init__(self, path: str | Path):
        self.path = str(path)
        self._file = open_file(self.path)
        self.close, self.check_unchanged, self.size = self._file.close, self._file.check_unchanged, self._file.size
        try:
            header = self._file.header
            self.metadata = header.metadata
            names = {entry.name for entry in header.tensors}
            self.config: VisionConfig = read_vision(header.metadata, names, self.path)
            stored = {entry.name: self._file.tensor(entry, flat=True) for entry in header.tensors}
            if len(stored) != len(header.tensors):
                raise UserError(f"{self.path}: two tensors have the same name; {FETCH_AGAIN}")
            self._file.check_overlap(stored)
            self.tensors: dict[str, Tensor] = prepared(self.config, stored, self.path)
        except BaseException:
            self.close()
            raise

    def check_used(self, used: set[str]) -> None:
        """UserError for a tensor that the graph did not take: it belongs to a variant whose results would differ."""
        if extra := next((name for name in self.tensors if name not in used), None):
            raise UserError(
                f"{self.path}: tensor {extra!r} is not part of the encoder of a {self.config.projector} projector as "
                "supported here; use another mmproj file"
            )
