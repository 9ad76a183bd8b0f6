"""`mlc-amd embed`: what a model's image encoder makes of a picture."""

from dataclasses import replace
from typing import Annotated

from mlc_amd.runtime.errors import UsageError
from mlc_amd.runtime.options import LoadOptions
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
    from mlc_amd.tools import picture_features

    picture_features.write(replace(load, model=model), image, output)
