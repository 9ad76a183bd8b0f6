"""`mlc-amd inspect`: shows the contents of a GGUF file, an artifact or a GPU code object. Needs no GPU."""

import dataclasses
import re
from collections.abc import Mapping, Sequence
from functools import partial
from json import dumps
from pathlib import Path
from typing import Annotated, Any

from mlc_amd.runtime.artifact.manifest import PIECE, is_draft, is_encoder
from mlc_amd.runtime.artifact.memory import of_manifest, on_host
from mlc_amd.runtime.artifact.ranks import segments
from mlc_amd.runtime.cache.kv_types import latent_type
from mlc_amd.runtime.errors import UserError
from mlc_amd.runtime.folders import temporary
from mlc_amd.runtime.options import CompileOptions, RunOptions, option_of
from mlc_amd.tools import target as targets
from mlc_amd.tools.hub import encoders, models
from mlc_amd.tools.inspection import (
    inspect_bounds,
    inspect_header,
    inspect_kernels,
    inspect_memory,
    inspect_summary,
    inspect_vulkan,
)
from mlc_amd.tools.inspection.inspect_summary import WIDTH
from mlc_amd.tools.measure import bounds
from mlc_amd.tools.options import Json, Synthetic, Without
from mlc_amd.tools.terminal import display


def run(
    model: str | None = None,
    *,
    synthetic: Synthetic = None,
    json: Json = False,
    plan: bool = False,
    kernels: bool = False,
    asm: str | None = None,
    tensors: bool = False,
    n_cpu_moe: Annotated[int, option_of(RunOptions, "n_cpu_moe")] = 0,
    options: Annotated[CompileOptions, Without("tuned")],
) -> None:
    """Shows the contents of a GGUF file or an artifact: its size, the memory that it needs and what that fits first,
    then configuration, weights by type, kernels and launches.

    For GPU code (artifacts for GPUs, and any .hsaco file) it shows registers, LDS, spills, occupancy, instructions
    and assembly of each kernel. For artifacts of target vulkan these come from Mesa's compiler for AMD GPUs, if it is
    installed. Of an artifact's kernels it also shows the time that a call takes at least, by the GPU's bandwidth and
    arithmetic. With --kernels a GGUF file is compiled for that, without weights.

    Of a GGUF file of an architecture that is not supported it shows metadata, tokenizer and tensors.

    Memory is what the model needs while it runs, and with how many tokens it fits the GPUs that its arch stands for. Of
    a GPU's memory 1 GiB is left to the driver and other programs; of memory that an APU shares with the system it is
    half, because Linux gives the other half to the GPU. The options of compiling are for the memory that a GGUF file
    needs.

    Args:
        model: a GGUF file, OWNER/REPO:QUANT of huggingface.co, an artifact's folder, or an AMD code object (.hsaco)
            (default: the bundled demo model).
        plan: also list the launches of one token, in order (artifacts).
        kernels: also list the kernels, how often each function calls them, and what those for GPUs need.
        asm: print the assembly of the kernel of this name instead; 'linear*' means several, '*' all (GPU code).
        tensors: also list every tensor.
    """
    path = models.source_path(model, synthetic, not options.no_mmproj)
    show = partial(_show, json=json, plan=plan, kernels=kernels, asm=asm, tensors=tensors, n_cpu_moe=n_cpu_moe)
    if not kernels or (path and (models.is_artifact(path) or inspect_kernels.is_code_object(path))):
        show(path, synthetic, options)
        return
    with temporary("inspect") as folder:
        artifact = folder / "artifact"
        models.compile_artifact(path and str(path), str(artifact), options, synthetic, weights=False)
        show(artifact, synthetic or str(path), CompileOptions())


def _show(
    path: Path | None,
    source: str | None,
    options: CompileOptions,
    json: bool,
    plan: bool,
    kernels: bool,
    asm: str | None,
    tensors: bool,
    n_cpu_moe: int,
) -> None:
    """Shows a file. source: if `path` is an artifact in a temporary folder, the file from which it was compiled; if
    `path` is None, the spec of a synthetic model. The other arguments are those of `run`."""
    report: dict[str, Any]
    if path and models.is_artifact(path):
        from mlc_amd.runtime.artifact.artifact import Artifact

        artifact = Artifact.open(path)
        if options.given:
            raise UserError(f"{path} is compiled: --ctx, --kv-type, --target and --arch apply to GGUF files")
        report = _artifact(artifact, n_cpu_moe) | ({"file": source} if source else {})
        gpu_codes = _CODES.get(artifact.manifest["target"]["kind"])
        codes = gpu_codes(artifact) if gpu_codes and (json or kernels or asm is not None) else []
        if codes:
            report["bounds"] = [bounds.of_artifact(artifact.manifest, arch) for arch in artifact.manifest["libraries"]]
    elif path and inspect_kernels.is_code_object(path):
        if plan or tensors:
            raise UserError(f"{path} is GPU code: --plan and --tensors apply to artifacts; --asm shows its assembly")
        report, codes, kernels = {"file": str(path)}, [inspect_kernels.GpuCode(path)], True
    elif plan or asm is not None:
        raise UserError(f"{path or source} is not compiled: --plan and --asm apply to artifacts, or give --kernels")
    else:
        report, codes = _uncompiled(path, source, options, n_cpu_moe), []
    if asm is not None:
        if not codes:
            what = "--asm applies to artifacts of `mlc-amd compile --target rocm|vulkan` and .hsaco files"
            raise UserError(f"{path} has no GPU code: {what}")
        report["assembly"] = {code.machine: code.assembly(asm) for code in codes}
        if not json:
            for machine, functions in report["assembly"].items():
                print(f"; {machine}\n" + "\n".join(functions.values()))
            return
    for code in codes:
        if code.missing:
            display.message(f"{_ABSENT[type(code)]} for {code.path}: {code.missing}")
    if codes:
        report["code"] = [code.describe() for code in codes]
    if json:
        print(dumps(report, indent=1))
        return
    for label, text in inspect_summary.lines(report):
        print(f"{label:{WIDTH}}{text}")
    detailed = dict.fromkeys(inspect_summary.KEYS, False) | {
        "plan": plan,
        "kernels": kernels,
        "code": kernels,
        "bounds": kernels,
        "tensors": tensors,
    }
    for title, show in _SECTIONS.items():
        if title in report and detailed.get(title, True):
            print(show(report[title]))


def _uncompiled(path: Path | None, synthetic: str | None, options: CompileOptions, n_cpu_moe: int) -> dict[str, object]:
    """The report of a GGUF file or a synthetic model."""
    from mlc_amd.compiler.gguf.reader import quantization

    try:
        encoder = encoders.choose(path, options)
        opened = models.open_source(path, synthetic, encoder, rope=options, override_kv=options.override_kv)
    except UserError as error:
        if path is None:
            raise
        return inspect_header.report(path, error)
    from mlc_amd.compiler.codegen.target import make_target
    from mlc_amd.compiler.lowering import capacity
    from mlc_amd.compiler.manifest import format_totals
    from mlc_amd.compiler.memory import needs
    from mlc_amd.compiler.models.shards import ShardedModel
    from mlc_amd.compiler.sampling import defaults

    with opened as model:
        tensors = model.tensors.values()
        listing = [{"name": t.name, "dtype": t.format, "shape": list(t.shape), "bytes": t.nbytes} for t in tensors]
        on_host(model.tensors, n_cpu_moe)
        made = options.resolved(*targets.resolve(options.target, options.arch))
        divided = ShardedModel(model, made.parts) if made.parts > 1 else model
        needed = needs(divided, make_target(made.target, made.arch, made.cache_type), capacity(model.config, made.ctx))
        totals = format_totals(model.tensors)
        name, count = model.config.name, sum(tensor.rows * tensor.shape[-1] for tensor in model.stored.values())
        return {
            **inspect_summary.entries(name, model.size, count, quantization(model.metadata, totals)),
            "context": needed.context,
            "memory": inspect_memory.plan(needed, made.target, options.arch, n_cpu_moe),
            "file": model.path,
            "model": dataclasses.asdict(model.config),
            **({"vision": dataclasses.asdict(model.vision.config)} if model.vision else {}),
            "sampling": defaults(model.metadata, model.config.context),
            "formats": _stored(totals),
            "tensors": listing,
        }


def _stored(formats: Mapping[str, Any]) -> dict[str, dict]:
    """A model's tensor types, with the bits of a weight in the file and in memory (without the padding of rows to
    multiples of 16), and whether memory has other codes than the file."""
    from mlc_amd.schedules.formats import lookup

    found = {}
    for name, entry in formats.items():
        form = lookup(name)
        bits = {"file_bits": form.file_bits, "memory_bits": form.memory_bits}
        found[name] = entry | bits | {"repacked_to_bits": form.code_bits if form.expanded else None}
    return found


def _artifact(artifact, n_cpu_moe: int) -> dict[str, object]:
    from mlc_amd.schedules.formats import parameters

    manifest, target = artifact.manifest, artifact.manifest["target"]
    on_host(manifest["tensors"], n_cpu_moe)
    listing = []
    for name, entry in artifact.weights.header.items():
        if not name.startswith("__pad_"):
            begin, end = entry["data_offsets"]
            listing.append({"name": name, "dtype": entry["dtype"], "shape": entry["shape"], "bytes": end - begin})
    layers = sum(not layer.get("predictor") for layer in manifest["model"]["layers"])
    launches = {}
    functions = manifest["functions"]
    for name, function in functions.items():
        if PIECE in name:
            continue
        made = [launch for one in segments(functions, name, PIECE) for launch in functions[one]["launches"]]
        each = float(len(made)) if is_draft(name) or is_encoder(name) else per_layer(made, layers)
        known = {key: function[key] for key in ("rows", "single", "logits")}
        launches[name] = known | {"launches": len(made), "per_layer": each}
    same = {"target": manifest["target"], "kv_type": manifest["kv_type"]}
    caches = {tensor["name"] for tensor in manifest["kv"]}
    if any(name.startswith("k.") and f"v{name[1:]}" not in caches for name in caches):
        same["kv_latents"] = latent_type(manifest["kv_type"])
    same |= {key: manifest[key] for key in ("model", "vision", "sampling") if key in manifest}
    if manifest["gpus"] > 1:
        same = {"gpus": f"{manifest['gpus']}, which share it by tensor; memory is that of each"} | same
    size = sum(file.stat().st_size for file in artifact.path.rglob("*") if file.is_file())
    count = parameters(manifest["formats"])
    return {
        **inspect_summary.entries(manifest["name"], size, count, manifest["quantization"]),
        "context": manifest["context"],
        "memory": inspect_memory.plan(of_manifest(manifest), target["kind"], target["arch"], n_cpu_moe),
        "file": str(artifact.path),
        **same,
        "formats": _stored(manifest["formats"]),
        "launches": launches,
        "kernels": manifest["kernels"],
        "plan": {name: function["launches"] for name, function in functions.items()},
        "tensors": listing,
    }


def per_layer(launches: list[dict], layers: int) -> float:
    """The launches of one layer: the number of launches from layer 0's first weight to the last layer's first weight,
    divided by the number of layers between. Layers without weights begin at 0."""

    def first(layer: int) -> int:
        names = ([str(arg[1]) for arg in launch["args"]] for launch in launches)
        return next((i for i, held in enumerate(names) if any(name.startswith(f"blk.{layer}.") for name in held)), 0)

    if layers > 1:
        return round((first(layers - 1) - first(0)) / (layers - 1), 2)
    # There is only one layer: it has the launches after the first one, except for the last norm and the logits.
    return float(len(launches) - first(0) - 2)


# target -> function that reads its GPU code; what is unknown of it if something is missing
_CODES = {"rocm": inspect_kernels.of_artifact, "vulkan": inspect_vulkan.of_artifact}
_ABSENT = {inspect_kernels.GpuCode: "no instruction counts", inspect_vulkan.SpirvCode: "no registers and instructions"}


def _line(title: str):
    return lambda content: f"{title:{WIDTH}}{content}"


def _target(target: dict) -> str:
    cpu = f" ({target['mcpu']}, {target['isa']})" if target["kind"] == "cpu" else ""
    return f"{'target':{WIDTH}}{target['kind']} {target['arch']}{cpu}"


def _model(config: dict) -> str:
    rows = {key: value for key, value in config.items() if key not in ("name", "layers", "ropes", "draft")}
    rows["layers"] = len(config["layers"])
    rows["unused"] = _unused(config["unused"]) or "none"
    layers = [_flat(layer) for layer in config["layers"]]
    for key in dict.fromkeys(key for layer in layers for key in layer):
        rows[key] = _by_layer({i: layer[key] for i, layer in enumerate(layers) if key in layer}, len(layers))
    rows |= _flat(config["ropes"]) | _flat({"draft": config.get("draft") or "none"})
    width = max(map(len, rows)) + 2
    shown = (f"{value:g}" if isinstance(value, float) else value for value in rows.values())
    return "model\n" + "".join(f"  {key.ljust(width)}{value}\n" for key, value in zip(rows, shown, strict=True))


def _unused(names: Sequence[str]) -> str:
    """The tensors of the file that are not used. As in llama.cpp, they do not change results."""
    return ", ".join(dict.fromkeys(re.sub(r"^blk\.\d+\.", "blk.*.", name) for name in names))


def _vision(vision: dict) -> str:
    rows = {key: value for key, value in _flat(vision).items() if not key.startswith("metadata")}
    width = max(map(len, rows)) + 2
    return "image encoder\n" + "".join(f"  {key.ljust(width)}{value}\n" for key, value in rows.items())


def _flat(nested: dict) -> dict[str, object]:
    """Flattens a nested dictionary: {"mixer": {"heads": 4}} becomes {"mixer heads": 4}."""
    flat = {}
    for key, value in nested.items():
        inner = {f"{key} {k}": v for k, v in _flat(value).items()} if isinstance(value, dict) else {key: value}
        flat |= {k.replace("_", " "): v for k, v in inner.items()}
    return flat


def _by_layer(values: dict[int, object], layers: int) -> object:
    """The value, if all layers have the same; otherwise each value with the layers that have it. Layers that are
    missing have no such value."""
    found: dict[str, list[str]] = {}
    for i, value in values.items():
        found.setdefault(str(value), []).append(str(i))
    if len(found) == 1 and len(values) == layers:
        return values[0]
    return "; ".join(f"{value} in layers {', '.join(places)}" for value, places in found.items())


def _sampling(sampling: dict) -> str:
    shown = ", ".join(f"{name.replace('_', ' ')} {value:g}" for name, value in sampling.items())
    return f"{'sampling':{WIDTH}}{shown or 'greedy (the file recommends nothing)'}"


def _formats(formats: dict) -> str:
    largest_first = sorted(formats.items(), key=lambda item: -item[1]["bytes"])
    rows = []
    for name, entry in largest_first:
        bits = (f"{entry[key]:.4g}" for key in ("file_bits", "memory_bits"))
        layout = f"repacked to codes of {codes} bits" if (codes := entry["repacked_to_bits"]) else "own layout"
        rows.append((name, entry["tensors"], display.size(entry["bytes"]), *bits, layout))
    return display.table(("type", "tensors", "size", "bits in file", "in memory", "kernels"), rows, right=(1, 2, 3, 4))


def _launches(launches: dict) -> str:
    keys = ("rows", "single", "logits", "launches", "per_layer")
    rows = [(name, *(entry[key] for key in keys)) for name, entry in launches.items()]
    header = ("function", "rows", "of sequences", "logits", "launches", "per layer")
    return display.table(header, rows, right=range(1, 6))


def _kernels(kernels: list) -> str:
    rows = []
    for entry in kernels:
        calls = ", ".join(f"{function} {count}" for function, count in entry["calls"].items())
        rows.append((entry["name"], calls, _tuned(entry.get("tuned", {}))))
    return display.table(("kernel", "calls", "plan"), rows)


def _tuned(origins: dict) -> str:
    """The origin of a kernel's plan, and the plan; for an artifact for several GPUs, of each."""
    texts = {}
    for arch, origin in origins.items():
        numbers = " ".join(f"{name}={value}" for name, value in (origin["plan"] or {}).items())
        texts[arch] = f"{origin['from']}: {numbers}" if numbers else origin["from"]
    if len(set(texts.values())) == 1:
        return next(iter(texts.values()))
    return "; ".join(f"{arch} {text}" for arch, text in texts.items())


def _plan(plan: dict) -> str:
    function = "decode" if "decode" in plan else next(iter(plan))  # encoders have no function for one token
    what = "launch of one token" if function == "decode" else f"launch of {function}"
    rows = [(i, one["kernel"], " ".join(map(_argument, one["args"]))) for i, one in enumerate(plan[function])]
    return display.table(("", what, "arguments"), rows, right=(0,))


def _argument(argument: list) -> str:
    kind, where = argument[0], argument[1]
    return f"arena+{where}" if kind == "arena" else f"{where}" if len(argument) == 2 else f"{where}[{argument[2]}]"


def _tensors(listing: list) -> str:
    rows = []
    for tensor in listing:
        size = "?" if tensor["bytes"] is None else display.size(tensor["bytes"])
        rows.append((tensor["name"], tensor["dtype"], "x".join(map(str, tensor["shape"])), size))
    return display.table(("tensor", "type", "shape", "size"), rows, right=(3,))


# section -> function that shows it, in this order
_SECTIONS = {
    "file": _line("file"),
    "target": _target,
    "gpus": _line("GPUs"),
    "kv_type": _line("KV type"),
    "kv_latents": _line("latents"),
    "model": _model,
    "vision": _vision,
    "sampling": _sampling,
    "formats": _formats,
    "launches": _launches,
    "kernels": _kernels,
    "plan": _plan,
    "tensors": _tensors,
    "code": lambda codes: (inspect_vulkan if "compiler" in codes[0] else inspect_kernels).tables(codes),
    "bounds": inspect_bounds.tables,
} | inspect_header.SECTIONS
