"""Searches for texts in a text that arrives in pieces."""

from collections.abc import Sequence


def split_at(text: str, marks: Sequence[str], last: bool = False) -> tuple[str, str | None, str]:
    """Splits `text` at the first mark in it; if several begin there, at the longest. Returns (before, mark, rest).
    Without a mark in it, mark is None, and rest is the longest end of the text that may be the beginning of a mark; ""
    if `last`, as no more text will follow."""
    places = [(place, -len(mark), mark) for mark in marks if mark and (place := text.find(mark)) >= 0]
    if places:
        place, _, mark = min(places)
        return text[:place], mark, text[place + len(mark) :]
    if last:
        return text, None, ""
    first = {mark[0] for mark in marks if mark}  # tested first: there may be many marks, few of which begin here
    places = (i for i, char in enumerate(text) if char in first and any(mark.startswith(text[i:]) for mark in marks))
    hold = next(places, len(text))
    return text[:hold], None, text[hold:]
