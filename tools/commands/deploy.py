"""`mlc-amd deploy`: makes a bundle from an artifact. A bundle is a folder or .tar.zst that runs the model on a machine
where nothing was installed.

A bundle has the artifact, the sources of the runtime and the tools, and the Python packages that they import, for every
Python version that the machine may have, or for those that the user names. It has no TVM (for target cpu only its
function interface, apache-tvm-ffi) and no compiler. Its layout:

    run.sh              finds a Python and runs `start.py`; README.md explains how to use it
    start.py            the command line, with the bundle's own model as the default model
    model/              the artifact, without files that only developers need
    lib/                mlc_amd and the packages
    bundle.json         what it is for, the packages' versions, the digest of `lib`
"""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Literal

import mlc_amd
from mlc_amd.runtime.artifact import manifest as manifests
from mlc_amd.runtime.artifact.artifact import TABLES, WEIGHTS, Artifact, facts
from mlc_amd.runtime.artifact.manifest import MANIFEST
from mlc_amd.runtime.artifact.weight_block import TensorSpec
from mlc_amd.runtime.artifact.weights_file import Weights, WeightsWriter
from mlc_amd.runtime.errors import UserError
from mlc_amd.runtime.folders import cache_directory, temporary
from mlc_amd.tools.bundles import archive, wheels
from mlc_amd.tools.bundles.archive import Entry
from mlc_amd.tools.options import KeptWeights
from mlc_amd.tools.terminal import display, terminal

SHORT = {"o": "output"}
MARK = "bundle.json"  # a folder with this file is a bundle, and may be replaced
SUFFIX = ".tar.zst"
_LEFT_OUT = ("cache", "compile", "completion", "deploy", "inspect", "pull")
# The sources of this project's packages that a bundle has, and those that it does not have: patterns relative to a
# package's folder.
SOURCES = {
    "runtime": (("**/*.py",), ()),
    "schedules": (("__init__.py", "formats.py", "operators/*.py"), ()),
    "tools": (
        (
            *("*.py", "commands/*.py", "hub/*.py", "terminal/*.py", "measure/*.py", "checks/*.py", "reference/*.py"),
            *("server/**/*.py", "server/page/*"),
        ),
        (
            *(f"commands/{verb}.py" for verb in _LEFT_OUT),
            *("commands/tune*.py", "hub/hub.py", "hub/hub_ollama.py", "measure/tune_report.py", "server/ray_*.py"),
            "lane_probe.py",
        ),
    ),
}
TARGET_PACKAGES = {"vulkan": (), "rocm": ("rocm-bindings-hip", "rocm-bindings-core"), "cpu": ("apache-tvm-ffi",)}
SEEING_PACKAGES = ("pillow",)  # for models with an image encoder
_OTHERS = {*SEEING_PACKAGES, *(name for some in TARGET_PACKAGES.values() for name in some)}
PACKAGES = tuple(name for name in wheels.VENDORED if name not in _OTHERS)
PYTHONS = ("3.11", "3.12", "3.13", "3.14")


@dataclass(frozen=True)
class Destination:
    """A kind of machine for which bundles are made. kinds: targets that run there. archs: profiles, one of which the
    artifact must have (empty: the device chooses one when it is opened). templates: files of dist/bundle."""

    title: str
    kinds: tuple[str, ...]
    archs: tuple[str, ...]
    advice: str
    templates: tuple[str, ...]


_COMMON = ("run.sh", "start.py")
DESTINATIONS = {
    "steamdeck": Destination(
        "a Steam Deck", ("vulkan",), ("vangogh", "rdna2", "generic"), "--target vulkan --arch steamdeck",
        (*_COMMON, "README.md", "add-to-steam.sh", "mlc-amd.desktop"),
    ),
    "linux": Destination(
        "a PC with Linux", ("vulkan", "rocm", "cpu"), (), "--target vulkan", (*_COMMON, "README-linux.md"),
    ),
}  # fmt: skip


def run(
    artifact: str,
    *,
    to: Literal["steamdeck", "linux"],
    output: str | None = None,
    weights: KeptWeights = "file",
    python: str = ",".join(PYTHONS),
) -> None:
    """Packs a compiled model with all that runs it, for a machine where nothing needs to be installed: no pip, no TVM,
    no root.

    The machine needs one of these Pythons, x86-64 Linux and, for vulkan, a Vulkan driver, for rocm AMD's HIP runtime,
    for cpu the instructions of the --arch that the model was compiled for. Wheels of the packages come from the package
    index, once; they are kept in the cache.

    Args:
        artifact: a folder made by `mlc-amd compile` (for target cpu: only linux).
        to: steamdeck, or linux for any PC.
        output: a folder, or a file that ends with .tar.zst (default: dist/ARTIFACT-TO.tar.zst here).
        python: the Pythons that it runs with; fewer make it smaller.
    """
    destination, pythons, model = DESTINATIONS[to], pythons_of(python), Artifact.open(Path(artifact).expanduser())
    check(model, destination)
    out = Path(output).expanduser() if output else Path("dist") / f"{model.path.resolve().name}-{to}{SUFFIX}"
    check_output(out)
    found = contents(model, destination, weights == "none", pythons)
    entries = sorted(found, key=lambda entry: (_holds_weights(entry), entry.path))
    total = sum(entry.nbytes for entry in entries)
    with display.compile_progress(f"writing {out}") as progress:
        done = 0

        def wrote(nbytes: int) -> None:
            nonlocal done
            done += nbytes
            progress("write", done, total)

        if out.name.endswith(SUFFIX):
            archive.write_archive(out, out.name.removesuffix(SUFFIX), entries, _holds_weights, wrote)
        else:
            archive.write_folder(out, entries, wrote)
    packed = sum(file.stat().st_size for file in (out.rglob("*") if out.is_dir() else [out]) if file.is_file())
    held = sum(entry.nbytes for entry in entries if _holds_weights(entry))
    sizes = ("size", display.size(packed)), ("weights", display.size(held))
    for left, right in (("bundle", out), *sizes, ("files", len(entries)), ("for", destination.title)):
        print(f"{left:10}{right}")


def _holds_weights(entry: Entry) -> bool:
    return entry.path == f"model/{WEIGHTS}"


def pythons_of(text: str) -> tuple[str, ...]:
    """The Python versions in a list such as "3.12,3.13". Raises UserError for versions that bundles do not support."""
    asked = [part.strip() for part in text.split(",")]
    if unknown := [name for name in asked if name not in PYTHONS]:
        raise UserError(f"--python {unknown[0]}: bundles can be made for {', '.join(PYTHONS)}")
    return tuple(name for name in PYTHONS if name in asked)


_REFUSED = {
    "cpu": "does not use its GPU",
    "rocm": "needs ROCm, which that machine does not have",
}
# What the machine must have for a target.
_NEEDS = {"vulkan": "the driver of your GPU", "rocm": "AMD's HIP runtime", "cpu": "a CPU of the level {mcpu}"}
_RANDOM = "\n**This bundle has no weights: they are random, and so is what the model says. It is for measurements.**\n"


def check(model: Artifact, destination: Destination) -> None:
    """Raises UserError if a bundle of this artifact cannot run at the destination."""
    kind = model.manifest["target"]["kind"]
    again = f"compile it with {destination.advice}"
    if kind not in destination.kinds:
        raise UserError(f"{model.path} was compiled for target {kind}, which {_REFUSED[kind]}; {again}")
    archs = list(model.manifest["libraries"])
    if destination.archs and not any(arch.split(":")[0] in destination.archs for arch in archs):
        why = f"was compiled for {', '.join(archs)}, which does not run on {destination.title}"
        raise UserError(f"{model.path} {why}; {again}")


def check_output(out: Path) -> None:
    """Raises UserError if `out` exists and is no bundle, or is an archive of an unsupported kind."""
    if out.suffix in (".zip", ".gz", ".xz", ".tgz", ".tar", ".zst") and not out.name.endswith(SUFFIX):
        raise UserError(f"cannot make {out.name}: give -o a folder or a file that ends with {SUFFIX}")
    archived = out.name.endswith(SUFFIX)
    if archived:
        archive.compressor()  # raises its error before the downloads
    other = out.is_dir() and any(out.iterdir()) and not (out / MARK).exists()
    if out.exists() and (out.is_dir() == archived or other):
        raise UserError(f"{out} exists and is not a bundle; choose another output with -o")


def contents(model: Artifact, destination: Destination, weightless: bool, pythons: tuple[str, ...]) -> Iterator[Entry]:
    """Every file of the bundle."""
    kind = model.manifest["target"]["kind"]
    names = (*PACKAGES, *TARGET_PACKAGES[kind], *(SEEING_PACKAGES if "vision" in model.manifest else ()))
    cache = cache_directory() / "wheels"
    wheels.fetch(names, pythons, cache)
    library = {**wheels.site_packages(names, pythons, cache), **_sources(names)}
    digest = hashlib.sha256()
    for path, content in sorted(library.items()):
        digest.update(f"{path}\0{len(content)}\0".encode() + content)
        yield Entry(f"lib/{path}", content)
    yield from (Entry(f"model/{path}", content) for path, content in model_files(model, weightless).items())
    facts = {
        "made_by": f"mlc-amd {mlc_amd.__version__}",
        "for": destination.title,
        "model": model.manifest["name"],
        "target": kind,
        "pythons": pythons,
        "packages": {name: wheels.VENDORED[name].version for name in names},
        "lib": digest.hexdigest(),
    }
    yield Entry(MARK, json.dumps(facts, indent=1).encode() + b"\n")
    known = {
        "MODEL": title(model.manifest["name"]),
        "TITLE": destination.title,
        "NEEDS": _NEEDS[kind].format_map(model.manifest["target"]),
        "USE": _use(model.manifest["model"]["encoder"]),
        "PYTHONS": " ".join(pythons),
        "TAGS": " ".join(f"cpython-{python.replace('.', '')}" for python in pythons),
        "DIGEST": digest.hexdigest()[:12],
        "RANDOM": _RANDOM if weightless or model.random_weights else "",
    }
    for name in destination.templates:
        text = resources.files("mlc_amd.dist").joinpath("bundle", name).read_text()
        for key, value in known.items():
            text = text.replace(f"@{key}@", value)
        yield Entry("README.md" if name.startswith("README") else name, text.encode(), name.endswith(".sh"))


def _use(encoder: manifests.ManifestEncoder | None) -> str:
    """What the command line does with the model by default."""
    if encoder is None:
        return "`./run.sh` chats"
    verb = "rerank --query QUERY" if encoder["pooling"] == "rank" else "embed"
    return f"`./run.sh {verb} --file TEXTS`"


def title(name: str) -> str:
    """A model's name as a line of text for people, also in terminals."""
    return " ".join(terminal.clean(name).split())


def _sources(names: tuple[str, ...]) -> dict[str, bytes]:
    """The modules of this project, and the metadata from which `importlib.metadata` reads their version and
    requirements."""
    files = {"mlc_amd/__init__.py": Path(mlc_amd.__file__).read_bytes()}
    for package, (patterns, left_out) in SOURCES.items():
        root = Path(str(resources.files(f"mlc_amd.{package}")))
        for file in sorted(file for pattern in patterns for file in root.glob(pattern)):
            if not any(file.match(pattern) for pattern in left_out):
                files[f"mlc_amd/{package}/{file.relative_to(root).as_posix()}"] = file.read_bytes()
    version = mlc_amd.__version__
    needs = [f"Requires-Dist: {name}=={wheels.VENDORED[name].version}" for name in names]
    lines = ["Metadata-Version: 2.1", "Name: mlc-amd", f"Version: {version}", f"Requires-Python: >={PYTHONS[0]}"]
    files[f"mlc_amd-{version}.dist-info/METADATA"] = "\n".join((*lines, *needs, "")).encode()
    return files


def model_files(model: Artifact, weightless: bool) -> dict[str, bytes | Path]:
    """The artifact's files, without those that only developers need. weightless: the only weights are the vectors."""
    manifest = model.manifest.copy()
    if weightless:
        manifest["weights"] = "random"
    some = [name for name in (TABLES, manifest.get("exchange", {}).get("relay")) if name in manifest["files"]]
    names = (*manifest["libraries"].values(), "tokenizer.json", "tokenizer_config.json", WEIGHTS, *some)
    files: dict[str, bytes | Path] = {name: model.path / name for name in names}
    listed = {name: manifest["files"][name] for name in names}
    if weightless and not model.random_weights:
        files[WEIGHTS], listed[WEIGHTS] = _vectors(model)
    return {**files, MANIFEST: manifests.text(manifest, listed).encode()}


def _vectors(model: Artifact) -> tuple[bytes, manifests.FileFacts]:
    """The weights file without the matrices, and its entry for the manifest."""
    with temporary("deploy") as directory:
        place = directory / WEIGHTS
        held = Weights(model.path / WEIGHTS)
        arrays = {name: held[name] for name in held.places if name not in model.manifest["tensors"]}
        specs = [TensorSpec(name, array.dtype.name, array.shape) for name, array in arrays.items()]
        writer = WeightsWriter(place, specs)
        for name, array in arrays.items():
            writer.write(name, 0, array)
        writer.close()
        return place.read_bytes(), facts(place)
