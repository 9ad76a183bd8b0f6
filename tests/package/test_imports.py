"""Imports between the packages point one way, as README.md says."""

import ast
import re
from pathlib import Path

import pytest

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
TESTS = {path.stem for path in (REPO / "tests").rglob("*.py") if path.stem != "__init__"} - {"compare"} | {"tests"}


def begins(module: str, package: str) -> bool:
    return f"{module}.".startswith(f"{package}.")


def package_of(module: str) -> str:
    return max((package for package in ALLOWED if begins(module, package)), key=len, default="")


def imported(tree: ast.AST) -> set[str]:
    """Full names of what a module imports. Names in strings count, which importlib and child processes take."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports hide where they point"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and MODULE.fullmatch(node.value):
            found.add(node.value.rstrip("."))
    return found


def forbidden(module: str, source: str) -> list[str]:
    """What the module (a name below mlc_amd) imports and may not."""
    package, wrong = package_of(module), []
    for name in imported(ast.parse(source)):
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
    modules = {path: ".".join(path.relative_to(REPO).with_suffix("").parts) for path in paths}
    wrong = {name: bad for path, name in modules.items() if (bad := forbidden(name, path.read_text()))}
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
    assert len(forbidden(module, source)) == 1


def test_what_is_allowed_is_not_found():
    assert not forbidden("runtime.devices.cpu", "import tvm_ffi\nfrom mlc_amd.runtime import errors")
    assert not forbidden("tools.tune", "from mlc_amd.compiler import plan\nfrom mlc_amd.schedules import x")
