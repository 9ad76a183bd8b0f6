"""Opens the file of a draft that reads rows of the model for which it guesses.

In: its path, and the configuration of that model. Out: `DraftFile`: the configuration of both together, and the draft's
tensors under the names that the graph uses, read on demand. Raises a `UserError` of one line for any defect of the
file.
"""

from pathlib import Path

import gguf
import numpy as np

from mlc_amd.compiler.gguf.header import FETCH_AGAIN, TensorEntry
from mlc_amd.compiler.gguf.reader import check_expected, open_file, read_metadata
from mlc_amd.compiler.gguf.tensor import Tensor
from mlc_amd.compiler.models.config import ModelConfig
from mlc_amd.compiler.models.drafts.files import DRAFTS, PLACES, PREFIX, TOKENS, joined, read_draft, tensors
from mlc_amd.runtime.errors import UserError

_INTEGERS = {int(gguf.GGMLQuantizationType.I32): np.int32, int(gguf.GGMLQuantizationType.I64): np.int64}


def is_draft(path: str | Path) -> bool:
    """Whether the GGUF file holds a draft that must be compiled together with its model."""
    return read_metadata(path).get("general.architecture") in DRAFTS


class DraftFile:
    """An opened draft, see the module. `close` releases the file; blocks that were read stay valid."""

    def __init__(self, path: str | Path, model: ModelConfig):
        self.path = str(path)
        self._file = open_file(self.path)
        self.close, self.check_unchanged, self.size = self._file.close, self._file.check_unchanged, self._file.size
        try:
            header = self._file.header
            draft = read_draft(header.metadata, {entry.name: entry.shape for entry in header.tensors}, self.path)
            self.config = joined(model, draft)
            entries = [entry for entry in header.tensors if entry.name not in (TOKENS, *draft.unused)]
            stored = {entry.name: self._file.tensor(entry) for entry in entries}
            if len(stored) != len(entries):
                raise UserError(f"{self.path}: two tensors have the same name; {FETCH_AGAIN}")
            check_expected(dict(tensors(draft, model)), set(), stored, self.path, draft.config.architecture)
            first = len(model.decoder_layers)
            self.tensors = {(new := _named(name, first)): _alias(tensor, new) for name, tensor in stored.items()}
            for entry in header.tensors:
                if entry.name == TOKENS:
                    self.tensors[PLACES] = self._places(entry, model.vocab)
        except BaseException:
            self.close()
            raise

    def _places(self, entry: TensorEntry, vocab: int) -> Tensor:
        """For each token, the row of the draft's output with its logit, -1 for none: float32 [vocab]."""
        dtype = _INTEGERS.get(entry.gguf_type)
        if dtype is None or len(entry.shape) != 1:
            raise UserError(f"{self.path}: tensor {entry.name} is not a list of token numbers; convert the model again")
        data = self._file.read(entry.offset, entry.shape[0] * np.dtype(dtype).itemsize)
        tokens = np.frombuffer(data, dtype).astype(np.int64)
        if tokens.size and (tokens.min() < 0 or tokens.max() >= vocab):
            raise UserError(
                f"{self.path}: tensor {entry.name} has tokens that the model lacks; convert the model again"
            )
        places = np.full(vocab, -1, np.float32)
        places[tokens] = np.arange(tokens.size)
        return Tensor.made(PLACES, places.shape, lambda: places)


def _named(name: str, first: int) -> str:
    """The name of a draft's tensor among the tensors of a model with `first` layers."""
    kind, _, rest = name.partition(".")
    number, _, own = rest.partition(".")
    return f"blk.{first + int(number)}.{own}" if kind == "blk" and number.isdigit() else PREFIX + name


def _alias(tensor: Tensor, name: str) -> Tensor:
    return tensor.part(name, 0, tensor.shape)
