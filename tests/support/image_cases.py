"""Pictures made by a formula, and what llama.cpp's preprocessing makes of them (tests/dev/image_references.py)."""

import json
from hashlib import blake2b
from pathlib import Path

import numpy as np
from PIL import Image

REFERENCES = Path(__file__).parents[1] / "fixtures" / "images" / "references.json"


def picture(width: int, height: int) -> Image.Image:
    """Smooth areas and sharp edges, other ones in each colour."""
    x, y = np.arange(width)[None, :], np.arange(height)[:, None]
    planes = [x * 3 + y * 5, (x * x // 7 + y * y // 11) * 2, (x ^ y) * 9 + (x * y) // 13]
    return Image.fromarray(np.stack([plane.astype(np.int64) % 256 for plane in planes], -1).astype(np.uint8))


def digest(pixels: np.ndarray) -> str:
    """Of float32 [3, height, width]."""
    return blake2b(np.ascontiguousarray(pixels, "<f4").tobytes(), digest_size=8).hexdigest()


def references() -> dict[str, dict]:
    """By case: "vision" (as in a manifest) and "pictures": by size what becomes of it: "texts" before, between and
    after tiles, and of each tile "size", "rows", "pixels" (a digest)."""
    return json.loads(REFERENCES.read_text())
