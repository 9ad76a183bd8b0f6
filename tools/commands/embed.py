"""`mlc-amd embed`: what a model's image encoder makes of a picture."""

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import numpy as np

from mlc_amd.runtime.errors import UsageError
from mlc_amd.runtime.options import LoadOptions
from mlc_amd.tools.hub import models
from mlc_amd.tools.options import Without

SHORT = {"o": "output"}


def run(
    model: str | None = None,
    *,
    image: str | None = None,
    output: str | None = None,
    load: Annotated[LoadOptions, Without("model", "tuned", "kv_tokens", "draft")],
) -> None:
    """Writes the features of a picture: rows of numbers that take the place of tokens in the decoder.

    The .npz file has `features`, float32 [rows, columns], of all tiles of the picture one after the other, and `tiles`,
    the number of rows of each.

    Args:
        model: GGUF file with an image encoder (--mmproj), artifact folder, or OWNER/REPO:QUANT of huggingface.co.
        image: a picture: PNG, JPEG, WebP or GIF.
        output: the .npz file to write.
    """
    if image is None or output is None:
        raise UsageError("embed needs --image FILE and -o FILE.npz")
    path = models.artifact_path(replace(load, model=model))
    from mlc_amd.runtime.artifact.artifact import Artifact
    from mlc_amd.runtime.devices.opening import open_device
    from mlc_amd.runtime.images.encoder import ImageEncoder
    from mlc_amd.runtime.images.pictures import decode, picture_bytes
    from mlc_amd.runtime.images.prepared import PreparedImage
    from mlc_amd.runtime.images.projectors import Preparation

    picture = decode(picture_bytes(Path(image).expanduser()), image)
    artifact = Artifact.open(path, load.verify)
    device = open_device(artifact, load.device, load.threads, devices=load.devices)
    try:
        encoder = ImageEncoder(artifact, device)
        tiles = [one for one in Preparation(encoder.vision).pieces(picture) if isinstance(one, PreparedImage)]
        features = encoder.encode(tiles)
    finally:
        device.close()
        artifact.close()
    with open(Path(output).expanduser(), "wb") as file:
        np.savez(file, features=np.concatenate(features), tiles=np.array([len(rows) for rows in features]))
    print(f"{sum(map(len, features))} rows of {features[0].shape[1]} numbers in {output}")
