"""No module imports itself through others, anywhere in its file: imports in functions and for type checkers count."""

import ast
from collections.abc import Iterator
from pathlib import Path

REPO = Path(__file__).resolve().parents[2]
PACKAGES = ("compiler", "schedules", "runtime", "tools")


def sources() -> dict[str, str]:
    """Module name -> its text; a package's is its __init__."""
    paths = [path for package in PACKAGES for path in (REPO / package).rglob("*.py")]
    names = {path: ".".join(("mlc_amd", *path.relative_to(REPO).with_suffix("").parts)) for path in paths}
    return {name.removesuffix(".__init__"): path.read_text() for path, name in names.items()}


def graph(modules: dict[str, str]) -> dict[str, set[str]]:
    """Module name -> those that it imports; `from package import module` imports the module."""
    found = {}
    for name, text in modules.items():
        imported: set[str] = set()
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Import):
                imported |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                inner = {f"{node.module}.{alias.name}" for alias in node.names}
                imported |= {one if one in modules else str(node.module) for one in inner}
        found[name] = imported & modules.keys()
    return found


def circles(imports: dict[str, set[str]]) -> list[list[str]]:
    """The strongly connected components with more than one module, or with one that imports itself (Tarjan 1972)."""
    order: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []

    def visit(name: str) -> Iterator[list[str]]:
        order[name] = low[name] = len(order)
        stack.append(name)
        for other in sorted(imports[name]):
            if other not in order:
                yield from visit(other)
            if other in stack:
                low[name] = min(low[name], low[other])
        if low[name] == order[name]:
            at = stack.index(name)
            component, stack[at:] = sorted(stack[at:]), []
            if len(component) > 1 or name in imports[name]:
                yield component

    return [component for name in sorted(imports) if name not in order for component in visit(name)]


def test_there_are_no_circles():
    assert circles(graph(sources())) == []


def test_circles_are_found():
    modules = {
        "p": "",
        "p.a": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from p.b import B",
        "p.b": "def late():\n    from p import c",
        "p.c": "import p.a\nfrom p.d import e",
        "p.d": "from p import d",
        "p.e": "from p.a import x\nimport os",
    }
    assert circles(graph(modules)) == [["p.d"], ["p.a", "p.b", "p.c"]]
