"""Images among tokens: their rows, their places, what a step computes of them; features that are kept."""

import numpy as np

from mlc_amd.runtime.images.features import Features
from mlc_amd.runtime.images.prepared import PreparedImage
from mlc_amd.runtime.images.rows import ImageRows, Prompt, row_tokens


def image(rows, grid, seed=0):
    return PreparedImage.of(np.full((3, 1, 1), seed, np.float32), rows, grid, "")


A, B = image(6, (2, 3)), image(4, (4, 1), 1)
TOKENS = Prompt.of([[5, 6], A, B, [7, 8, 9]])


def rows_of(**options) -> ImageRows:
    rows = ImageRows(**options)
    rows.add(0, TOKENS, TOKENS.images)
    return rows


def test_rows_are_known_by_their_image():
    tokens = row_tokens(A)
    assert len(set(tokens)) == 6 and all(-(2**31) <= token < 0 for token in tokens)
    assert row_tokens(image(6, (2, 3))) == tokens and not set(row_tokens(B)) & set(tokens)
    assert [5, 6, *tokens, *row_tokens(B), 7, 8, 9] == TOKENS


def test_places_advance_by_an_images_extent():
    rows = rows_of(grid=True)
    # as llama.cpp: (t, y, x) of text are one number; an image advances by the larger of its rows and columns
    expected = [(0, 0, 0), (1, 1, 1), (2, 2, 2), (2, 2, 3), (2, 2, 4), (2, 3, 2), (2, 3, 3), (2, 3, 4)]
    expected += [(5, 5, 5), (5, 6, 5), (5, 7, 5), (5, 8, 5), (9, 9, 9), (10, 10, 10), (11, 11, 11)]
    assert rows.places(0, 15).tolist() == [list(place) for place in expected]
    for first in range(15):  # wherever a chunk begins
        assert rows.places(first, 15 - first).tolist() == [list(place) for place in expected[first:]]
    assert [rows.place(12 + i) for i in range(3)] == [9, 10, 11]
    assert rows_of().places(0, 15) is None and rows_of().place(12) == 12


def test_an_image_that_sees_itself_begins_its_chunk_and_is_whole():
    rows = rows_of(together=True)
    assert [rows.cut(first, 100) for first in (0, 2, 8)] == [2, 6, 100]
    assert rows.cut(2, 3) == 6 and [rows.whole(first) for first in (0, 2, 5, 8, 12)] == [0, 6, 0, 4, 0]
    assert [rows.begin(count) for count in (1, 2, 5, 8, 11, 12)] == [1, 2, 2, 8, 8, 12]
    free = rows_of()
    assert free.cut(0, 5) == 5 and free.whole(2) == 0 and free.begin(5) == 5


def test_parts_of_chunks_and_what_they_wait_for():
    rows = rows_of()
    assert [part[:1] + part[2:] for part in rows.parts(4, 6)] == [(0, 2, 4), (4, 0, 2)]
    assert rows.known(0, 15, lambda one: one is not B) == 8
    assert rows.known(0, 15, lambda one: False) == 2 and rows.known(12, 3, lambda one: False) == 3


def test_truncation_within_an_image():
    rows = rows_of(grid=True)
    rows.truncate(4)
    rows.add(4, Prompt([1, 2]), {})
    assert [part[:1] + part[2:] for part in rows.parts(0, 6)] == [(2, 0, 2)]
    rows.truncate(2)
    assert not list(rows.parts(0, 6)) and rows.place(3) == 3


def test_features_that_were_used_last_are_kept():
    kept = Features(limit=100 * 4)
    for one, count in ((A, 60), (B, 30)):
        kept.add(one, np.zeros((1, count), np.float32))
    parts = list(rows_of().parts(2, 6))
    kept.put(parts[:1], 0, np.empty((1, 60), np.float32))
    kept.add(image(1, (1, 1), 2), np.zeros((1, 20), np.float32))
    assert A in kept and B not in kept
    kept.add(image(1, (1, 1), 3), np.zeros((1, 500), np.float32))
    assert image(1, (1, 1), 3) in kept and A not in kept


def test_features_of_a_step_among_rows_of_texts():
    kept, features, more = Features(), np.arange(60, dtype=np.float16).reshape(6, 10), np.ones((4, 10), np.float16)
    kept.add(A, features)
    kept.add(B, more)
    step = np.full((14, 10), 7, np.float16)
    kept.put(list(rows_of().parts(1, 12)), 2, step)  # a chunk of one row of text, both images, and one of text
    assert (step[3:9] == features).all() and (step[9:13] == more).all() and not step[[0, 1, 2, 13]].any()
