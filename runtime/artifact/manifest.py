"""What manifest.json says, as types; dist/README.md explains the keys.

`read` gives a `Manifest`: a dictionary whose values have these types and lie within these limits. manifest_check.py
then compares its parts with one another and with the weights. What a new kind of model adds comes here first: a key
that is not here is not read.

manifest.json ends with the SHA-256 of all that is before, so that damage is told from another version of the format.
"""

import hashlib
import json
import re
from pathlib import Path
from typing import Annotated, Any, Literal, NotRequired, TypedDict

import msgspec
from msgspec import Meta

from mlc_amd.runtime.artifact import json_files
from mlc_amd.runtime.cache.kv_types import KvType
from mlc_amd.runtime.cache.pages import STATE
from mlc_amd.runtime.errors import UserError
from mlc_amd.runtime.sampling.sampler import SamplingChanges

FORMAT_VERSION = 10
MANIFEST = "manifest.json"
ADVICE = "compile the model again"
_SEAL = re.compile(rb',\n "sha256": "([0-9a-f]{64})"\n}\n\Z')
# The limits only keep what is computed with these numbers within 64 bits; what is right follows from other parts.
Count = Annotated[int, Meta(ge=0, le=1 << 40)]
Size = Annotated[int, Meta(ge=1, le=1 << 40)]
Figure = Annotated[float, Meta(ge=0, le=1e24)]
Name = Annotated[str, Meta(pattern=r"^[!-~]+\Z", max_length=300)]
FileName = Annotated[str, Meta(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.+=-]*\Z", max_length=200)]  # no folders
Digest = Annotated[str, Meta(pattern=r"^[0-9a-f]{64}\Z")]
DType = Literal[
    "bool", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64",
    "float16", "bfloat16", "float32", "float64",
]  # fmt: skip
Shape = Annotated[list[Size], Meta(max_length=8)]
Grid = Annotated[list[Annotated[int, Meta(ge=1, le=(1 << 31) - 1)]], Meta(min_length=3, max_length=3)]
Block = Annotated[list[Annotated[int, Meta(ge=1, le=1024)]], Meta(min_length=3, max_length=3)]
Argument = list[str | int | list[int]]  # manifest_check.py knows its forms


class Source(TypedDict):
    file: str
    id: str


class Model(TypedDict):
    """Of compiler/models/config.py what runs a model; `inspect` shows the rest."""

    architecture: str
    name: str
    vocab: Annotated[int, Meta(ge=1, le=(1 << 30) - 1)]
    hidden: Size
    context: Size
    layers: list[dict[str, Any]]
    ropes: dict[str, dict[str, Any]]
    output_norm: str
    norm_eps: float
    tied: bool
    norm: str
    norm_bias: bool
    embedding_scale: float
    logit_scale: float
    logit_softcap: float
    layer_embedding: Count
    unused: list[str]


class Needs(TypedDict):
    """What a Vulkan profile asks of a device."""

    features: list[Name]
    subgroup_size: Count
    fragments: list[list[Size]]
    shared_memory: Count
    threads: Count
    push_constants: Annotated[int, Meta(ge=8, le=1 << 16)]


class Target(TypedDict):
    kind: Literal["cpu", "rocm", "vulkan"]
    arch: str
    mcpu: NotRequired[str]
    isa: NotRequired[str]
    flags: NotRequired[list[str]]
    archs: NotRequired[Annotated[list[Name], Meta(min_length=1)]]
    bandwidth: NotRequired[dict[str, Figure]]
    needs: NotRequired[dict[str, Needs]]
    copy_bytes: NotRequired[Size]


class Launch(TypedDict):
    kernel: str
    args: list[Argument]


class Function(TypedDict):
    rows: Annotated[int, Meta(ge=1, le=1 << 20)]
    single: Annotated[int, Meta(ge=0, le=1 << 20)]
    logits: Annotated[int, Meta(ge=1, le=1 << 20)]
    samples: bool
    launches: Annotated[list[Launch], Meta(min_length=1)]


class Buffer(TypedDict):
    dtype: DType
    shape: Shape


class KvTensor(Buffer):
    name: Name
    span: NotRequired[Annotated[int, Meta(ge=STATE, le=1 << 40)]]


class Param(Buffer):
    """Besides what every parameter has, facts of runtime/measure/inputs.py."""

    name: str
    role: Literal["state", "rows", "pages", "cells", "input", "weight", "cache", "states", "output", "work", "zero"]
    draw: NotRequired[list[str | int | float]]
    vocab: NotRequired[Size]
    share: NotRequired[Figure]
    experts: NotRequired[dict[str, Any]]
    columns: NotRequired[Count]


class Moved(TypedDict):
    call: Figure
    token: Figure
    key: Figure


class Operations(TypedDict):
    call: Figure
    score: Figure


Origin = TypedDict("Origin", {"from": str, "plan": dict[str, Any] | None})


class Kernel(TypedDict):
    name: Name
    calls: dict[str, Count]
    operator: str
    args: dict[str, Any]
    params: list[Param]
    states: list[Annotated[list[Count], Meta(min_length=4, max_length=4)]]
    bytes: Moved
    keys: Count
    operations: Operations
    tuned: dict[str, Origin]


class Step(TypedDict):
    """One launch of a call of a kernel; the last three are Vulkan's."""

    symbol: Name
    grid: Grid
    block: Block
    args: list[Count]
    code: NotRequired[Annotated[list[Count], Meta(min_length=2, max_length=2)]]
    writes: NotRequired[list[Count]]
    table: NotRequired[bool]


class Launched(TypedDict):
    scratch: list[Size]
    steps: Annotated[list[Step], Meta(min_length=1)]


class Drawn(Buffer):
    draw: Annotated[list[str | int | float], Meta(min_length=1, max_length=3)]


class Stored(TypedDict):
    tensors: Count
    bytes: Count


class FileFacts(TypedDict):
    """header: of safetensors; it is compared whenever an artifact is opened, all of the weights only if asked for."""

    bytes: Count
    sha256: Digest
    header: NotRequired[Digest]


class Manifest(TypedDict):
    format: int
    name: str
    source: Source
    model: Model
    target: Target
    context: Annotated[int, Meta(ge=1, le=1 << 30)]
    kv_type: KvType
    sampling: SamplingChanges
    functions: dict[str, Function]
    kernels: list[Kernel]
    libraries: Annotated[dict[str, FileName], Meta(min_length=1)]
    launches: dict[str, dict[str, Launched]]
    arena_bytes: Count
    io: dict[str, Buffer]
    kv: list[KvTensor]
    page: Size
    formats: dict[str, Stored]
    weights: Literal["file", "random"]
    tensors: dict[str, Drawn]
    token_bytes: Count
    weight_bytes: Count
    files: dict[FileName, FileFacts]


def text(manifest: dict, files: dict[str, dict]) -> str:
    """manifest.json of these files: `manifest` with its format, files and checksum."""
    body = json.dumps({**manifest, "format": FORMAT_VERSION, "files": files}, indent=1).removesuffix("\n}")
    return f'{body},\n "sha256": "{hashlib.sha256(body.encode()).hexdigest()}"\n}}\n'


def read(folder: Path) -> Manifest:
    """The manifest of an artifact. UserError for one that is damaged, or of another version of the format."""
    path = folder / MANIFEST
    data = json_files.read_bytes(path)
    seal = _SEAL.search(data[-100:])
    body = data[: len(data) - len(seal[0])] if seal else data
    whole = bool(seal) and hashlib.sha256(body).hexdigest().encode() == seal[1]
    version = _version(data)
    if version is not None and version != FORMAT_VERSION and (whole or (seal is None and version < 9)):
        raise UserError(
            f"{folder} has artifact format {version}, this version reads {FORMAT_VERSION}; {ADVICE}"
        )  # formats before 9 had no checksum
    if not whole:
        raise UserError(f"{path} is damaged or was changed (its checksum differs); {ADVICE}")
    return json_files.decode(data, Manifest, path, ADVICE)


def check_described(folder: Path) -> None:
    """ValueError where a manifest that was just written has a key or a value that this description lacks: it would be
    lost when the manifest is read."""
    written, known = json.loads((folder / MANIFEST).read_bytes()), dict(read(folder))
    lost = _lost({key: value for key, value in written.items() if key != "sha256"}, known, "")
    if lost:
        raise ValueError(f"runtime/artifact/manifest.py does not describe {lost}")


def _lost(written: Any, known: Any, place: str) -> str:
    """The first place where `written` has what `known` has not; "" where both are the same."""
    if isinstance(written, dict) and isinstance(known, dict):
        pairs = ((f"{place}.{key}", value, known.get(key)) for key, value in written.items())
    elif isinstance(written, list) and isinstance(known, list) and len(written) == len(known):
        pairs = ((f"{place}[{i}]", *pair) for i, pair in enumerate(zip(written, known, strict=True)))
    else:
        return "" if written == known else place
    return next((found for at, one, other in pairs if (found := _lost(one, other, at))), "")


class _Format(TypedDict):
    format: Annotated[int, Meta(ge=1, le=1 << 20)]


def _version(data: bytes) -> int | None:
    """None where there is none to be read."""
    try:
        return msgspec.json.decode(data, type=_Format)["format"]
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
        return None
