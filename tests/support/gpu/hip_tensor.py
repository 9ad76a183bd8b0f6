"""hip_model.py's model divided between GPUs by tensor: each multiplies some columns of the averages, and kernels add up
the logits. Those of few rows exchange words while they run, as the real kernels do; those of 16 rows get copies."""

import json

import numpy as np
from hip_model import EXPERT, HEAD, KERNELS, LAUNCHES, TABLE, VOCAB, WIDTH, artifact_in, f32, facts, step

from mlc_amd.runtime.artifact.artifact import Artifact
from mlc_amd.runtime.artifact.manifest import RANK
from mlc_amd.runtime.artifact.weight_block import TensorSpec
from mlc_amd.runtime.artifact.weights_file import WeightsWriter
from mlc_amd.runtime.devices.exchange import choice
from mlc_amd.runtime.devices.exchange.check import AT_ONCE
from mlc_amd.runtime.devices.hip import api, device, gpu
from mlc_amd.runtime.exchange_layout import CONTROL, DONE, EMPTY, EXCHANGING, FAILED, GROUPS, PROBE
from mlc_amd.runtime.exchange_layout import RANK as NUMBER
from tests.dev.hip_recorder import Recorder
from tests.dev.hip_types import WAITING

ROWS = (1, 4, 16)  # of logits that are added up
INLINE = (1, 4)
CAPACITY = max(INLINE) * VOCAB // 4
PARTIAL, PARTS = 8192, 16384  # places in the arena


def add_up(rows, parts):
    """Kernel (X, Y, P): the sum of the parts, which are there."""

    def run(_, x, y, p):
        f32(y, rows, VOCAB)[:] = f32(p, parts, rows, VOCAB).sum(0)

    return 3, run


def exchanging(values, parts, residual):
    """Kernel (X, [R], Y, Inbox, Outbox0.., Control): sends its part to all others and waits for theirs."""

    waiting: set[int] = set()  # GPUs that have sent theirs

    def run(launch, x, *arrays):
        before, (y, inbox, *outboxes, control) = (arrays[0], arrays[1:]) if residual else (None, arrays)
        control = control[: 4 * CONTROL].view(np.int32)
        rank, words = control[NUMBER], values // 4
        slot = (control[DONE] // GROUPS + 1 & 1) * CAPACITY
        own = np.clip(f32(x, values), -65504, 65504).astype(np.float16)
        if not control[FAILED] and rank not in waiting:
            for outbox in outboxes:
                outbox[: 16 * CAPACITY].view(np.int64)[slot : slot + words] = own.view(np.int64)
        boxes = inbox[: (parts - 1) * 16 * CAPACITY].view(np.int64).reshape(parts - 1, 2 * CAPACITY)
        found = boxes[:, slot : slot + words]
        if (found.view(np.int32) == EMPTY).any() and not control[FAILED]:
            if not launch.late:
                waiting.add(int(rank))
                return WAITING
            control[FAILED] = 1
        waiting.discard(int(rank))
        control[DONE] += GROUPS
        if not control[FAILED]:
            others = [*found.copy().view(np.float16)]
            found[...] = EMPTY
            others.insert(rank, own)
            f32(y, values)[:] = sum(np.float32(one) for one in others) + (0 if before is None else f32(before, values))
        return None

    return 2 + residual + parts + 1, run


def divided_kernels(parts):
    found = dict(KERNELS)
    for rows in ROWS:
        found[f"sum_{rows}_k"] = add_up(rows, parts)
        found[f"words_{rows}_k"] = exchanging(rows * VOCAB, parts, residual=False)
    return found | {"probe_k": exchanging(VOCAB, parts, residual=True)}


def launches(parts):
    found, boxes = dict(LAUNCHES), parts + 1
    for rows in ROWS:
        found[f"sum_{rows}"] = {"scratch": [], "steps": [step(f"sum_{rows}_k", 1, 2, 3)]}
    for rows in INLINE:
        inline = step(f"words_{rows}_k", 1, 2, *range(4, 4 + boxes))
        found[f"{EXCHANGING}sum_{rows}"] = {"scratch": [], "steps": [inline]}
    probe = step("probe_k", 1, 2, 3, *range(5, 5 + boxes)) | {"code": [0, 96]}
    return found | {PROBE: {"scratch": [], "steps": [probe]}}


def summed(function, parts):
    """The function whose logits are a sum."""
    *before, head = [one for one in function["launches"] if one["kernel"] != "pick"]
    shape = [function["logits"], VOCAB]
    partial, received = ["arena", PARTIAL, "float32", shape], ["arena", PARTS, "float32", [parts, *shape]]
    y, weight, logits, state = head["args"]
    total = {"kernel": f"sum_{shape[0]}", "args": [state, partial, logits, received]}
    picks = [one for one in function["launches"] if one["kernel"] == "pick"]
    return function | {"launches": [*before, head | {"args": [y, weight, partial, state]}, total, *picks]}


def divided_in(folder, parts=2):
    """The model's artifact for so many GPUs in a folder."""
    manifest = artifact_in(folder)("gfx1100").manifest
    tensor, plane = EXPERT.split("/")
    names = [EXPERT, *(f"{tensor}{RANK}{rank}/{plane}" for rank in range(1, parts))]
    specs = [TensorSpec("table", "float32", TABLE.shape), *(TensorSpec(name, "float32", HEAD.shape) for name in names)]
    writer = WeightsWriter(folder / "weights.safetensors", specs)
    writer.write("table", 0, TABLE)
    share = -(-WIDTH // parts)
    for rank, name in enumerate(names):
        part = np.zeros_like(HEAD)
        part[rank * share : (rank + 1) * share] = HEAD[rank * share : (rank + 1) * share]
        writer.write(name, 0, part)
    writer.close()
    params = [
        {"name": name, "role": role} for name, role in zip("SXYP", ("state", "input", "output", "work"), strict=True)
    ]
    added = [facts(f"sum_{rows}") | {"operator": "all_reduce", "params": params} for rows in ROWS]
    words = {f"{EXCHANGING}sum_{rows}": rows * VOCAB // 4 for rows in INLINE} | {PROBE: VOCAB // 4}
    manifest |= {
        "gpus": parts,
        "functions": {name: summed(function, parts) for name, function in manifest["functions"].items()},
        "kernels": [*(one | {"operator": one["name"]} for one in manifest["kernels"]), *added],
        "launches": {"gfx1100": launches(parts)},
        "exchange": {"capacity": CAPACITY, "words": words},
        "arena_bytes": 65536,
    }
    return Artifact(folder, json.loads(json.dumps(manifest)))


def machine(monkeypatch, parts=2, kernels=None, **options):
    """A stand-in for AMD's bindings with so many GPUs, for all that opens them. kernels: by default the model's."""
    gpus = options.pop("gpus", [{"pciBusID": i} for i in range(parts)])
    bindings = Recorder(kernels or divided_kernels(parts), gpus, **options)
    monkeypatch.setattr(choice, "ROUNDS", AT_ONCE)  # Python computes them
    for module in api, device, gpu:
        monkeypatch.setattr(module, "open_bindings", lambda: bindings)
    return bindings
