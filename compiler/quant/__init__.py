"""Lossless repacking of GGUF weights for a target. `repack` converts the blocks of a tensor's rows to the planes that
kernels read.

`blocks` decodes GGUF's blocks; `pack` writes the target's planes (`mlc_amd.schedules.cpu.linear.planes`).
"""

from mlc_amd.compiler.quant.pack import repack

__all__ = ["repack"]
