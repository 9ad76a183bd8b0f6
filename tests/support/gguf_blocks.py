"""Random GGUF blocks of every tensor type, with scales of a size that a model has, and what they mean."""

import gguf
import numpy as np

from mlc_amd.compiler.gguf.synthetic import SCALE_FIELDS, SPREAD_SCALE
from mlc_amd.compiler.quant import repack
from mlc_amd.schedules.formats import FORMATS

EXPONENTS = (118, 123)  # of mxfp4's scales, 2**-10 to 2**-6

# The first of the types whose kernels differ in nothing but constants
DISTINCT = list(
    {
        (f.codes or f.name, len(f.table or ()), f.block, f.group, f.scales, f.dtype): f.name
        for f in reversed(FORMATS.values())
    }.values()
)[::-1]


def set_halves(name: str, blocks: np.ndarray, bits) -> None:
    """Sets the float16 numbers of blocks [..., bytes]. bits(): their bits, uint16 [..., 1], called for each."""
    for offset in SCALE_FIELDS.get(name, ()):  # random bits there would be NaNs
        blocks[..., offset : offset + 2] = bits().view(np.uint8)
    if name in SPREAD_SCALE:
        fields = blocks[..., SPREAD_SCALE[name] :].view(np.uint16)
        fields[...] = fields & 0x0FFF | (bits() >> np.uint16([0, 4, 8, 12])) << 12


def random_blocks(name: str, n: int, k: int, rng: np.random.Generator) -> np.ndarray:
    """n rows of k columns, uint8 [n, bytes]: float weights ~ N(0, 1), codes and sub-scales of integer types random."""
    fmt = FORMATS[name]
    if fmt.kind == "float":
        w = rng.standard_normal((n, k), np.float32)
        return ((w.view(np.uint32) >> 16).astype(np.uint16) if name == "bf16" else w.astype(fmt.dtype)).view(np.uint8)
    blocks = rng.integers(0, 256, (n, k // fmt.block, fmt.block_bytes), np.uint8)
    size = (*blocks.shape[:2], 1)
    set_halves(name, blocks, lambda: (rng.standard_normal(size) * 0.01).astype(np.float16).view(np.uint16))
    if name == "mxfp4":
        blocks[..., 0] = rng.integers(*EXPONENTS, blocks.shape[:2])
    return blocks.reshape(n, -1)


def weights(name: str, n: int, k: int, seed: int, layout: str) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """A random weight: its planes in that layout, and the float32 matrix [n, k] that gguf-py makes of the same
    blocks."""
    raw = random_blocks(name, n, k, np.random.default_rng([seed, n, k, *name.encode()]))
    planes = {p: np.ascontiguousarray(a) for p, a in repack(name, raw, k, layout).items()}
    return planes, gguf.quants.dequantize(raw, gguf.GGMLQuantizationType(FORMATS[name].gguf_type)).reshape(n, k)
