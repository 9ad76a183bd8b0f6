"""Pictures as encoders take them, bit for bit as llama.cpp prepares them (tests/support/image_cases.py)."""

import pytest
from image_cases import digest, picture, references
from samples import sample

from mlc_amd.runtime.errors import UserError
from mlc_amd.runtime.images.prepared import PreparedImage
from mlc_amd.runtime.images.projectors import PROJECTORS, Preparation

CASES = references()
SMALL = "90x210", "200x130"  # others are slower


def test_there_is_a_case_for_each_projector():
    assert {case["vision"]["projector"] for case in CASES.values()} == set(PROJECTORS)


def prepared(name: str, size: str, **changes: object) -> list:
    vision = CASES[name]["vision"] | changes
    width, height = map(int, size.split("x"))
    return Preparation(vision).pieces(picture(width, height))


def check(name: str, size: str) -> None:
    expected, pieces = CASES[name]["pictures"][size], prepared(name, size)
    tiles = [piece for piece in pieces if isinstance(piece, PreparedImage)]
    made = [
        {"size": list(tile.pixels.shape[:0:-1]), "rows": tile.rows, "pixels": digest(tile.pixels)} for tile in tiles
    ]
    if "texts" not in expected:  # a reference of pixels alone: the whole comes first there
        whole_last = name == "step3vl" and len(made) > 1
        made = [made[-1], *made[:-1]] if whole_last else made
        assert [{key: tile[key] for key in ("size", "pixels")} for tile in made] == expected["tiles"]
        return
    assert made == expected["tiles"]
    texts = ["A"]
    for piece in pieces:
        if isinstance(piece, str):
            texts[-1] += piece
        else:
            texts.append("")
    assert [*texts[:-1], texts[-1] + "B"] == expected["texts"]


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("size", SMALL)
def test_small_pictures(name, size):
    check(name, size)


@pytest.mark.full
@pytest.mark.parametrize(("name", "size"), [(name, size) for name in CASES for size in CASES[name]["pictures"]])
def test_all_pictures(name, size):
    check(name, size)


@pytest.mark.parametrize(("name", "size"), [("lfm2", "1100x700"), ("minicpm2", "640x480"), ("step3vl", "1100x700")])
def test_pictures_that_are_cut(name, size):
    check(name, size)


def test_marks_of_tiles():
    def marks(name: str, size: str) -> str:
        return "".join(piece if isinstance(piece, str) else "*" for piece in prepared(name, size))

    tile = "<patch_start>*<patch_end>"
    assert marks("step3vl", "1100x700") == f"{tile}{tile}<patch_newline>{tile}{tile}<im_start>*<im_end>"
    assert marks("step3vl", "448x400") == "<im_start>*<im_end>"
    tile = "<slice>*</slice>"
    assert marks("minicpm4", "1100x700") == f"<image>*</image>{tile}{tile}\n{tile}{tile}"


def test_grid_of_positions():
    (tile,) = [piece for piece in prepared("qwen3vl", "200x130", positions="grid") if isinstance(piece, PreparedImage)]
    assert tile.grid == (4, 6) and tile.rows == 24
    (tile,) = [piece for piece in prepared("pixtral", "200x130") if isinstance(piece, PreparedImage)]
    assert tile.rows == 8 * 13 + 7 and tile.grid == (1, tile.rows)


def test_the_key_is_that_of_the_pixels():
    keys = {prepared("qwen3vl", size)[1].key for size in ("200x130", "130x200", "200x130")}
    assert len(keys) == 2
    metadata = CASES["qwen3vl"]["vision"]["metadata"]
    for name in ("mean", "std"):  # of which the pixels are made of the same picture
        changed = metadata | {f"clip.vision.image_{name}": [0.25, 0.5, 0.5]}
        keys.add(prepared("qwen3vl", "200x130", metadata=changed)[1].key)
    assert len(keys) == 4


@pytest.mark.parametrize("name", ["qwen3vl", "step3vl", "internvl", "lfm2", "idefics3", "minicpm4"])
@pytest.mark.parametrize("size", sample([((1, 200_000),), ((200_000, 1),), ((3, 60_000),)], [((1, 200_000),)]))
def test_extremely_narrow_pictures_take_no_memory(name, size):
    """An error, or tiles of no more pixels than others have."""
    try:
        pieces = Preparation(CASES[name]["vision"]).pieces(picture(*size))
    except UserError as error:
        assert "too narrow" in str(error)
        return
    assert sum(piece.pixels.nbytes for piece in pieces if isinstance(piece, PreparedImage)) < 400e6


@pytest.mark.parametrize("changes", [{"clip.vision.patch_size": 0}, {"clip.vision.image_std": [0, 0, 0]}])
def test_damaged_metadata(changes):
    vision = CASES["gemma3"]["vision"]
    with pytest.raises(UserError, match="metadata"):
        Preparation({**vision, "metadata": vision["metadata"] | changes})


def test_unknown_projector():
    with pytest.raises(UserError, match="the projector cubist cannot be prepared"):
        Preparation({"projector": "cubist", "metadata": {}})
