"""Fuzzes what happens to a picture before the encoder: damaged files are decoded and prepared for projectors that cut
them in different ways. A picture that stays whole has the size that its header says, and no more memory than
the limits allow, whatever a file promises.

In: pictures of all formats and modes (`bases`), damaged in their bytes, or with other sizes in their headers. Out: the
table of `fuzzing.py`.
"""

import io
import random
import struct
import sys
import zlib
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
from PIL import Image

from mlc_amd.runtime.images.pictures import MOST_PIXELS, decode
from mlc_amd.runtime.images.prepared import PreparedImage
from mlc_amd.runtime.images.projectors import Preparation
from tests.dev.fuzz import fuzzing
from tests.dev.fuzz.fuzzing import Case, Limits
from tests.dev.fuzz.mutations import bytes_changed
from tests.support.image_cases import picture, references

# The largest pictures take 0.8 GB; without the limits of pictures.py some files here would take tens of GB.
LIMITS = Limits(seconds=60, memory=1 << 30)
_SIDES = (0, 1, 2, 7, 300, 8192, 8193, 1 << 15, 1 << 16, (1 << 24) - 1, (1 << 31) - 1, (1 << 32) - 1)
_PROJECTORS = ("gemma3", "idefics3", "internvl", "llava_next", "qwen2vl")


def _saved(image: Image.Image, kind: str, **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


@cache
def bases() -> dict[str, bytes]:
    """Undamaged files."""
    plain, exif = picture(90, 60), Image.Exif()
    exif[0x0112] = 6  # turned by a quarter
    deep = Image.fromarray((np.asarray(plain)[..., 0].astype(np.uint16)) << 8)
    clear = plain.convert("RGBA")
    clear.putalpha(100)
    return {
        "PNG": _saved(plain, "PNG"),
        "PNG of 16 bits": _saved(deep, "PNG"),
        "PNG with a palette": _saved(plain.quantize(16), "PNG", transparency=3),
        "PNG with texts": _saved(clear, "PNG", exif=exif, icc_profile=bytes(500)),
        "JPEG": _saved(plain, "JPEG", exif=exif),
        "JPEG in steps": _saved(plain.convert("L"), "JPEG", progressive=True),
        "JPEG of CMYK": _saved(plain.convert("CMYK"), "JPEG"),
        "WebP": _saved(plain, "WEBP", exif=exif),
        "WebP without loss": _saved(clear, "WEBP", lossless=True),
        "GIF": _saved(plain.quantize(32), "GIF", save_all=True, append_images=[plain.quantize(8)]),
    }


@cache
def preparations() -> list[Preparation]:
    return [Preparation(references()[name]["vision"]) for name in _PROJECTORS]


def outcome(data: bytes, draw: random.Random) -> tuple[int, int]:
    """The size of the picture, which one of the projectors gets."""
    image = decode(data)
    assert image.mode == "RGB" and 0 < image.width * image.height <= MOST_PIXELS
    assert len(image.tobytes()) == 3 * image.width * image.height
    for piece in draw.choice(preparations()).pieces(image):
        if isinstance(piece, PreparedImage):
            assert piece.rows > 0 and np.isfinite(piece.pixels).all() and piece.pixels.dtype == np.float32
    return image.size


# ---- damage


def _bytes(draw: random.Random, data: bytes) -> tuple[bytes, str]:
    """Mostly of the header, where most of a file's structure is."""
    if draw.random() < 0.5:
        return bytes_changed(data, draw)
    end = draw.choice((40, 200, 700))
    head, what = bytes_changed(data[:end], draw)
    return head + data[end:], what


def _sizes(draw: random.Random, data: bytes) -> tuple[bytes, str]:
    """Other sizes in the header, with a valid checksum where there is one."""
    made, width, height = bytearray(data), draw.choice(_SIDES), draw.choice(_SIDES)
    if data[:4] == b"\x89PNG":
        made[16:24] = struct.pack(">II", width, height)
        made[29:33] = struct.pack(">I", zlib.crc32(made[12:29]))
    elif data[:3] == b"GIF":
        at = draw.choice((6, data.index(b"\x2c\0\0\0\0") + 5))  # of the screen, of a frame
        made[at : at + 4] = struct.pack("<HH", width & 0xFFFF, height & 0xFFFF)
    elif data[:2] == b"\xff\xd8":
        at = max(data.find(b"\xff\xc0"), data.find(b"\xff\xc2")) + 5
        made[at : at + 4] = struct.pack(">HH", height & 0xFFFF, width & 0xFFFF)
    elif data[12:15] == b"VP8":
        at = {b"VP8X": 24, b"VP8 ": 26, b"VP8L": 21}[data[12:16]]
        made[at : at + 4] = struct.pack("<HH", width & 0xFFFF, height & 0xFFFF)
    return bytes(made), f"{width} x {height}"


def _expanding(draw: random.Random, data: bytes) -> tuple[bytes, str]:
    """A PNG with parts of megabytes that compress to kilobytes."""
    size = draw.choice((1 << 20, 1 << 26, 1 << 28))
    kind = draw.choice((b"zTXt", b"iTXt", b"iCCP", b"IDAT"))
    heads = {b"zTXt": b"a\0\0", b"iTXt": b"a\0\1\0\0\0", b"iCCP": b"a\0\0", b"IDAT": b""}
    body = heads[kind] + _zeros(size)
    part = struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))
    base = bases()["PNG"]
    return base[:33] + part + base[33:], f"{kind.decode()} of {size >> 20} MiB"


@cache
def _zeros(size: int) -> bytes:
    return zlib.compress(bytes(size), 9)


_DAMAGE: dict[str, Callable[[random.Random, bytes], tuple[bytes, str]]] = {
    "bytes": _bytes,
    "sizes": _sizes,
    "expanding": _expanding,
}


def make(draw: random.Random) -> Case:
    name = draw.choice(list(bases()))
    kind = draw.choices(list(_DAMAGE), (6, 3, 1))[0]
    data, what = _DAMAGE[kind](draw, bases()[name])

    def act() -> None:
        outcome(data, draw)

    return Case(kind, f"{name}: {what}", act)


def control() -> Case:
    sizes = {(60, 90), (90, 60)}  # upright
    return Case("control", "", lambda: all(outcome(data, random.Random(0)) in sizes for data in bases().values()))


def main(argv: list[str] | None = None) -> int:
    bases()
    preparations()
    for size in (1 << 20, 1 << 26, 1 << 28):
        _zeros(size)
    return fuzzing.main(__doc__, make, control, LIMITS, argv)


if __name__ == "__main__":
    sys.exit(main())
