"""What `mlc-amd bench --image` measures of a model with an image encoder: the encoder's time, from prepared pixels to
features, by the size of pictures and by their number in a call.

In: the options' model, sizes. Out: results with the fields of bench_formats.py, and "images_per_s". t/s counts tokens:
rows of features.
"""

import re
from collections.abc import Iterator, Sequence

import numpy as np

from mlc_amd.runtime.errors import UsageError
from mlc_amd.runtime.options import LoadOptions
from mlc_amd.tools import picture_features
from mlc_amd.tools.measure.bench_encoder import described, result, timed


def sizes_of(names: Sequence[str]) -> list[tuple[int, int]]:
    """(width, height) of each "WIDTHxHEIGHT"; commas separate several in one text. Raises UsageError otherwise."""
    found = []
    for name in ",".join(names).split(","):
        if not (sides := re.fullmatch(r"([1-9]\d{0,4})x([1-9]\d{0,4})", name)):
            raise UsageError(f"--image {name}: it must be WIDTHxHEIGHT in pixels, as 1024x768")
        found.append((int(sides[1]), int(sides[2])))
    return found


def measure(
    load: LoadOptions, sizes: Sequence[tuple[int, int]], counts: Sequence[int], repetitions: int
) -> Iterator[dict]:
    """A result for each size and each number of pictures. Raises UserError for a model without an image encoder, or a
    picture that it cannot take."""
    from PIL import Image  # bundles of models without an image encoder lack it

    with picture_features.opened(load) as sees:
        encode, about, rng = sees.encoder.encode, described(sees.artifact, sees.device), np.random.default_rng(0)
        for width, height in sizes:
            tiles = sees.tiles(Image.fromarray(rng.integers(0, 256, (height, width, 3), np.uint8)))
            rows = sum(one.rows for one in tiles)
            for count in counts:
                images = tiles * count
                seconds = timed(lambda images=images: encode(images), sees.device, repetitions)
                yield (
                    about
                    | result(rows, count, f"{count} x {width}x{height}", seconds)
                    | {"images_per_s": count / float(np.mean(seconds))}
                )
