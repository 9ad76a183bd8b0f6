"""Optional packages: the table agrees with the project's metadata, and what is missing is said before work begins."""

import importlib.util
from importlib import metadata

import pytest
from packaging.requirements import Requirement

from mlc_amd.runtime import extras
from mlc_amd.runtime.errors import UserError
from mlc_amd.tools import cli


@pytest.fixture
def without(monkeypatch):
    """without(module): as if its package were not installed."""
    find = importlib.util.find_spec

    def hide(hidden: str) -> None:
        monkeypatch.setattr(
            importlib.util, "find_spec", lambda name, *more: None if name == hidden else find(name, *more)
        )

    return hide


def test_the_table_has_the_packages_of_the_extras():
    declared = set()
    for requirement in map(Requirement, metadata.requires("mlc-amd") or ()):
        for extra in ("tune", "serve", "ray", "rocm"):
            if (
                requirement.marker
                and "extra" in str(requirement.marker)
                and requirement.marker.evaluate({"extra": extra})
            ):
                declared.add((extra, requirement.name.removesuffix("-cpu")))  # builds without GPU code
    assert declared == {(package.extra, package.name) for package in extras.PACKAGES.values()}


def test_what_is_missing_is_told_with_what_installs_it(without):
    extras.require("ziglang")
    without("rocm.bindings.hip")
    with pytest.raises(
        UserError, match=r"running target rocm needs the package rocm-bindings-hip; .*'mlc-amd\[rocm\]'"
    ):
        extras.require("rocm.bindings.hip")
    tune, serve, ray, rocm = extras.extras()
    assert [one["extra"] for one in (tune, serve, ray, rocm)] == ["tune", "serve", "ray", "rocm"]
    assert rocm["packages"] == ["ziglang"]
    assert rocm["missing"] == {"rocm-bindings-hip": "running target rocm"} and not tune["missing"]
    assert not extras.installed("no_such_package.module")


@pytest.mark.parametrize(
    ("missing", "command"),
    [
        ("xgboost", ["tune", "--synthetic", "tiny:q4_0", "--trials", "1"]),
        ("xgboost", ["tune", "--synthetic", "tiny:q4_0", "--export-kit", "kit"]),
        ("xgboost", ["tune", "--import-kit", "kit", "--export-kit", "kit2"]),
        ("tornado", ["tune-server", "--tracker-only", "127.0.0.1:9190"]),
        ("matplotlib", ["tune", "--synthetic", "tiny:q4_0", "--report", "-o", "plot.svg"]),
        ("ray", ["serve", "--ray", "auto", "--replicas", "2"]),
    ],
)
def test_commands_check_before_they_begin(without, capsys, monkeypatch, tmp_path, missing, command):
    without(missing)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cli.main(command) == 1
    said = capsys.readouterr()
    assert f"needs the package {missing}; install it with: {extras.install(extras.PACKAGES[missing].extra)}" in said.err
    assert not said.out and said.err.count("\n") == 1 and not list(tmp_path.iterdir())
