"""Imports between the packages point one way, as README.md says, and no module imports itself through others."""

import ast
import functools
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from mlc_amd.compiler import nodes

REPO = Path(__file__).resolve().parents[2]
# Package -> what of mlc_amd its modules may import. The longest name that a module's begins with counts.
ALLOWED = {
    "runtime": ("runtime",),
    "schedules": (
        "schedules",
        *(
            f"runtime.{name}"
            for name in (
                "errors",
                "host",
                "gpus",
                "matrix_lanes",
                "exchange_layout",
                "cache.kv_types",
                "sampling.philox",
                "sampling.layout",
            )
        ),
    ),
    "compiler": ("compiler", "schedules", "runtime"),
    "tools": ("tools", "compiler", "schedules", "runtime", "dist"),
    "dist": ("tools",),
}
MODULE = re.compile(rf"mlc_amd\.({'|'.join(package for package in ALLOWED if '.' not in package)})(\.\w+)*\.?")
# what tests import by name alone, or as a package
TESTS = {path.stem for of in ("support/**/*.py", "**/test_*.py") for path in (REPO / "tests").glob(of)} | {"tests"}


def begins(module: str, package: str) -> bool:
    return f"{module}.".startswith(f"{package}.")


def package_of(module: str) -> str:
    return max((package for package in ALLOWED if begins(module, package)), key=len, default="")


def imported(source: str) -> tuple[frozenset[str], frozenset[str]]:
    """(full names of what a module imports, those in strings, which importlib and child processes take)"""
    found, named = set(), set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports hide where they point"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and MODULE.fullmatch(node.value):
            named.add(node.value.rstrip("."))
    return frozenset(found), frozenset(named)


@functools.cache
def imports_of(path: Path) -> tuple[frozenset[str], frozenset[str]]:
    return imported(path.read_text())


def module_of(path: Path) -> str:
    """Its name below mlc_amd."""
    return ".".join(path.relative_to(REPO).with_suffix("").parts)


def forbidden(module: str, names: tuple[frozenset[str], frozenset[str]]) -> list[str]:
    """What the module (a name below mlc_amd) imports and may not, of the results of `imported`."""
    package, wrong = package_of(module), []
    for name in frozenset.union(*names):
        ours = name.removeprefix("mlc_amd.")
        if ours == name:
            top = name.split(".")[0]
            bad = top in TESTS or (package == "runtime" and top == "tvm")
        else:
            bad = not any(begins(ours, one) for one in ALLOWED[package])
        wrong += [name] if bad else []
    return sorted(wrong)


@pytest.mark.parametrize(
    "files", ["runtime/**/*.py", "schedules/**/*.py", "compiler/**/*.py", "tools/**/*.py", "dist/bundle/*.py"]
)
def test_imports_point_one_way(files):
    paths = sorted(REPO.glob(files))
    wrong = {path: bad for path in paths if (bad := forbidden(module_of(path), imports_of(path)))}
    assert paths and not wrong


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("runtime.engine", "import tvm"),
        ("runtime.engine", "from tvm.runtime import ndarray"),
        ("runtime.engine", "def late():\n    from mlc_amd.compiler import plan"),
        ("runtime.measure.program", "MODULE = 'mlc_amd.compiler.tuning.build'"),
        ("schedules.formats", "from mlc_amd.runtime.engine.engine import Engine"),
        ("schedules.gpu.arch", "from mlc_amd.compiler import ops"),
        ("compiler.plan", "from mlc_amd.tools import cli"),
        ("compiler.tuning.local", "import reference"),
        ("compiler.tuning.static", "import importlib\nimportlib.import_module(f'mlc_amd.tools.{name}')"),
        ("tools.tune", "import tests.dev.gfxemu as gfxemu"),
        ("tools.tune", "from tests import conftest"),
        ("tools.tune", "from test_gguf import SPEC"),
    ],
)
def test_what_points_the_other_way_is_found(module, source):
    assert len(forbidden(module, imported(source))) == 1


def test_what_is_allowed_is_not_found():
    for module, source in (
        ("runtime.devices.cpu", "import tvm_ffi\nfrom mlc_amd.runtime import errors"),
        ("tools.tune", "from mlc_amd.compiler import plan\nfrom mlc_amd.schedules import x"),
    ):
        assert not forbidden(module, imported(source))


def test_tvm_is_imported_without_what_nothing_uses():
    assert nodes.tvm.backend is sys.modules["tvm.backend"]
    assert "tvm.backend.vulkan" not in sys.modules and sys.modules["tvm.runtime.disco"] is None


# ---- circles


def graph(modules: dict[str, frozenset[str]]) -> dict[str, set[str]]:
    """Module name -> those that it imports; modules: the full names of what each imports, of a module or in one."""
    return {
        name: {one if one in modules else one.rpartition(".")[0] for one in names} & modules.keys()
        for name, names in modules.items()
    }


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
    """Anywhere in their files: imports in functions and for type checkers count, names in strings do not."""
    paths = [
        path for package in ("compiler", "schedules", "runtime", "tools") for path in (REPO / package).rglob("*.py")
    ]
    modules = {f"mlc_amd.{module_of(path)}".removesuffix(".__init__"): imports_of(path)[0] for path in paths}
    assert circles(graph(modules)) == []


def test_circles_are_found():
    modules = {
        "p": "",
        "p.a": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from p.b import B",
        "p.b": "def late():\n    from p import c",
        "p.c": "import p.a\nfrom p.d import e",
        "p.d": "from p import d",
        "p.e": "from p.a import x\nimport os",
    }
    found = {name: imported(text)[0] for name, text in modules.items()}
    assert circles(graph(found)) == [["p.d"], ["p.a", "p.b", "p.c"]]
