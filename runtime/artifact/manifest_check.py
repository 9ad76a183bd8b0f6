"""Checks that the parts of a manifest are consistent with one another and with the weights: every name exists, and
every argument of every launch has the dtype and size that its kernel declares.

With a manifest that passes, kernels cannot read or write outside of their buffers, provided that they do what they
declare (interface.py).
"""

from collections.abc import Mapping
from math import prod

from mlc_amd.runtime.artifact.io_buffers import io_buffers
from mlc_amd.runtime.artifact.io_names import DRAFTED, ENCODED, HIDDEN, PER_ANSWER, PER_ROW, RESULTS, page_table
from mlc_amd.runtime.artifact.manifest import (
    BLOCK,
    PIECE,
    DeviceLaunches,
    Manifest,
    ManifestFunction,
    ManifestKernel,
    ManifestLaunch,
    boxes_of,
    decoders,
    is_draft,
    is_encoder,
)
from mlc_amd.runtime.artifact.random_weights import draw_fault
from mlc_amd.runtime.artifact.ranks import segments
from mlc_amd.runtime.artifact.weight_block import ALIGN, DTYPES, PAD, byte_count
from mlc_amd.runtime.cache.pages import PAGE, STATE
from mlc_amd.runtime.errors import shorten
from mlc_amd.runtime.exchange_layout import PROBE, joint_params, kernels_in

TOKENIZER = ("tokenizer.json", "tokenizer_config.json")
_Tensor = tuple[str, tuple[int, ...]]  # dtype, shape
_STORED = {name: dtype for dtype, name in DTYPES.items()}
_ELEMENTS = (1 << 31) - 1  # largest number of elements of a cached tensor: kernels compute indices in it with int32
VECTOR = 16  # vectors are padded to a multiple of so many elements (dist/README.md)
# For each role of a parameter: the kinds of arguments that are allowed, and their names; None: any name.
_PLACES: dict[str, dict[str, tuple[str, ...] | None]] = {
    "state": {"io": ("state", "answers")},
    "rows": {"io": ("rows",)},
    "pages": {"io": None},
    "cells": {"io": (page_table(STATE),)},
    "input": {"io": None, "arena": None, "kv": None, "weight": None},
    "weight": {"weight": None},
    "cache": {"kv": None},
    "states": {"kv": None},
    "output": {"io": RESULTS, "arena": None, "kv": None},
    "work": {"arena": None, "kv": None},
    "zero": {"kv": None},
}
_PAGED = ("cache", "states")  # roles of tensors that consist of pages or cells
# Kernels that a device launches itself, and the number of their buffers (devices/vulkan).
_OWN = {"copy": 2, "fragment_probe": 4, PROBE: 5}
_GPUS = ("rocm", "vulkan")
_GPU_KEYS = ("archs", "bandwidth")
_TARGET_KEYS = {"cpu": ("mcpu", "flags"), "rocm": _GPU_KEYS, "vulkan": (*_GPU_KEYS, "needs", "copy_bytes")}


class ManifestFault(Exception):
    """An inconsistency of a manifest. The message names its key."""


def check(manifest: Manifest, tensors: Mapping[str, Mapping]) -> None:
    """Raises ManifestFault for the first inconsistency. tensors: the header of the weights, as in safetensors."""
    _check_files(manifest)
    _check_functions(manifest)
    _check_io(manifest)
    _check_kv(manifest)
    stored: dict[str, _Tensor] = {
        name: (_STORED[entry["dtype"]], tuple(entry["shape"]))
        for name, entry in tensors.items()
        if not name.startswith(PAD)
    }
    _check_weights(manifest, stored)
    kernels = {kernel["name"]: kernel for kernel in manifest["kernels"]}
    _require(len(kernels) == len(manifest["kernels"]), "kernels", "two have the same name")
    for arch, launched in manifest["launches"].items():
        _check_launched(manifest, arch, launched, kernels)
    arguments = _Arguments(manifest, stored, kernels)
    for name, function in manifest["functions"].items():
        for number, launch in enumerate(function["launches"]):
            if why := arguments.fault(launch, function):
                place = f"functions[{shorten(name)}].launches[{number}]"
                raise ManifestFault(f"key {place}, kernel {shorten(launch['kernel'])}: {why}")


def _require(holds: bool, key: str, what: str) -> None:
    if not holds:
        raise ManifestFault(f"key {key}: {what}")


# ---- parts


def _check_files(manifest: Manifest) -> None:
    libraries, target, launches = manifest["libraries"], manifest["target"], manifest["launches"]
    for key in _TARGET_KEYS[target["kind"]]:
        _require(key in target, f"target.{key}", "it is missing")
    archs = set(target.get("archs", [target["arch"]]))
    _require(set(libraries) == archs, "libraries", "not those of the target's archs")
    _require(set(launches) == (archs if target["kind"] in _GPUS else set()), "launches", "not the target's archs")
    _require(set(target.get("needs", archs)) == archs, "target.needs", "not those of the target's archs")
    exchange, relayed = manifest.get("exchange"), target["kind"] == "vulkan"
    if exchange:
        _require(("relay" in exchange) == relayed, "exchange.relay", f"it is {'missing' if relayed else 'not used'}")
        _require(PROBE in exchange["words"], "exchange.words", f"{PROBE} is missing")
        within = max(exchange["words"].values()) <= exchange["capacity"]
        _require(within, "exchange.capacity", "less than the words of a kernel")
    relay = [exchange["relay"]] if exchange and "relay" in exchange else []
    for name in (*libraries.values(), *relay, *TOKENIZER):
        _require(name in manifest["files"], "files", f"{name} is used and not listed")


def _check_functions(manifest: Manifest) -> None:
    functions, buckets = manifest["functions"], manifest["vision"]["buckets"] if "vision" in manifest else {}
    encoders = {name: segments(functions, name, PIECE) for name in buckets}
    unfinished = {piece for pieces in encoders.values() for piece in pieces[:-1]}
    for name, function in functions.items():
        rows, single, logits = function["rows"], function["single"], function["logits"]
        good = single <= rows and logits <= rows and (single <= logits or logits == rows)
        _require(good, f"functions[{shorten(name)}]", f"{rows} rows, {single} single ones and {logits} rows of logits")
        used = {str(arg[-1]) for launch in function["launches"] for arg in launch["args"] if arg[:1] == ["io"]}
        result = ENCODED if is_encoder(name) else "logits"
        # then it only writes keys to the cache
        lacks = name in unfinished or (is_draft(name) and not function["samples"])
        _require(result in used or lacks, f"functions[{shorten(name)}].launches", f"none computes {result}")
        _require(("sampled" in used) == function["samples"], f"functions[{shorten(name)}].samples", "not what it does")
    if manifest["model"]["encoder"]:
        good = all(f["logits"] == f["rows"] and not f["single"] for f in functions.values())
        _require(good and len(functions) > 0, "functions", "they are not those of an encoder")
        return
    rows = {name: f["rows"] for name, f in functions.items() if is_encoder(name)}
    wanted = {piece: buckets[name] for name, pieces in encoders.items() for piece in pieces}
    _require(rows == wanted, "vision.buckets", "not the functions that encode images")
    functions = decoders(manifest)
    sizes = {name: (f["rows"], f["single"], f["logits"]) for name, f in functions.items()}
    _require(sizes.get("decode") == (1, 1, 1), "functions", "there is none for one row, 'decode'")
    _require(any(not s and n == m for m, s, n in sizes.values()), "functions", "none computes the logits of all rows")
    _require(any(not s and n == 1 for m, s, n in sizes.values()), "functions", "none takes a chunk")
    _require(any(f["samples"] for f in functions.values()), "functions", "none chooses tokens")
    if draft := manifest["model"]["draft"]:
        rows, single, _ = sizes.get(BLOCK, (0, 0, 0))
        _require(
            not draft["block"] or (rows >= draft["block"] and not single), "model.draft.block", "no function has it"
        )
        _require(draft["mask"] < manifest["model"]["vocab"], "model.draft.mask", "not in the vocabulary")


def _check_io(manifest: Manifest) -> None:
    io, functions = manifest["io"], decoders(manifest).values()
    _require(manifest["page"] == PAGE, "page", f"it is {manifest['page']}, this version has pages of {PAGE}")
    _require(manifest["context"] % PAGE == 0, "context", f"{manifest['context']} is no multiple of {PAGE}")
    columns = io["logits"]["shape"][-1] if "logits" in io else 0
    encoder, vocab = manifest["model"]["encoder"], manifest["model"]["vocab"]
    wanted = encoder["features"] if encoder else vocab
    what = "numbers of a vector" if encoder else "tokens"
    _require(wanted <= columns < wanted + 16, "model.vocab", f"{wanted} {what} do not go with {columns} logits")
    expected = io_buffers(
        rows=max(f["rows"] for f in functions),
        logits=max(f["logits"] for f in functions),
        sampled=max((f["logits"] for f in functions if f["samples"]), default=0),
        columns=columns,
        blocks=manifest["context"] // PAGE,
        spans={entry["span"] for entry in manifest["kv"] if "span" in entry},
        drafts=any(is_draft(name) for name in manifest["functions"]),
        vision=manifest.get("vision"),
        images=manifest.get("images"),
    )
    for name in sorted(expected.keys() | io.keys()):
        wanted, found = (_tensor(buffers[name]) if name in buffers else None for buffers in (expected, io))
        _require(found == wanted, f"io[{shorten(name)}]", f"it must be {_text(wanted)}, not {_text(found)}")


def _check_kv(manifest: Manifest) -> None:
    names = [entry["name"] for entry in manifest["kv"]]
    _require(len(set(names)) == len(names), "kv", "two tensors have the same name")
    counts: dict[int, int] = {}  # pages or cells by span: tensors of one span have the same number
    for i, entry in enumerate(manifest["kv"]):
        _require(prod(entry["shape"]) <= _ELEMENTS, f"kv[{i}].shape", "too large")
        paged, most = entry.get("span", STATE) != STATE, manifest["context"] // PAGE
        _require(not paged or entry["shape"][0] <= most, f"kv[{i}].shape", f"more than {most} pages")
        if "span" in entry:
            count = counts.setdefault(entry["span"], entry["shape"][0])
            _require(entry["shape"][0] == count, f"kv[{i}].shape", f"others of its span have {count} pages")
    _require(counts.get(STATE, 2) >= 2, "kv", "states need two cells, one to read and one to write")


def _check_weights(manifest: Manifest, stored: Mapping[str, _Tensor]) -> None:
    for name, entry in manifest["tensors"].items():
        found, wanted = stored.get(name), _tensor(entry)
        _require(found == wanted, f"tensors[{shorten(name)}]", f"the weights have {_text(found)}, not {_text(wanted)}")
        wrong = draw_fault(entry["dtype"], entry["draw"])
        _require(not wrong, f"tensors[{shorten(name)}].draw", wrong)
    total = sum(byte_count(*tensor) for tensor in stored.values())
    _require(manifest["weight_bytes"] == total, "weight_bytes", f"{manifest['weight_bytes']} instead of {total}")


def _check_launched(
    manifest: Manifest, arch: str, launched: Mapping[str, DeviceLaunches], kernels: Mapping[str, ManifestKernel]
) -> None:
    """Checks the launches of one arch: what they refer to, and the place of their code."""
    needs = manifest["target"].get("needs", {}).get(arch)
    file = manifest["libraries"][arch]
    size = manifest["files"][file]["bytes"]
    needed = {launch["kernel"] for f in manifest["functions"].values() for launch in f["launches"]}
    needed |= manifest.get("exchange", {}).get("words", {}).keys()
    if needs:
        needed.add("copy")
    for name in sorted(needed):
        _require(name in launched, f"launches[{shorten(arch)}]", f"kernel {shorten(name)} is missing")
    boxes = len(boxes_of(manifest))
    for name, kernel in launched.items():
        key = f"launches[{shorten(arch)}][{shorten(name)}]"
        plain = kernels_in(name)
        known = all(one in kernels for one in plain)
        _require(known or name in _OWN, key, "there is no such kernel")
        count = len(joint_params([kernels[one]["params"] for one in plain])) if known else _OWN[name]
        count += boxes * (plain != [name])
        _require(known or len(kernel["steps"]) == 1, key, "it must be one launch")
        buffers = count + len(kernel["scratch"])
        for i, step in enumerate(kernel["steps"]):
            at, args = f"{key}.steps[{i}]", len(step["args"])
            _require(all(arg < buffers for arg in step["args"]), f"{at}.args", f"a call has {buffers} buffers")
            _require(prod(step["block"]) <= 1024, f"{at}.block", "more than 1024 threads")
            begin, length = step.get("code", (0, size))
            inside = begin % 4 == 0 and length % 4 == 0 and length > 0 and begin + length <= size
            _require(inside or "code" not in step, f"{at}.code", f"not within {file}")
            if needs is None:
                continue
            if "code" not in step or "writes" not in step or "table" not in step:
                raise ManifestFault(f"key {at}: code, writes or table is missing")
            push = 8 if step["table"] else 8 * args
            _require(all(place < args for place in step["writes"]), f"{at}.writes", f"a launch has {args} arguments")
            _require(push <= needs["push_constants"], f"{at}.args", "more than the push constants hold")


# ---- arguments


class _Declared:
    """What a kernel declares. params: (name, role, tensor, bytes) of each parameter. tables: indices of the parameters
    that are page tables. caches: indices of the caches that these tables are for."""

    def __init__(self, kernel: ManifestKernel):
        tensors = [_tensor(param) for param in kernel["params"]]
        facts = zip(kernel["params"], tensors, strict=True)
        self.params = [(p["name"], p["role"], of, byte_count(*of)) for p, of in facts]
        self.tables = [i for i, param in enumerate(kernel["params"]) if param["role"] in ("pages", "cells")]
        self.caches = [i for i, param in enumerate(kernel["params"]) if param["role"] in _PAGED]


class _Arguments:
    """Compares the arguments of launches with what their kernels declare."""

    def __init__(self, manifest: Manifest, stored: Mapping[str, _Tensor], kernels: Mapping[str, ManifestKernel]):
        self._held: dict[str, Mapping[str, _Tensor]] = {
            "io": {name: _tensor(entry) for name, entry in manifest["io"].items()},
            "kv": {entry["name"]: _tensor(entry) for entry in manifest["kv"]},
            "weight": stored,
        }
        self._spans = {entry["name"]: entry["span"] for entry in manifest["kv"] if "span" in entry}
        self._arena = manifest["arena_bytes"]
        self._declared = {name: _Declared(kernel) for name, kernel in kernels.items()}

    def fault(self, launch: ManifestLaunch, function: ManifestFunction) -> str:
        """The fault of a launch; "" if there is none."""
        declared = self._declared.get(launch["kernel"])
        if declared is None:
            return "there is no such kernel"
        args, params = launch["args"], declared.params
        if len(args) != len(params):
            return f"{len(args)} arguments instead of {len(params)}"
        for number, (arg, (name, role, tensor, size)) in enumerate(zip(args, params, strict=True)):
            if why := self._argument_fault(arg, function, role, tensor, size):
                return f"argument {number} ({name[:60]!r}): {why}"
        if declared.tables or declared.caches:  # a cache must be read through the table of its own span
            needed = {page_table(self._spans[str(args[i][1])]) for i in declared.caches}
            if wrong := needed ^ {str(args[i][1]) for i in declared.tables}:
                return f"{min(wrong)!r} is not the table of all its caches"
        return ""

    def _argument_fault(self, arg: list, function: ManifestFunction, role: str, declared: _Tensor, size: int) -> str:
        kind, places = arg[0] if arg else None, _PLACES[role]
        if not isinstance(kind, str) or kind not in places:
            return f"{str(arg)[:80]} is no place for its role, {role}"
        if kind == "arena":
            return self._arena_fault(arg, declared, size)
        if len(arg) != 2 or not isinstance(name := arg[1], str):
            return f"{str(arg)[:80]} is not a kind and a name"
        allowed = places[kind]
        if allowed is not None and name not in allowed:
            return f"{name[:60]!r} is no place for its role, {role}"
        found = self._held[kind].get(name)
        if found is None:
            return f"there is no {kind} {name[:60]!r}"
        if kind == "io":
            found = _first_rows(name, found, function)
        elif kind == "weight" and len(declared[1]) == 1:  # vectors are stored with zeros after them
            declared = declared[0], (-(-declared[1][0] // VECTOR) * VECTOR,)
        elif kind == "kv" and (role in _PAGED) != (name in self._spans):
            return f"{kind} {name[:60]!r} {'has' if name in self._spans else 'lacks'} a span, its role is {role}"
        elif role in _PAGED or (name.startswith((HIDDEN, DRAFTED)) and found[1] > declared[1]):
            # Only the shape of one page, cell or row must agree. The number of pages or cells may differ, as tables
            # contain only those in use; of kept rows a function uses the first ones.
            found, declared = _cell(found), _cell(declared)
        return "" if found == declared else f"{kind} {name[:60]!r} is {_text(found)}, it takes {_text(declared)}"

    def _arena_fault(self, arg: list, declared: _Tensor, size: int) -> str:
        if len(arg) != 4 or type(offset := arg[1]) is not int or not isinstance(arg[3], list):
            return f"{str(arg)[:80]} is not arena, offset, dtype and shape"
        if (arg[2], tuple(arg[3])) != declared:
            return f"it is {str(arg[2])[:20]} {str(arg[3])[:60]}, the kernel takes {_text(declared)}"
        if offset < 0 or offset % ALIGN or offset + size > self._arena:
            return f"offset {offset} is no multiple of {ALIGN}, or beyond the arena's {self._arena} bytes"
        return ""


def _first_rows(name: str, held: _Tensor, function: ManifestFunction) -> _Tensor:
    """The part of an io buffer that a function uses."""
    dtype, shape = held
    if name in PER_ROW:
        return dtype, (function["rows"], *shape[1:])
    return (dtype, (function["logits"], *shape[1:])) if name in PER_ANSWER else held


def _cell(tensor: _Tensor) -> _Tensor:
    return tensor[0], tensor[1][1:]


def _tensor(entry: Mapping) -> _Tensor:
    return entry["dtype"], tuple(entry["shape"])


def _text(tensor: _Tensor | None) -> str:
    return "nothing" if tensor is None else f"{tensor[0]} [{', '.join(map(str, tensor[1]))}]"
