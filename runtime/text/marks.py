"""Search for texts in a text that arrives in pieces."""

from collections.abc import Sequence


def split_at(text: str, marks: Sequence[str], last: bool = False) -> tuple[str, str | None, str]:
    """(before, mark, rest): `text` cut at the first of `marks` in it, the longest where several begin. Without one,
    mark is None and rest is the longest end of the text that may begin a mark, "" if this text is the `last` one."""
    places = [(place, -len(mark), mark) for mark in marks if mark and (place := text.find(mark)) >= 0]
    if places:
        place, _, mark = min(places)
        return text[:place], mark, text[place + len(mark) :]
    if last:
        return text, None, ""
    ends = (n for mark in marks for n in range(min(len(mark) - 1, len(text)), 0, -1) if text.endswith(mark[:n]))
    hold = len(text) - max(ends, default=0)
    return text[:hold], None, text[hold:]
