"""Decodes pictures: PNG, JPEG, WebP, GIF (its first frame).

In:  a file's bytes, or where they are: a path, a data URL, a PIL image.
Out: a PIL image of mode RGB, upright (EXIF), transparent parts on white, of 16 bits the higher 8. UserError for what is
     no such picture, is damaged, or is over a limit; the header is checked before anything is decoded.

One picture is decoded at a time: `MOST_PIXELS` bound the memory of all threads together.
"""

import base64
import binascii
import io
import threading
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from mlc_amd.runtime.errors import QUOTED, UserError, one_line, shorten

if TYPE_CHECKING:
    from PIL.Image import Image

FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
BEGINNINGS = (b"\x89PNG", b"\xff\xd8", b"RIFF", b"GIF8")  # of their files
MOST_BYTES = 32 << 20  # of a file
MOST_PIXELS = 1 << 26  # of a picture: 268 MB decoded, as Pillow has 4 bytes a pixel
MOST_PICTURES = 64  # of a conversation
_ADVICE = "give a PNG, JPEG, WebP or GIF file"
_DECODING = threading.Lock()


def picture_bytes(source: object, where: str = "the image") -> bytes:
    """The file's bytes of a picture that a caller gave as bytes, a path, a data URL or a PIL image. where: its name in
    errors. UserError if it cannot be read or is too large."""
    if isinstance(source, str) and source[:5].lower() == "data:":
        return of_data_url(source, where)
    if isinstance(source, str | Path):
        return _read(Path(source).expanduser(), where)
    if isinstance(source, bytes | bytearray | memoryview):
        return _sized(bytes(source), where)
    if hasattr(source, "save") and hasattr(source, "mode"):
        return _sized(_saved(source), where)
    raise UserError(f"{where} is {shorten(source)}: it must be a path, bytes, a data URL or a PIL image")


def of_data_url(url: str, where: str) -> bytes:
    """The bytes of "data:image/png;base64,...". UserError for other data URLs."""
    head, comma, text = url.partition(",")
    if not comma or not head.lower().endswith(";base64"):
        raise UserError(f"{where} is {shorten(url)}: a data URL must be like data:image/png;base64,...")
    return of_base64(text, where)


def of_base64(text: str, where: str) -> bytes:
    """UserError for what is no base64, standard or URL-safe, padded or not, and for too many bytes."""
    if len(text) > MOST_BYTES * 4 // 3 + 1024:
        raise UserError(f"{where} is larger than {MOST_BYTES >> 20} MiB: make it smaller")
    plain = "".join(text.split()).rstrip("=").translate(str.maketrans("-_", "+/"))
    try:
        return _sized(base64.b64decode(plain + "=" * (-len(plain) % 4), validate=True), where)
    except (binascii.Error, ValueError) as error:
        raise UserError(f"{where} is not base64 ({error}): encode the file's bytes so") from error


def decode(data: bytes, where: str = "the image") -> "Image":
    """The picture, of mode RGB. See the module's docstring."""
    from PIL import Image

    with _DECODING, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # limits are checked here; Pillow warns of damage that it can repair
        try:
            with Image.open(io.BytesIO(data), formats=FORMATS) as opened:
                _check_size(opened.size, where)
                opened.load()
                _check_size(opened.size, where)  # a GIF's frame may be larger than its screen
                return _upright_rgb(opened)
        except (UserError, MemoryError):
            raise
        except Image.UnidentifiedImageError as error:
            raise UserError(f"{where} is no picture that can be read: {_ADVICE}") from error
        except Image.DecompressionBombError as error:
            raise UserError(_too_large(where)) from error
        except Exception as error:  # Pillow's decoders raise errors of many kinds for damaged files
            raise UserError(f"{where} is damaged ({one_line(str(error), QUOTED)}): {_ADVICE}") from error


def _upright_rgb(picture: "Image") -> "Image":
    from PIL import Image, ImageOps

    if "exif" in picture.info:
        try:
            picture = ImageOps.exif_transpose(picture)
        except Exception:  # damaged EXIF says nothing about the picture's orientation: it is shown as it is stored
            picture = picture.copy()
    if picture.mode.startswith("I"):  # grey of 16 bits
        picture = Image.fromarray((np.asarray(picture) >> 8).clip(0, 255).astype(np.uint8))
    if picture.has_transparency_data:
        over = picture.convert("RGBA")
        ground = Image.new("RGBA", over.size, "white")
        ground.alpha_composite(over)
        picture = ground
    return picture.convert("RGB")


def _check_size(size: tuple[int, int], where: str) -> None:
    if min(size) < 1:
        raise UserError(f"{where} has no pixels: {_ADVICE}")
    if size[0] * size[1] > MOST_PIXELS:
        raise UserError(_too_large(where))


def _too_large(where: str) -> str:
    return f"{where} has more than {MOST_PIXELS / 1e6:.0f} million pixels: make it smaller"


def _read(path: Path, where: str) -> bytes:
    try:
        with path.open("rb") as file:
            data = _sized(file.read(MOST_BYTES + 1), f"{where} {path}")
    except (OSError, ValueError) as error:  # ValueError: a path with a zero byte
        why = getattr(error, "strerror", None) or str(error)
        raise UserError(f"cannot read {where} {path}: {why}; {_ADVICE}") from error
    if not data.startswith(BEGINNINGS):  # here its name is known
        raise UserError(f"{where} {path} is no picture that can be read: {_ADVICE}")
    return data


def _saved(picture: object) -> bytes:
    """The bytes of a PIL image, without loss."""
    file = io.BytesIO()
    try:
        picture.save(file, "PNG", compress_level=1)  # pyright: ignore[reportAttributeAccessIssue]
    except (OSError, ValueError) as error:
        raise UserError(f"the PIL image cannot be used ({error}): convert it to RGB") from error
    return file.getvalue()


def _sized(data: bytes, where: str) -> bytes:
    if len(data) > MOST_BYTES:
        raise UserError(f"{where} is larger than {MOST_BYTES >> 20} MiB: make it smaller")
    return data
