"""Pictures of all formats and modes, limits, and damaged files."""

import base64
import io
import random
import resource
import struct
import subprocess
import sys
import zlib

import numpy as np
import pytest
from image_cases import picture
from PIL import Image

from mlc_amd.runtime.errors import UserError
from mlc_amd.runtime.images import pictures
from mlc_amd.runtime.images.pictures import decode, of_data_url, picture_bytes

PICTURE = picture(48, 32)


def saved(image: Image.Image, kind: str, **options: object) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


@pytest.mark.parametrize(
    ("kind", "options"),
    [("PNG", {}), ("WEBP", {"lossless": True}), ("GIF", {}), ("JPEG", {"quality": 95, "subsampling": 0})],
)
def test_formats(kind, options):
    found = np.asarray(decode(saved(PICTURE, kind, **options))).astype(int)
    assert found.shape == (32, 48, 3)
    error = np.abs(found - np.asarray(PICTURE)).mean()
    assert error == 0 if kind in ("PNG", "WEBP") else error < 25


def test_a_gif_is_its_first_frame():
    frames = [Image.new("RGB", (8, 8), colour) for colour in ("red", "blue")]
    data = saved(frames[0], "GIF", save_all=True, append_images=frames[1:])
    assert decode(data).getpixel((3, 3)) == (255, 0, 0)


@pytest.mark.parametrize("turn", range(1, 9))
def test_orientation(turn):
    exif = Image.Exif()
    exif[0x0112] = turn
    turns = [None, 0, 3, 1, 5, 4, 6, 2]  # Image.Transpose by orientation: what is stored is the inverse's result
    inverse = {None: None, 2: 4, 4: 2}.get(turns[turn - 1], turns[turn - 1])
    stored = PICTURE if inverse is None else PICTURE.transpose(Image.Transpose(inverse))
    found = decode(saved(stored, "PNG", exif=exif))
    assert np.array_equal(np.asarray(found), np.asarray(PICTURE))


def test_damaged_exif_changes_nothing():
    data = saved(PICTURE, "JPEG", exif=b"Exif\0\0MM\0*\0\0\0\x08\xff\xff garbage")
    assert decode(data).size == PICTURE.size


def test_transparency_is_white():
    image = PICTURE.convert("RGBA")
    image.putalpha(Image.new("L", image.size, 0))
    for kind in ("PNG", "WEBP"):
        assert np.asarray(decode(saved(image, kind))).min() == 255
    half = Image.new("RGBA", (2, 2), (0, 0, 0, 128))
    assert decode(saved(half, "PNG")).getpixel((0, 0)) == (127, 127, 127)
    palette = Image.new("P", (2, 2), 1)
    palette.putpalette([0, 0, 0, 9, 8, 7])
    assert decode(saved(palette, "PNG")).getpixel((0, 0)) == (9, 8, 7)
    assert decode(saved(palette, "PNG", transparency=1)).getpixel((0, 0)) == (255, 255, 255)
    assert decode(saved(Image.new("LA", (2, 2), (9, 0)), "PNG")).getpixel((0, 0)) == (255, 255, 255)


@pytest.mark.parametrize(("mode", "colour", "expected"), [("L", 77, (77,) * 3), ("1", 1, (255,) * 3)])
def test_grey(mode, colour, expected):
    assert decode(saved(Image.new(mode, (3, 3), colour), "PNG")).getpixel((1, 1)) == expected


def test_sixteen_bits():
    grey = Image.fromarray(np.array([[0, 255, 256, 40000, 65535]], np.uint16))
    assert [decode(saved(grey, "PNG")).getpixel((x, 0))[0] for x in range(5)] == [0, 0, 1, 156, 255]
    # Pillow writes no colours of 16 bits.
    rows = b"\0" + struct.pack(">3H", 40000, 255, 65535)
    assert decode(png(1, 1, rows, depth=16, colours=2)).getpixel((0, 0)) == (156, 0, 255)


def test_cmyk():
    found = decode(saved(Image.new("CMYK", (8, 8), (0, 255, 255, 0)), "JPEG", quality=95)).getpixel((4, 4))
    assert found[0] > 240 and found[1] < 15 and found[2] < 15


def png(width: int, height: int, rows: bytes, depth: int = 8, colours: int = 0) -> bytes:
    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, depth, colours, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")


BOMB = """
import resource, sys
from mlc_amd.runtime.errors import UserError
from mlc_amd.runtime.images.pictures import decode
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for path in sys.argv[1:]:
    try:
        decode(open(path, "rb").read())
    except UserError as error:
        print(error)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


def test_decompression_bombs_take_no_memory(tmp_path):
    side = 20_000  # 400 million pixels of one colour in some hundred kilobytes
    (tmp_path / "a.png").write_bytes(png(side, side, bytes(side * (side + 1) // 8)))
    (tmp_path / "b.png").write_bytes(png(2**31 - 1, 2**31 - 1, bytes(10)))
    gif = bytearray(saved(Image.new("P", (8, 8)), "GIF"))
    gif[6:10] = struct.pack("<HH", 65535, 65535)
    (tmp_path / "c.gif").write_bytes(gif)
    paths = [str(path) for path in sorted(tmp_path.iterdir())]
    done = subprocess.run([sys.executable, "-c", BOMB, *paths], capture_output=True, text=True, check=True)
    *errors, grown = done.stdout.splitlines()
    assert len(errors) == 3 and all("has more than 67 million pixels" in error for error in errors)
    assert int(grown) < 30_000  # kilobytes: Pillow itself


def test_limits(monkeypatch, tmp_path):
    monkeypatch.setattr(pictures, "MOST_BYTES", 100)
    for source in (bytes(101), f"data:image/png;base64,{base64.b64encode(bytes(101)).decode()}"):
        with pytest.raises(UserError, match="is larger than"):
            picture_bytes(source)
    (tmp_path / "a").write_bytes(bytes(101))
    with pytest.raises(UserError, match="is larger than"):
        picture_bytes(tmp_path / "a")


def test_sources(tmp_path):
    data = saved(PICTURE, "PNG")
    (tmp_path / "a.png").write_bytes(data)
    url = "data:image/png;base64," + base64.b64encode(data).decode()
    for source in (data, bytearray(data), tmp_path / "a.png", str(tmp_path / "a.png"), url, url.replace("+", "-")):
        assert picture_bytes(source) == data
    assert np.array_equal(np.asarray(decode(picture_bytes(PICTURE))), np.asarray(PICTURE))


@pytest.mark.parametrize(
    ("source", "error"),
    [
        ("/nowhere/a.png", "cannot read the image /nowhere/a.png: No such file"),
        ("a\0b", "cannot read the image"),
        (__file__, "the image .*test_pictures.py is no picture that can be read"),
        (5, "the image is 5: it must be a path"),
        ("data:image/png,abc", "a data URL must be like"),
        ("data:image/png;base64,!!", "is not base64"),
    ],
)
def test_what_is_no_source(source, error):
    with pytest.raises(UserError, match=error):
        picture_bytes(source)


@pytest.mark.parametrize(
    "data", [b"", b"hello", b"BM" + bytes(60), saved(PICTURE, "PNG")[:100], saved(PICTURE, "TIFF")]
)
def test_what_is_no_picture(data):
    with pytest.raises(UserError, match=r"(is no picture that can be read|is damaged).*give a PNG"):
        decode(data)


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF"])
def test_mutated_files_are_errors_or_pictures(kind):
    """75 of each format: some bytes changed, removed or doubled."""
    chance, data = random.Random(kind), saved(PICTURE, kind)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    errors = 0
    for _ in range(75):
        made = bytearray(data)
        for _ in range(chance.randint(1, 4)):
            place = chance.randrange(min(len(made), 60)) if chance.random() < 0.5 else chance.randrange(len(made))
            change = chance.choice(("flip", "set", "cut", "double"))
            if change == "flip":
                made[place] ^= 1 << chance.randrange(8)
            elif change == "set":
                made[place] = chance.choice((0, 255, 127, 128))
            elif change == "cut":
                del made[place : place + chance.randrange(1, 20)]
            else:
                made[place:place] = made[place : place + 16]
        try:
            found = decode(bytes(made))
        except UserError as error:
            errors += 1
            assert str(error).startswith("the image ")
        else:
            assert found.mode == "RGB" and found.width * found.height <= pictures.MOST_PIXELS
    assert 0 < errors < 75
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 1 << 20  # KiB


def test_data_urls_need_base64():
    with pytest.raises(UserError):
        of_data_url("data:text/plain,hello", "it")
