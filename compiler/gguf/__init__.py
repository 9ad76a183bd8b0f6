"""GGUF files in, checked and typed models out: the compiler's only view of its input."""

from mlc_amd.compiler.gguf.check import expected_tensors
from mlc_amd.compiler.gguf.config import ARCHITECTURES, ModelConfig, RopeConfig
from mlc_amd.compiler.gguf.reader import GGUFModel, Tensor, read_metadata
from mlc_amd.compiler.gguf.synthetic import PRESETS, synthetic
from mlc_amd.compiler.gguf.writer import write_gguf

__all__ = [
    "ARCHITECTURES",
    "PRESETS",
    "GGUFModel",
    "ModelConfig",
    "RopeConfig",
    "Tensor",
    "expected_tensors",
    "read_metadata",
    "synthetic",
    "write_gguf",
]
