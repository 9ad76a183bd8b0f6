"""What `mlc-amd bench --image` measures of a model that sees: how long its encoder takes for pictures of a size, by how
many there are at once, from prepared pixels to features.

In: the options' model, sizes. Out: results with the fields of bench_formats.py, and "images_per_s"; t/s is of tokens,
rows of features.
"""

import re
from collections.abc import Iterator, Sequence

import numpy as np

from mlc_amd.runtime.artifact.artifact import Artifact
from mlc_amd.runtime.devices.opening import open_device
from mlc_amd.runtime.errors import UsageError
from mlc_amd.runtime.images.encoder import ImageEncoder
from mlc_amd.runtime.images.prepared import PreparedImage
from mlc_amd.runtime.options import LoadOptions
from mlc_amd.tools.hub import models
from mlc_amd.tools.measure.bench_encoder import described, timed


def sizes_of(names: Sequence[str]) -> list[tuple[int, int]]:
    """(width, height) of each "WIDTHxHEIGHT", of which commas separate several. UsageError for what is none."""
    found = []
    for name in ",".join(names).split(","):
        if not (sides := re.fullmatch(r"([1-9]\d{0,4})x([1-9]\d{0,4})", name)):
            raise UsageError(f"--image {name}: it must be WIDTHxHEIGHT in pixels, as 1024x768")
        found.append((int(sides[1]), int(sides[2])))
    return found


def measure(
    load: LoadOptions, sizes: Sequence[tuple[int, int]], counts: Sequence[int], repetitions: int
) -> Iterator[dict]:
    """One result for each size and each number of pictures. UserError for a model without an image encoder, or a
    picture that it cannot take."""
    from PIL import Image

    from mlc_amd.runtime.images.projectors import Preparation  # it needs Pillow, which bundles of other models lack

    artifact = Artifact.open(models.seeing_artifact_path(load), load.verify)
    device = open_device(artifact, load.device, load.threads, devices=load.devices)
    try:
        encoder, rng = ImageEncoder(artifact, device), np.random.default_rng(0)
        preparation, about = Preparation(encoder.vision), described(artifact, device)
        for width, height in sizes:
            picture = Image.fromarray(rng.integers(0, 256, (height, width, 3), np.uint8))
            tiles = [one for one in preparation.pieces(picture) if isinstance(one, PreparedImage)]
            rows = sum(one.rows for one in tiles)
            for count in counts:
                images = tiles * count
                seconds = timed(lambda images=images: encoder.encode(images), device, repetitions)
                rates = [rows * count / s for s in seconds]
                yield about | {
                    "n_prompt": rows, "n_seqs": count, "test": f"{count} x {width}x{height}",
                    "avg_ns": round(float(np.mean(seconds)) * 1e9), "samples_ns": [round(s * 1e9) for s in seconds],
                    "avg_ts": float(np.mean(rates)),
                    "stddev_ts": float(np.std(rates, ddof=1)) if len(rates) > 1 else 0.0,
                    "images_per_s": count / float(np.mean(seconds)),
                }  # fmt: skip
    finally:
        device.close()
        artifact.close()
