"""What a model's image encoder makes of a picture, for `mlc-amd embed --image`.

In: the model, a picture's file. Out: an .npz file with `features`, float32 [rows, columns], of all tiles of the picture
one after the other, and `tiles`, the number of rows of each.
"""

from pathlib import Path

import numpy as np

from mlc_amd.runtime.artifact.artifact import Artifact
from mlc_amd.runtime.devices.opening import open_device
from mlc_amd.runtime.images.encoder import ImageEncoder
from mlc_amd.runtime.images.pictures import decode, picture_bytes
from mlc_amd.runtime.images.prepared import PreparedImage
from mlc_amd.runtime.images.projectors import Preparation
from mlc_amd.runtime.options import LoadOptions
from mlc_amd.tools.hub import models


def write(load: LoadOptions, image: str, output: str) -> None:
    """load: with the model. UserError for a model without an image encoder, or a picture that it cannot take."""
    picture = decode(picture_bytes(Path(image).expanduser()), image)
    artifact = Artifact.open(models.seeing_artifact_path(load), load.verify)
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
