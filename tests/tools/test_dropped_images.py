"""Files of images that are dropped onto the line of the chat."""

import pytest

from mlc_amd.tools.terminal.line_editor import dropped


@pytest.mark.parametrize(
    ("line", "count", "rest"),
    [
        ("{a} What is it?", 1, "What is it?"),
        ("'{b}' {a}  Which?", 2, "Which?"),
        ("{escaped}", 1, ""),
        ("file://{url}", 1, ""),
        ("{none} What is it?", 0, "{none} What is it?"),
        ("/help", 0, "/help"),
        ("What is {a}?", 0, "What is {a}?"),
        ("{text}", 0, "{text}"),
    ],
)
def test_dropped(tmp_path, line, count, rest):
    names = {"a": tmp_path / "a.png", "b": tmp_path / "b c.JPG", "text": tmp_path / "a.txt"}
    for path in names.values():
        path.write_bytes(b"")
    b = str(names["b"])
    names |= {"none": tmp_path / "c.png", "escaped": b.replace(" ", "\\ "), "url": b.replace(" ", "%20")}
    found, text = dropped(line.format(**names))
    assert (len(found), text) == (count, rest.format(**names))
