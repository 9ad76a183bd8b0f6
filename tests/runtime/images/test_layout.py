"""Rows of an encoder: the order of patches, windows, learned positions and rotary ones."""

import numpy as np
import pytest

from mlc_amd.runtime.images.layout import angles, layout, neighbours, patch_lines, positions, put_patches

PLAIN = {"merge": 2, "window": 0, "by_column": False, "nested": False, "class_row": "", "table": "rows"}


def test_patches_of_a_token_follow_one_another():
    of = layout(PLAIN, 4, 6)
    assert of.y[:8].tolist() == [0, 0, 1, 1, 0, 0, 1, 1]
    assert of.x[:8].tolist() == [0, 1, 0, 1, 2, 3, 2, 3]
    assert of.tokens.tolist() == list(range(6))
    assert of.live == of.rows == 24


def test_tokens_by_column():
    of = layout(PLAIN | {"by_column": True}, 4, 6)
    first = of.tokens * 4
    assert list(zip(of.x[first] // 2, of.y[first] // 2, strict=True)) == [(x, y) for x in range(3) for y in range(2)]


def test_a_class_token_has_a_group_of_its_own():
    of = layout(PLAIN | {"class_row": "first"}, 2, 2)
    assert (of.rows, of.live) == (8, 5)
    assert of.y.tolist()[4:] == [-1] * 4
    pixels = np.arange(3 * 4 * 4, dtype=np.float32).reshape(3, 4, 4)
    found = np.full((10, 14), np.nan, np.float32)[1:9, :12]  # part of a larger array
    put_patches(pixels, patch_lines(2, 2, 2, of), of.y, found)
    assert found[1].tolist() == [2, 3, 6, 7, 18, 19, 22, 23, 34, 35, 38, 39]
    assert not found[4:].any()


def test_a_token_of_nested_windows():
    of = layout(PLAIN | {"merge": 4, "nested": True}, 4, 8)
    assert list(zip(of.y[:8].tolist(), of.x[:8].tolist(), strict=True)) == [
        (0, 0), (0, 1), (1, 0), (1, 1), (0, 2), (0, 3), (1, 2), (1, 3)
    ]  # fmt: skip
    assert of.windows[:8].tolist() == [[0, 4]] * 4 + [[4, 8]] * 4
    assert set(of.x[16:]) == {4, 5, 6, 7}


def test_neighbours_of_convolutions():
    of = layout(PLAIN | {"merge": 4, "nested": True}, 8, 8)
    place = {(int(y), int(x)): row for row, (y, x) in enumerate(zip(of.y, of.x, strict=True))}
    first, second = neighbours(of)
    for group, taken in enumerate(first):
        y, x = int(of.y[group * 4]), int(of.x[group * 4])
        assert taken.tolist() == [place.get((y + dy, x + dx), -1) for dy in (-1, 0, 1) for dx in (-1, 0, 1)]
    assert second.shape == (4, 9)
    assert second[0].tolist() == [-1, -1, -1, -1, 0, 1, -1, 2, 3]
    assert [of.y[4 * one].tolist() for one in second[3]] == [2, 2, 2, 4, 4, 4, 6, 6, 6]


def test_rows_of_a_window_are_one_run():
    of = layout(PLAIN | {"window": 2}, 8, 10)  # 4 x 5 tokens: 2 x 3 windows, the last ones narrower
    assert sorted(set(map(tuple, of.windows.tolist()))) == [
        (0, 16), (16, 32), (32, 40), (40, 56), (56, 72), (72, 80)
    ]  # fmt: skip
    for begin, end in of.windows:
        assert len({(y // 4, x // 4) for y, x in zip(of.y[begin:end], of.x[begin:end], strict=True)}) == 1
    first = of.tokens * 4  # outputs in the order of rows of tokens
    assert list(zip(of.y[first] // 2, of.x[first] // 2, strict=True)) == [(y, x) for y in range(4) for x in range(5)]


@pytest.mark.parametrize("table", ["aligned", "linear", "smooth", "cubic"])
def test_interpolated_positions(table):
    rows = np.random.default_rng(0).standard_normal((25, 3)).astype(np.float32)
    same = positions(PLAIN | {"table": table}, rows, 5, 5)
    assert np.allclose(same.reshape(25, 3), rows)
    constant = positions(PLAIN | {"table": table}, np.ones((25, 3), np.float32), 4, 7)
    assert constant.shape == (4, 7, 3)
    assert np.allclose(constant, 1)
    ramp = np.repeat(np.arange(5, dtype=np.float32)[:, None], 5, 1).reshape(25, 1)
    found = positions(PLAIN | {"table": table}, ramp, 9, 5)[:, 2, 0]
    middle = slice(2, 7)  # corners differ
    expected = np.linspace(0, 4, 9) if table == "aligned" else (np.arange(9) + 0.5) * 5 / 9 - 0.5
    assert np.allclose(found[middle], expected[middle], atol=0.05 if table == "cubic" else 1e-5)


def test_positions_of_another_shape_are_refused():
    with pytest.raises(ValueError, match="do not go with"):
        positions(PLAIN, np.zeros((16, 8), np.float32), 4, 5)
    with pytest.raises(ValueError, match="along an axis"):
        positions(PLAIN | {"table": "axes"}, np.zeros((8, 8), np.float32), 4, 5)


@pytest.mark.parametrize(("pairs", "span"), [("adjacent", 2), ("half", 8), ("whole", 16)])
def test_rotary_positions_keep_lengths_and_know_distances(pairs, span):
    turns = {"axes": "yx", "span": span, "first": 1, "theta": 100.0, "odd": pairs == "adjacent"}
    of = layout(PLAIN, 6, 6)
    table = angles(turns, 16, of)
    random = np.random.default_rng(1)
    q, k = random.standard_normal((2, 16))
    column = np.arange(16)
    other = column // span * span + (column % span + span // 2) % span

    def turned(x, row):
        return x * table[row, :16] + x[other] * table[row, 16:]

    place = {(y, x): row for row, (y, x) in enumerate(zip(of.y.tolist(), of.x.tolist(), strict=True))}
    assert np.isclose(np.linalg.norm(turned(q, place[3, 4])), np.linalg.norm(q))
    here = turned(q, place[1, 2]) @ turned(k, place[2, 0])
    there = turned(q, place[3, 5]) @ turned(k, place[4, 3])
    elsewhere = turned(q, place[3, 5]) @ turned(k, place[3, 3])
    assert np.isclose(here, there)
    assert not np.isclose(here, elsewhere)
