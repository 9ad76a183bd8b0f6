"""The documents: their links resolve, and README stays short."""

import re
import tomllib
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[2]
PAGES = (
    sorted(REPO.glob("*.md")) + sorted(REPO.glob("docs/*.md")) + [REPO / "dist/README.md", REPO / "dist/demo/README.md"]
)


def anchors(page: Path) -> set[str]:
    """Of a page's headings, as GitHub makes them."""
    titles = re.findall(r"^#+ (.*)$", page.read_text(), flags=re.M)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(REPO)))
def test_links_resolve(page):
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        path, _, anchor = link.partition("#")
        if "://" not in link:
            target = (page.parent / path) if path else page
            assert target.exists(), link
            assert not anchor or anchor in anchors(target), link


def test_installing_is_described_as_it_is():
    """Every extra with its packages; and no other page names a package that is on no index."""
    extras = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    rows = re.findall(r"^\| `(\w+)` \| .* \| (.*) \|$", (REPO / "docs/install.md").read_text(), flags=re.M)
    told = {extra: packages for extra, packages in rows}
    assert told.keys() == extras.keys()
    for extra in extras.keys() - {"test"}:
        names = {re.split(r"[^\w-]", package)[0] for package in extras[extra]}
        assert names <= set(re.findall(r"[\w-]+", told[extra])), extra
    pages = [page for page in PAGES if page.name != "install.md"]
    assert not [page.name for page in pages if re.search(r"pip install '?mlc-amd", page.read_text())]


def test_readme_is_short():
    assert len((REPO / "README.md").read_text().splitlines()) <= 150
