"""The types of manifest.json. dist/README.md explains the keys.

The compiler makes a `ManifestBody`, `text` makes the file, and `read` returns a `Manifest`: dictionaries with these
types and limits. manifest_check.py then compares the parts with one another and with the weights. A key that is not
declared here is not read; `check_described` finds such a key when an artifact is written.

manifest.json ends with the SHA-256 of everything before it. It distinguishes damage from another version of the format.
"""

import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, NotRequired, TypedDict

import msgspec
from msgspec import Meta

from mlc_amd.runtime.artifact import json_files
from mlc_amd.runtime.artifact.manifest_draft import ManifestDraft
from mlc_amd.runtime.cache.kv_types import KvType
from mlc_amd.runtime.cache.pages import STATE
from mlc_amd.runtime.errors import UserError
from mlc_amd.runtime.exchange_layout import boxes
from mlc_amd.runtime.gpus import Unit
from mlc_amd.runtime.sampling.settings import SamplingChanges

FORMAT_VERSION = 18
LINES = 4  # nesting levels of the manifest that get a line for each value
MANIFEST = "manifest.json"
ADVICE = "compile the model again"
RANK = "@"  # in the name of a tensor's part, before the rank of its GPU; parts of rank 0 have the tensor's name
FOLLOW, CHAIN = "follow_", "chain_"  # prefixes of functions that guess tokens: after a step, and after a guess
BLOCK = f"{CHAIN}block"  # the function for a block of guesses of a draft
IMAGE, PIECE = "image_", "+"  # in names of an image encoder's functions: before the patches; before a piece's number
_SEAL = re.compile(rb',\n "sha256": "([0-9a-f]{64})"\n}\n\Z')
# These limits only keep computations with the numbers within 64 bits. manifest_check.py compares the values.
_Count = Annotated[int, Meta(ge=0, le=1 << 40)]
_Size = Annotated[int, Meta(ge=1, le=1 << 40)]
_Figure = Annotated[float, Meta(ge=0, le=1e24)]
_Name = Annotated[str, Meta(pattern=r"^[!-~]+\Z", max_length=300)]
_FileName = Annotated[str, Meta(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.+=-]*\Z", max_length=200)]  # no path separators
_Digest = Annotated[str, Meta(pattern=r"^[0-9a-f]{64}\Z")]
_Rows = Annotated[int, Meta(ge=1, le=1 << 20)]
_DType = Annotated[str, Meta(pattern=r"^(bool|u?int(8|16|32|64)|bfloat16|float(16|32|64))\Z")]
_Shape = Annotated[list[_Size], Meta(max_length=8)]
_Grid = Annotated[list[Annotated[int, Meta(ge=1, le=(1 << 31) - 1)]], Meta(min_length=3, max_length=3)]
_Block = Annotated[list[Annotated[int, Meta(ge=1, le=1024)]], Meta(min_length=3, max_length=3)]
LaunchArgument = list[str | int | list[int]]  # manifest_check.py checks its forms


class Source(TypedDict):
    file: str
    id: str


class EncoderHead(TypedDict):
    name: str
    rows: _Size
    act: str
    norm: bool


class ManifestEncoder(TypedDict):
    pooling: Literal["none", "mean", "cls", "last", "rank"]
    features: _Size
    causal: bool
    ranked: Literal["mean", "cls", "last"]
    softmax: bool
    head: list[EncoderHead]
    types: _Count
    norm: bool


class ManifestModel(TypedDict):
    """The configuration of compiler/models/config.py. The runtime uses some of it, `inspect` shows the rest."""

    architecture: str
    name: str
    vocab: Annotated[int, Meta(ge=1, le=(1 << 30) - 1)]
    hidden: _Size
    context: _Size
    layers: list[dict[str, Any]]
    ropes: dict[str, dict[str, Any]]
    output_norm: str
    norm_eps: float
    tied: bool
    norm: str
    norm_weights: bool
    positions: _Count
    embedding_scale: float
    embedding_norm: str
    logit_scale: float
    logit_softcap: float
    layer_embedding: _Count
    unused: list[str]
    streams: dict[str, Any] | None
    encoder: ManifestEncoder | None
    draft: ManifestDraft | None


class DeviceRequirements(TypedDict):
    """What a Vulkan profile requires of a device."""

    features: list[_Name]
    subgroup_size: _Count
    fragments: list[list[_Size]]
    shared_memory: _Count
    threads: _Count
    push_constants: Annotated[int, Meta(ge=8, le=1 << 16)]


class ManifestTarget(TypedDict):
    kind: Literal["cpu", "rocm", "vulkan"]
    arch: str
    mcpu: NotRequired[str]
    isa: NotRequired[str]
    flags: NotRequired[list[str]]
    archs: NotRequired[Annotated[list[_Name], Meta(min_length=1)]]
    bandwidth: NotRequired[dict[str, _Figure]]
    needs: NotRequired[dict[str, DeviceRequirements]]
    copy_bytes: NotRequired[_Size]


class ManifestLaunch(TypedDict):
    kernel: str
    args: list[LaunchArgument]


class ManifestFunction(TypedDict):
    """Only in parts of several GPUs (stages.py, ranks.py): receives, sends: ranges of the arena, [first, end]. .._at:
    their offsets in the memory for exchanges. own: [first, destination, bytes] in the arena of what this GPU sent.
    rounds: [count, words] of consecutive exchanges while kernels run."""

    receives: NotRequired[list[list[int]]]
    sends: NotRequired[list[list[int]]]
    receives_at: NotRequired[list[int]]
    sends_at: NotRequired[list[int]]
    own: NotRequired[list[int]]
    rounds: NotRequired[list[list[int]]]
    rows: Annotated[int, Meta(ge=1, le=1 << 20)]
    single: Annotated[int, Meta(ge=0, le=1 << 20)]
    logits: Annotated[int, Meta(ge=1, le=1 << 20)]
    samples: bool
    launches: Annotated[list[ManifestLaunch], Meta(min_length=1)]


class Buffer(TypedDict):
    dtype: _DType
    shape: _Shape


class KvTensor(Buffer):
    name: _Name
    span: NotRequired[Annotated[int, Meta(ge=STATE, le=1 << 40)]]


class ManifestParam(Buffer):
    """draw, vocab, share, experts and columns are for runtime/measure/inputs.py."""

    name: str
    role: Literal["state", "rows", "pages", "cells", "input", "weight", "cache", "states", "output", "work", "zero"]
    draw: NotRequired[list[str | int | float]]
    vocab: NotRequired[_Size]
    share: NotRequired[_Figure]
    experts: NotRequired[dict[str, Any]]
    columns: NotRequired[_Count]


class MemoryCosts(TypedDict):
    call: _Figure
    token: _Figure
    key: _Figure


class OperationCosts(TypedDict):
    call: _Figure
    score: _Figure


Origin = TypedDict("Origin", {"from": str, "plan": dict[str, Any] | None})


class ManifestKernel(TypedDict):
    name: _Name
    calls: dict[str, _Count]
    operator: str
    args: dict[str, Any]
    params: list[ManifestParam]
    states: list[Annotated[list[_Count], Meta(min_length=4, max_length=4)]]
    bytes: MemoryCosts
    keys: _Count
    operations: OperationCosts
    tuned: dict[str, Origin]


class DeviceLaunch(TypedDict):
    """One launch of a call of a kernel. units: those that multiply in its code. code: [offset, bytes] in the library's
    file; without it the whole file. writes, table: only for Vulkan."""

    symbol: _Name
    grid: _Grid
    block: _Block
    args: list[_Count]
    units: NotRequired[list[Unit]]
    code: NotRequired[Annotated[list[_Count], Meta(min_length=2, max_length=2)]]
    writes: NotRequired[list[_Count]]
    table: NotRequired[bool]


class ManifestExchange(TypedDict):
    """See runtime/exchange_layout.py. relay: file with machine code; missing if GPUs write to each other's memory.
    capacity: words in a slot. words: the words that a GPU sends in a round, by kernel."""

    relay: NotRequired[_FileName]
    capacity: _Size
    words: dict[_Name, _Count]


class DeviceLaunches(TypedDict):
    scratch: list[_Size]
    steps: Annotated[list[DeviceLaunch], Meta(min_length=1)]


class RandomTensor(Buffer):
    draw: Annotated[list[str | int | float], Meta(min_length=1, max_length=3)]


class FormatTotals(TypedDict):
    tensors: _Count
    bytes: _Count


class FileFacts(TypedDict):
    """header: checksum of a safetensors header. It is always checked; the sha256 of weights only on request."""

    bytes: _Count
    sha256: _Digest
    header: NotRequired[_Digest]


class Vision(TypedDict):
    """The image encoder. runtime/images/layout.py explains the keys from `patch` on. file: its path. metadata: its keys
    `clip.*` without long lists. columns: of a row of features: the decoder's width times (1 + deepstack). attention: of
    an image's rows: to all of them ("image") or to earlier rows ("causal"). positions: their RoPE positions have two
    dimensions ("grid") or one ("sequence"). buckets: function to patches. io: columns of PATCHES and of the result."""

    projector: str
    file: str
    metadata: dict[str, Any]
    columns: _Size
    deepstack: _Count
    attention: Literal["causal", "image"]
    positions: Literal["sequence", "grid"]
    buckets: Annotated[dict[str, _Rows], Meta(min_length=1)]
    io: dict[str, _Rows]
    patch: _Rows
    merge: Annotated[int, Meta(ge=1, le=64)]
    window: _Count
    by_column: bool
    nested: bool
    class_row: Literal["", "first", "last"]
    table: Literal["", "rows", "axes", "aligned", "linear", "smooth", "cubic", "buckets"]
    turns: dict[str, Any] | None
    breaks: bool


class ManifestImages(TypedDict):
    """For decoders: columns: of a row of features. features: their dtype. attention, positions: see `Vision`."""

    columns: _Size
    features: Literal["float32", "float16"]
    attention: Literal["causal", "image"]
    positions: Literal["sequence", "grid"]


class ManifestBody(TypedDict):
    """Everything that the compiler knows. `write_manifest` adds the rest."""

    name: str
    source: Source
    model: ManifestModel
    vision: NotRequired[Vision]
    gpus: Annotated[int, Meta(ge=1, le=8)]
    target: ManifestTarget
    context: Annotated[int, Meta(ge=1, le=1 << 30)]
    kv_type: KvType
    sampling: SamplingChanges
    functions: dict[str, ManifestFunction]
    kernels: list[ManifestKernel]
    libraries: Annotated[dict[str, _FileName], Meta(min_length=1)]
    launches: dict[str, dict[str, DeviceLaunches]]
    exchange: NotRequired[ManifestExchange]
    images: NotRequired[ManifestImages]
    arena_bytes: _Count
    io: dict[str, Buffer]
    kv: list[KvTensor]
    page: _Size
    formats: dict[str, FormatTotals]
    quantization: str
    weights: Literal["file", "random"]
    tensors: dict[str, RandomTensor]
    token_bytes: _Count
    weight_bytes: _Count
    part_bytes: NotRequired[_Count]


class Manifest(ManifestBody):
    """inline: whether kernels exchange parts while they run. Only in the part of one of several GPUs (ranks.py)."""

    inline: NotRequired[bool]
    format: int
    files: dict[_FileName, FileFacts]


def boxes_of(manifest: Manifest) -> tuple[str, ...]:
    """The parameters that exchanging kernels have in addition to the parameters of the kernels that they replace."""
    return boxes(manifest["gpus"], peers="relay" not in manifest.get("exchange", ()))


def is_draft(name: str) -> bool:
    """Whether a function guesses tokens instead of computing logits of the model."""
    return name.startswith((FOLLOW, CHAIN))


def is_encoder(name: str) -> bool:
    """Whether a function encodes images."""
    return name.startswith(IMAGE)


def decoders(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """The functions of a manifest that do not encode images."""
    return {name: function for name, function in manifest["functions"].items() if not is_encoder(name)}


def text(manifest: ManifestBody, files: Mapping[str, FileFacts]) -> str:
    """The content of manifest.json: `manifest` with its format, files and checksum."""
    body = _lines({**manifest, "format": FORMAT_VERSION, "files": files}, LINES).removesuffix("\n}")
    return f'{body},\n "sha256": "{hashlib.sha256(body.encode()).hexdigest()}"\n}}\n'


def _lines(value: Any, levels: int) -> str:
    """JSON with a line for each value in the first `levels` levels: readable, and fast to write."""
    if not levels or not value or not isinstance(value, dict | list | tuple):
        return json.dumps(value)
    if not isinstance(value, dict):
        return "[\n" + ",\n".join(_lines(item, levels - 1) for item in value) + "\n]"
    return "{\n" + ",\n".join(f"{json.dumps(key)}: {_lines(item, levels - 1)}" for key, item in value.items()) + "\n}"


def read(folder: Path) -> Manifest:
    """The manifest of an artifact. Raises UserError for one that is damaged, or has another version of the format."""
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
    """Raises ValueError for a manifest with a key or value that these types lack: reading would drop it."""
    written, known = json.loads((folder / MANIFEST).read_bytes()), dict(read(folder))
    lost = _lost({key: value for key, value in written.items() if key != "sha256"}, known, "")
    if lost:
        raise ValueError(f"runtime/artifact/manifest.py does not describe {lost}")


def _lost(written: Any, known: Any, place: str) -> str:
    """The place of the first difference; "" if there is none."""
    if written == known:
        return ""
    if isinstance(written, dict) and isinstance(known, dict):
        pairs = ((f"{place}.{key}", value, known.get(key)) for key, value in written.items())
    elif isinstance(written, list) and isinstance(known, list) and len(written) == len(known):
        pairs = ((f"{place}[{i}]", *pair) for i, pair in enumerate(zip(written, known, strict=True)))
    else:
        return place
    return next((found for at, one, other in pairs if (found := _lost(one, other, at))), "")


class _Format(TypedDict):
    format: Annotated[int, Meta(ge=1, le=1 << 20)]


def _version(data: bytes) -> int | None:
    """The format's version; None if it cannot be read."""
    try:
        return msgspec.json.decode(data, type=_Format)["format"]
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
        return None
