"""Lossless repacking of GGUF weights for a target: `repack` turns the blocks of a tensor's rows into the planes that
kernels read.

`blocks` knows GGUF's, `pack` the target's planes (`mlc_amd.schedules.cpu.linear.planes`).
"""

from mlc_amd.compiler.quant.pack import repack

__all__ = ["repack"]
