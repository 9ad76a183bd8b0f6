"""The Python packages in a bundle: wheels from the package index, kept in the cache, and merged into the files of one
folder.

In: names of VENDORED packages, Python versions. Out: {path: bytes}, the content of `site-packages` for all of these
Pythons. Wheels of one version for several Pythons have equal files except for native ones. The names of native files
contain the Python's version, so they can be in one folder.
"""

import importlib.util
import subprocess
import sys
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from packaging.tags import Tag, compatible_tags, cpython_tags
from packaging.utils import canonicalize_name, parse_wheel_filename

from mlc_amd.runtime.errors import UserError
from mlc_amd.tools.terminal import display

# Wheels may need at most the C library of 2018 (2.28), which SteamOS and all current distributions have. llguidance
# needs that of 2020 (2.31): with an older one, answers cannot follow grammars, but everything else works.
PLATFORMS = tuple(f"manylinux{version}_x86_64" for version in ("_2_31", "_2_28", "_2_27", "_2_17", "2014"))
# Not needed to run a model: type stubs, headers, sources, tests, installers' records.
LEAVE_OUT = (
    "*.pyi", "*.pyx", "*.pxd", "*.h", "*.a", "*.typed", "*/tests/*", "*.data/*", "*.dist-info/RECORD",
    "*.dist-info/WHEEL",
)  # fmt: skip


@dataclass(frozen=True)
class Package:
    """One version of a package. leave_out: further patterns of files that are left out. differs: files that may differ
    between Pythons; the first one is used."""

    version: str
    leave_out: tuple[str, ...] = ()
    differs: tuple[str, ...] = ()


VENDORED = {
    "numpy": Package(
        "2.4.6",
        (
            "numpy/_core/_simd.*", "numpy/_core/*_tests.*", "numpy/_pyinstaller/*", "numpy/distutils/*", "numpy/doc/*",
            "numpy/f2py/*",
            "numpy/random/_examples/*", "numpy/random/lib/*", "numpy/testing/*", "numpy/typing/*",
        ),
        ("numpy/__config__.py",),  # records the compiler and the Python that built it
    ),
    "tokenizers": Package("0.23.3"),
    "jinja2": Package("3.1.6"),
    "markupsafe": Package("3.0.4", ("markupsafe/_speedups.*",)),  # the package has the same in Python
    "rich": Package("15.0.0"),
    "prompt_toolkit": Package("3.0.53"),
    "wcwidth": Package("0.2.14"),
    "fire": Package("0.7.1"),
    "termcolor": Package("3.3.0"),
    "packaging": Package("26.3"),
    "msgspec": Package("0.22.0"),
    # `serve`, and answers that follow a grammar
    "starlette": Package("1.10.0"),
    "anyio": Package("4.16.0"),
    "idna": Package("3.20"),
    "typing_extensions": Package("4.16.0"),
    "uvicorn": Package("0.54.0"),
    "click": Package("8.5.1"),
    "h11": Package("0.16.0"),
    "httptools": Package("0.9.0"),
    "prometheus_client": Package("0.26.0"),
    "llguidance": Package("1.9.1"),
    # models with an image encoder
    "pillow": Package(
        "13.0.0",
        (  # fonts, colour profiles, formats that images/pictures.py does not read
            "PIL/_imagingft.*", "PIL/_imagingcms.*", "PIL/_avif.*", "pillow.libs/libfreetype-*",
            "pillow.libs/libharfbuzz-*", "pillow.libs/libpng16-*", "pillow.libs/libbrotli*", "pillow.libs/liblcms2-*",
            "pillow.libs/libavif-*", "pillow-*.dist-info/sboms/*",
        ),
    ),
    "apache-tvm-ffi": Package(
        "0.1.14.post1",
        (
            *(f"tvm_ffi/{folder}/*" for folder in ("3rdparty", "cython", "include", "share", "src", "stub")),
            *("tvm_ffi/testing/*", "tvm_ffi/CMakeLists.txt", "tvm_ffi/.gitignore"),
        ),
    ),
    "rocm-bindings-hip": Package("10.0.0.0.1.2", ("rocm/bindings/*hiprtc*",)),
    "rocm-bindings-core": Package("10.0.0.0.1.2"),
}  # fmt: skip


def site_packages(names: Sequence[str], pythons: Sequence[str], cache: Path) -> dict[str, bytes]:
    """The files of the packages for all `pythons` ("3.11", ..), by path. Raises UserError if a wheel is neither in
    `cache` nor can be downloaded."""
    files: dict[str, bytes] = {}
    for name in names:
        package, taken = VENDORED[name], {}
        for python in pythons:
            if (wheel := _find(name, python, cache)) is None:
                raise UserError(f"no wheel of {name} {package.version} for Python {python} in {cache}")
            taken[wheel] = python
        for wheel in taken:
            for path, data in _members(wheel, (*LEAVE_OUT, *package.leave_out)):
                if files.setdefault(path, data) != data and path not in package.differs:
                    raise RuntimeError(f"{path} differs between the wheels of {name} {package.version}")
    return files


def fetch(names: Sequence[str], pythons: Sequence[str], cache: Path) -> None:
    """Downloads the wheels that `cache` lacks. Raises UserError without pip or network."""
    for python in pythons:
        missing = [name for name in names if _find(name, python, cache) is None]
        if missing:
            _download(missing, python, cache)


def _download(names: Sequence[str], python: str, cache: Path) -> None:
    wanted = [f"{name}=={VENDORED[name].version}" for name in names]
    if importlib.util.find_spec("pip") is None:
        advice = f"install it with: {sys.executable} -m ensurepip"
        raise UserError(f"deploy needs pip to download {', '.join(wanted)}; {advice}")
    display.message(f"downloading for Python {python}: {', '.join(wanted)} ...")
    cache.mkdir(parents=True, exist_ok=True)
    platforms = [f"--platform={platform}" for platform in PLATFORMS]
    options = [
        "--quiet",
        "--disable-pip-version-check",
        "--no-deps",
        "--only-binary=:all:",
        "--retries=1",
        "--timeout=30",
    ]
    kind = ["--implementation=cp", f"--python-version={python}", *platforms, f"--dest={cache}"]
    command = [sys.executable, "-m", "pip", "download", *options, *kind, *wanted]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or ["ERROR: pip failed"]
        advice = f"with a network, deploy once: wheels are kept in {cache}"
        raise UserError(f"cannot download {', '.join(wanted)} ({errors[-1][7:]}); {advice}")


def _find(name: str, python: str, cache: Path) -> Path | None:
    """The wheel in the cache that pip would choose; None if there is none."""
    version, interpreter = tuple(map(int, python.split("."))), f"cp{python.replace('.', '')}"
    # The tags of wheels that a CPython of that version can load, the best one first.
    loaded = (*cpython_tags(version, platforms=PLATFORMS), *compatible_tags(version, interpreter, PLATFORMS))
    best: dict[Tag, int] = {tag: i for i, tag in reversed(list(enumerate(loaded)))}
    found = []
    for path in sorted(cache.glob("*.whl")):
        project, release, _, tags = parse_wheel_filename(path.name)
        same = project == canonicalize_name(name) and str(release) == VENDORED[name].version
        if same and (fits := tags & best.keys()):
            found.append((min(best[tag] for tag in fits), path))
    return min(found)[1] if found else None


def _members(wheel: Path, leave_out: Sequence[str]) -> Iterator[tuple[str, bytes]]:
    try:
        with zipfile.ZipFile(wheel) as archive:
            for member in archive.infolist():
                if not member.is_dir() and not any(fnmatchcase(member.filename, pattern) for pattern in leave_out):
                    yield member.filename, archive.read(member)
    except (zipfile.BadZipFile, zlib.error) as e:
        raise UserError(f"{wheel} is damaged ({e}); delete it and deploy again") from e
