"""Reads GGUF files into checked, typed models. Other parts of the compiler do not read GGUF files themselves."""

from mlc_amd.compiler.gguf.presets import PRESETS
from mlc_amd.compiler.gguf.reader import GGUFModel, read_metadata
from mlc_amd.compiler.gguf.synthetic import synthetic
from mlc_amd.compiler.gguf.tensor import Tensor
from mlc_amd.compiler.gguf.writer import write_gguf

__all__ = ["PRESETS", "GGUFModel", "Tensor", "read_metadata", "synthetic", "write_gguf"]
