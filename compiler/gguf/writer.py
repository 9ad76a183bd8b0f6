"""Writes a model to a GGUF file, so that other programs (llama.cpp, for comparison) can run synthetic models.

In: any `GGUFModel`, opened or synthetic. Out: one GGUF file, version 3. Weights are streamed some rows at a time. The
file is renamed to its final name when it is complete; after an error no file is left.
"""

import os
from pathlib import Path

import gguf
import numpy as np

from mlc_amd.compiler.gguf.reader import GGUFModel
from mlc_amd.runtime.errors import UserError
from mlc_amd.schedules.formats import FORMATS

_CHUNK_BYTES = 16 << 20
WIDE = ".ple.layer_multipliers", ".ple.head_offsets", ".ple.head_vocab_sizes"  # lists of uint64


def write_gguf(model: GGUFModel, path: str | Path) -> None:
    """Writes `model` to `path`, replacing an existing file. Python values do not determine the types of metadata; they
    become the types that llama.cpp expects: uint32 (int32 in arrays and for negative numbers, uint64 for large ones and
    in WIDE), float32, bool, string. Raises UserError if the file cannot be written (full disk, missing folder, no
    permission)."""
    path = Path(path)
    partial = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        try:
            write_header(model, partial)
            with open(partial, "ab") as file:
                for tensor in model.stored.values():
                    step = max(1, _CHUNK_BYTES // tensor.row_bytes)
                    _pad(file)
                    for start in range(0, tensor.rows, step):
                        file.write(tensor.blocks(start, min(start + step, tensor.rows)).data)
                _pad(file)
                file.flush()
                os.fsync(file.fileno())
            os.replace(partial, path)
        finally:
            partial.unlink(missing_ok=True)
    except OSError as error:
        raise UserError(
            f"{path}: the file cannot be written ({error.strerror or error}); check the folder and the free space"
        ) from None


def write_header(model: GGUFModel, path: Path) -> None:
    """Writes everything before the first tensor's data, without the padding."""
    writer = gguf.GGUFWriter(path, model.config.architecture)
    for key, value in model.metadata.items():
        # The writer adds the architecture itself. The other skipped keys describe the layout of the source file.
        if key not in ("general.architecture", "general.alignment") and not key.startswith("split.") and value != []:
            of_entries = _value_type(value[0], True) if isinstance(value, list) else None
            wide = key.endswith(WIDE)
            writer.add_key_value(key, value, _value_type(value), gguf.GGUFValueType.UINT64 if wide else of_entries)
    for tensor in model.stored.values():
        kind = gguf.GGMLQuantizationType(FORMATS[tensor.format].gguf_type)
        # `kind` overrides the dtype. Only uint8 would matter: then the writer reads shapes as numbers of bytes.
        writer.add_tensor_info(tensor.name, tensor.shape, np.dtype(np.float32), tensor.nbytes, kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()


def _value_type(value: object, in_array: bool = False) -> gguf.GGUFValueType:
    kinds = gguf.GGUFValueType
    if isinstance(value, bool):
        return kinds.BOOL
    if isinstance(value, int):
        if not in_array and value >= 0:
            return kinds.UINT32 if value < 1 << 32 else kinds.UINT64
        return kinds.INT32 if -(1 << 31) <= value < 1 << 31 else kinds.INT64
    return {float: kinds.FLOAT32, str: kinds.STRING, list: kinds.ARRAY}[type(value)]


def _pad(file) -> None:
    file.write(bytes(-file.tell() % gguf.GGUF_DEFAULT_ALIGNMENT))
