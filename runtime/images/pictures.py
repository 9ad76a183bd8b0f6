"""Decodes pictures: PNG, JPEG, WebP, GIF (its first frame).

In: the bytes of a file, or a path, a data URL or a PIL image. Out: a PIL image of mode RGB: upright (EXIF), with
transparent parts on white, and the upper 8 bits of 16-bit grey. Raises UserError for other files, damaged files, and
files over a limit; the header is checked before anything is decoded.

One picture is decoded at a time, so `MOST_PIXELS` limits the memory of all threads together.
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
BEGINNINGS = (b"\x89PNG", b"\xff\xd8", b"RIFF", b"GIF8")  # the first bytes of such files
MOST_BYTES = 32 << 20  # limit of a file
MOST_PIXELS = 1 << 26  # limit of a picture: 268 MB decoded, as Pillow has 4 bytes a pixel
MOST_PICTURES = 64  # limit of a conversation
_ADVICE = "give a PNG, JPEG, WebP or GIF file"
_DECODING = threading.Lock()


def picture_bytes(source: object, where: str = "the image") -> bytes:
    """The bytes of a picture's file, from bytes, a path, a data URL or a PIL image. where: its name in errors. Raises
    UserError if it cannot be read or is too large."""
    if isinstance(source, str) and source[:5].lower() == "data:":
        return of_data_url(source, where)
    if isinstance(source, str | Path):
        return _read(Path(source).expanduser(), where)
    if isinstance(source, bytes | bytearray | memoryview):
        return _sized(bytes(source), where)
    if hasattr(source, "save") and hasattr(source, "mode"):
        return _sized(_saved(source), where)
    raise UserError(f"{where} is {shorten(source)}: it must be a path, bytes, a data URL or a PIL image")


def read_picture(path: str) -> "Image":
    """The decoded picture in a file. Raises UserError, which names the file, if it cannot be read."""
    return decode(picture_bytes(path), f"the image {path}")


def of_data_url(url: str, where: str) -> bytes:
    """The bytes in a data URL such as "data:image/png;base64,...". Raises UserError for other data URLs."""
    head, comma, text = url.partition(",")
    if not comma or not head.lower().endswith(";base64"):
        raise UserError(f"{where} is {shorten(url)}: a data URL must be like data:image/png;base64,...")
    return of_base64(text, where)


def of_base64(text: str, where: str) -> bytes:
    """Decodes base64: standard or URL-safe, padded or not. Raises UserError for other texts and for too many bytes."""
    if len(text) > MOST_BYTES * 4 // 3 + 1024:
        raise UserError(f"{where} is larger than {MOST_BYTES >> 20} MiB: make it smaller")
    plain = "".join(text.split()).rstrip("=").translate(str.maketrans("-_", "+/"))
    try:
        return _sized(base64.b64decode(plain + "=" * (-len(plain) % 4), validate=True), where)
    except (binascii.Error, ValueError) as error:
        raise UserError(f"{where} is not base64 ({error}): encode the bytes of the file as base64") from error


def decode(data: bytes, where: str = "the image") -> "Image":
    """The picture, of mode RGB. See the module's docstring for its form and errors."""
    from PIL import Image

    with _DECODING, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # limits are checked here; Pillow warns of damage that it can repair
        try:
            with Image.open(io.BytesIO(data), formats=FORMATS) as opened:
                _check_size(opened.size, where)
                opened.load()
                _check_size(opened.size, where)  # a GIF's frame may be larger than the size in its header
                return _upright_rgb(opened)
        except (UserError, MemoryError):
            raise
        except Image.UnidentifiedImageError as error:
            raise UserError(f"{where} is no picture that can be read: {_ADVICE}") from error
        except Image.DecompressionBombError as error:
            raise UserError(_too_large(where)) from error
        except Exception as error:  # for damaged files Pillow's decoders raise exceptions of many types
            raise UserError(f"{where} is damaged ({one_line(str(error), QUOTED)}): {_ADVICE}") from error


def _upright_rgb(picture: "Image") -> "Image":
    from PIL import Image, ImageOps

    if "exif" in picture.info:
        try:
            picture = ImageOps.exif_transpose(picture)
        except Exception:  # damaged EXIF does not tell the orientation: the picture is shown as it is stored
            picture = picture.copy()
    if picture.mode.startswith("I"):  # 16-bit grey
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
    if not data.startswith(BEGINNINGS):  # checked here, because the error can name the path
        raise UserError(f"{where} {path} is no picture that can be read: {_ADVICE}")
    return data


def _saved(picture: object) -> bytes:
    """The bytes of a PIL image as a PNG file."""
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
