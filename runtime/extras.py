"""The optional packages. For each: the extra of `pip install 'mlc-amd[EXTRA]'` that installs it, and its purpose.
pyproject.toml has their versions."""

import importlib.util
from dataclasses import dataclass

from mlc_amd.runtime.errors import UserError


@dataclass(frozen=True)
class OptionalPackage:
    """An optional package. extra: the extra that installs it. name: its name in the package index."""

    extra: str
    name: str
    purpose: str


# by the name of the module that is imported
PACKAGES = {
    "xgboost": OptionalPackage("tune", "xgboost", "the search of `mlc-amd tune`"),
    "matplotlib": OptionalPackage("tune", "matplotlib", "the plot of `mlc-amd tune --report`"),
    "tornado": OptionalPackage("tune", "tornado", "the tracker of `mlc-amd tune-server`"),
    "starlette": OptionalPackage("serve", "starlette", "`mlc-amd serve`"),
    "uvicorn": OptionalPackage("serve", "uvicorn", "`mlc-amd serve`"),
    "httptools": OptionalPackage("serve", "httptools", "`mlc-amd serve`"),
    "llguidance": OptionalPackage("serve", "llguidance", "answers with a schema or a grammar"),
    "prometheus_client": OptionalPackage("serve", "prometheus_client", "the metrics of `mlc-amd serve`"),
    "httpcore": OptionalPackage("serve", "httpcore", "`mlc-amd serve --allow-image-urls`"),
    "ray": OptionalPackage("ray", "ray", "`mlc-amd serve --ray`"),
    "rocm.bindings.hip": OptionalPackage("rocm", "rocm-bindings-hip", "running target rocm"),
    "ziglang": OptionalPackage("rocm", "ziglang", "linking GPU code where no lld is installed"),
}


def installed(module: str) -> bool:
    """Whether a module can be found; it is not imported."""
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # its parent package is not installed
        return False


def install(extra: str) -> str:
    """The command that installs an extra. A bundle (tools/commands/deploy.py) has no compiler and cannot be extended;
    there, the text says so."""
    where = "" if installed("tvm") else " (not into this bundle: where mlc-amd itself is installed)"
    return f"pip install 'mlc-amd[{extra}]'{where}"


def absence(module: str) -> UserError:
    """The error for a package that is not installed."""
    package = PACKAGES[module]
    return UserError(f"{package.purpose} needs the package {package.name}; install it with: {install(package.extra)}")


def require(module: str) -> None:
    """Raises UserError if the package of this module is not installed."""
    if not installed(module):
        raise absence(module)


def extras() -> list[dict[str, object]]:
    """For each extra: `extra`, its name; `packages`, those installed; `missing`, the others: name to purpose."""
    found = []
    for extra in dict.fromkeys(package.extra for package in PACKAGES.values()):
        packages = {module: package for module, package in PACKAGES.items() if package.extra == extra}
        missing = {package.name: package.purpose for module, package in packages.items() if not installed(module)}
        present = [package.name for package in packages.values() if package.name not in missing]
        found.append({"extra": extra, "packages": present, "missing": missing})
    return found
