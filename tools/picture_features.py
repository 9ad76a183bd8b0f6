"""The features of a picture by a model's image encoder, for `mlc-amd embed --image`; and opening such an encoder alone.

In: the model, a picture's file. Out: an .npz file with `features`, float32 [rows, columns], of all tiles of the picture
one after the other, and `tiles`, the number of rows of each tile.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mlc_amd.runtime.artifact.artifact import Artifact
from mlc_amd.runtime.devices.opening import open_device
from mlc_amd.runtime.images.encoder import ImageEncoder
from mlc_amd.runtime.images.pictures import read_picture
from mlc_amd.runtime.images.prepared import PreparedImage
from mlc_amd.runtime.options import LoadOptions
from mlc_amd.tools.hub import models


class OpenEncoder(NamedTuple):
    artifact: Artifact
    device: Any
    encoder: ImageEncoder

    def tiles(self, picture) -> list[PreparedImage]:
        """The tiles of a PIL image. Raises UserError for a picture that the encoder cannot take."""
        from mlc_amd.runtime.images.projectors import Preparation  # it needs Pillow, which bundles of other models lack

        pieces = Preparation(self.encoder.vision).pieces(picture)
        return [one for one in pieces if isinstance(one, PreparedImage)]


@contextmanager
def opened(load: LoadOptions) -> Iterator[OpenEncoder]:
    """Opens the image encoder of the options' model for the `with` block. Raises UserError for a model without one."""
    artifact = Artifact.open(models.artifact_path(load, sees=True), load.verify)
    device = open_device(artifact, load.device, load.threads, devices=load.devices)
    try:
        yield OpenEncoder(artifact, device, ImageEncoder(artifact, device))
    finally:
        device.close()
        artifact.close()


def write(load: LoadOptions, image: str, output: str) -> None:
    """Writes the features of a picture to the file `output`. load: names the model. Raises UserError for a model
    without an image encoder, or a picture that it cannot take."""
    picture = read_picture(image)
    with opened(load) as sees:
        features = sees.encoder.encode(sees.tiles(picture))
    with open(Path(output).expanduser(), "wb") as file:
        np.savez(
            file, features=np.concatenate(features).astype(np.float32), tiles=np.array([len(rows) for rows in features])
        )
    print(f"{sum(map(len, features))} rows of {features[0].shape[1]} numbers in {output}")
