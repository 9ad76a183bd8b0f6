"""A model of three kernels for the rocm device without a GPU: embed; remember in the paged cache and average (two
launches with a scratch buffer); project. Its artifact, and what it computes. The rows of a step follow one another in
one sequence, whether they are single rows or a chunk."""

import json

import numpy as np

from mlc_amd.runtime.artifact.artifact import Artifact
from mlc_amd.runtime.artifact.weight_block import TensorSpec
from mlc_amd.runtime.artifact.weights_file import WeightsWriter
from mlc_amd.runtime.cache.pages import PAGE
from mlc_amd.runtime.cache.sequence import ChunkRows
from mlc_amd.runtime.devices.steps import write_step

VOCAB, WIDTH, CTX = 96, 16, 256
SLOTS, SLOT = 64, 5  # of page tables; of the sequence that the tests compute
EXPERT = "blk.0.ffn_up_exps.weight/head"  # so that it may stay in host memory
RNG = np.random.default_rng(7)
TABLE = RNG.standard_normal((VOCAB, WIDTH), np.float32)
HEAD = RNG.standard_normal((WIDTH, VOCAB), np.float32)


def f32(memory, *shape):
    return memory[: 4 * int(np.prod(shape))].view(np.float32).reshape(shape)


def state_of(memory):
    return memory[:8].view(np.int32).tolist()


def embed(_, state, tokens, table, x):
    _, live = state_of(state)
    f32(x, live, WIDTH)[:] = f32(table, VOCAB, WIDTH)[tokens[: 4 * live].view(np.int32)]


def rows_of(memory, live):
    return memory[: 8 * live].view(np.int32).reshape(live, 2).T


def remember(_, state, rows, pages, x, cache, total):
    live = state_of(state)[1]
    positions, slots = rows_of(rows, live)
    table = pages[: 4 * SLOTS * CTX // PAGE].view(np.int32).reshape(SLOTS, -1)
    every = np.arange(CTX)
    places = table[slots[0], every // PAGE] * PAGE + every % PAGE
    cache = f32(cache, len(cache) // (4 * WIDTH), WIDTH)
    cache[places[positions]] = f32(x, live, WIDTH)
    f32(total, CTX, WIDTH)[:] = np.cumsum(cache[places], 0)


def average(_, state, rows, total, y):
    live = state_of(state)[1]
    positions, _ = rows_of(rows, live)
    f32(y, live, WIDTH)[:] = f32(total, CTX, WIDTH)[positions] / (positions[:, None] + np.float32(1))


def project_last(_, state, y, head, logits):
    live = state_of(state)[1]
    f32(logits, 1, VOCAB)[:] = f32(y, live, WIDTH)[live - 1 :] @ f32(head, WIDTH, VOCAB)


def project_all(_, state, y, head, logits):
    live = state_of(state)[1]
    f32(logits, live, VOCAB)[:] = f32(y, live, WIDTH) @ f32(head, WIDTH, VOCAB)


def pick(_, state, logits, allowed, sampling, sampled):
    """Of each row the largest logit of the tokens that a mask allows, and the token that is so many further."""
    live = state_of(state)[1]
    masks = allowed[: live * VOCAB // 8].reshape(live, -1)
    bits = np.unpackbits(masks, axis=1, bitorder="little").astype(bool)
    chosen = np.argmax(np.where(bits, f32(logits, live, VOCAB), -np.inf), 1)
    sampled[: 4 * live].view(np.int32)[:] = (chosen + sampling[: 4 * live].view(np.int32)) % VOCAB


KERNELS = {
    "pick_k": (5, pick),
    "embed_k": (4, embed),
    "mix_k": (6, remember),
    "mix_k_1": (4, average),
    "last_k": (4, project_last),
    "all_k": (4, project_all),
}


def expected(ids):
    x = TABLE[ids]
    return np.cumsum(x, 0) / np.arange(1, len(ids) + 1, dtype=np.float32)[:, None] @ HEAD


def step(symbol, *args):
    return {"symbol": symbol, "grid": [4, 1, 1], "block": [64, 1, 1], "args": list(args)}


LAUNCHES = {
    "embed": {"scratch": [], "steps": [step("embed_k", 0, 1, 2, 3)]},
    "mix": {"scratch": [64, CTX * WIDTH * 4], "steps": [step("mix_k", 0, 1, 2, 3, 4, 7), step("mix_k_1", 0, 1, 7, 5)]},
    "last": {"scratch": [], "steps": [step("last_k", 3, 0, 1, 2)]},  # the kernel's own order differs from the call's
    "all": {"scratch": [], "steps": [step("all_k", 3, 0, 1, 2)]},
    "pick": {"scratch": [], "steps": [step("pick_k", 0, 1, 2, 3, 4)]},
}


def function(rows, head):
    x, y = ["arena", 0, "float32", [rows, WIDTH]], ["arena", 4096, "float32", [rows, WIDTH]]
    state, places, tables = (["io", name] for name in ("state", "rows", "pages.0"))
    return {
        "rows": rows,
        "single": int(rows == 1),
        "logits": rows if head == "all" else 1,
        "samples": False,
        "launches": [
            {"kernel": "embed", "args": [state, ["io", "tokens"], ["weight", "table"], x]},
            {"kernel": "mix", "args": [state, places, tables, x, ["kv", "cache"], y]},
            {"kernel": head, "args": [y, ["weight", EXPERT], ["io", "logits"], state]},
        ],
    }


def picking(rows):
    """A function of single rows that chooses a token for each."""
    entry = function(rows, "all" if rows > 1 else "last") | {"single": rows}
    picked = [["io", name] for name in ("state", "logits", "allowed", "sampling", "sampled")]
    return entry | {"launches": [*entry["launches"], {"kernel": "pick", "args": picked}]}


def facts(name):
    """Of the manifest's kernels. The one that mixes reads the keys before its rows."""
    key = 4 * WIDTH * (name == "mix")
    moved = {"call": HEAD.nbytes, "token": key, "key": key}
    operations = {"call": HEAD.size, "score": WIDTH * (name == "mix")}
    return {"name": name, "bytes": moved, "operations": operations, "keys": CTX, "params": []}


def code_object(arch):
    return b"\x7fELF".ljust(64, b"\0") + f"amdgcn-amd-amdhsa--{arch}".encode()


def artifact_in(folder):
    """make(archs) -> the model's artifact in a folder."""

    def make(*archs):
        odd = TensorSpec("odd", "uint8", (5,))  # so that what follows needs padding
        specs = [TensorSpec("table", "float32", TABLE.shape), odd, TensorSpec(EXPERT, "float32", HEAD.shape)]
        writer = WeightsWriter(folder / "weights.safetensors", specs)
        for name, array in (("table", TABLE), (EXPERT, HEAD)):
            writer.write(name, 0, array)
        writer.close()
        for arch in archs:
            (folder / f"{arch}.hsaco").write_bytes(code_object(arch))
        manifest = {
            "gpus": 1,
            "model": {"vocab": VOCAB, "context": 2 * CTX, "layers": [{}, {}]},
            "tensors": {EXPERT: {"dtype": "float32", "shape": HEAD.shape}},
            "weight_bytes": TABLE.nbytes + HEAD.nbytes,
            "token_bytes": 4 * WIDTH,
            "target": {"kind": "rocm", "archs": list(archs), "bandwidth": dict.fromkeys(archs, 960)},
            "weights": "file",
            "files": {},
            "context": CTX,
            "kv_type": "f16",
            "page": PAGE,
            "functions": {
                "decode": function(1, "last"),
                "prefill_16": function(16, "last"),
                "score_16": function(16, "all"),
                "pick": picking(1),
                "pick_4": picking(4),
            },
            "kernels": [facts(name) for name in LAUNCHES],
            "libraries": {arch: f"{arch}.hsaco" for arch in archs},
            "launches": {arch: LAUNCHES for arch in archs},
            "arena_bytes": 8192,
            "io": {
                "state": {"dtype": "int32", "shape": [4]},
                "answers": {"dtype": "int32", "shape": [4]},
                "tokens": {"dtype": "int32", "shape": [16]},
                "rows": {"dtype": "int32", "shape": [16, 2]},
                "pages.0": {"dtype": "int32", "shape": [SLOTS, CTX // PAGE]},
                "sampling": {"dtype": "int32", "shape": [16]},
                "allowed": {"dtype": "int32", "shape": [16, VOCAB // 32]},
                "logits": {"dtype": "float32", "shape": [16, VOCAB]},
                "sampled": {"dtype": "int32", "shape": [16]},
            },
            "kv": [
                {"name": "other", "dtype": "float16", "shape": [3]},
                {"name": "cache", "dtype": "float32", "shape": [CTX // PAGE, PAGE, WIDTH], "span": 0},
            ],
        }
        return Artifact(folder, json.loads(json.dumps(manifest)))

    return make


def evaluate(device, ids):
    """Logits after each of `ids`: chunks through score_16, then two tokens one by one. Pages are in reverse order, and
    others after the first chunk, which is computed again."""
    device.clear()
    rows, position = [], 0
    write_pages(device, 1)
    write_step(device, device.manifest["functions"]["score_16"], (), ChunkRows(ids[:16], 0, SLOT))
    device.run("score_16")
    write_pages(device, 0)
    for name, count in (("score_16", 16), ("score_16", len(ids) - 18), ("decode", 1), ("decode", 1)):
        part = ids[position : position + count]
        single = name == "decode"
        singles, chunk = ([(part[0], position, SLOT)], None) if single else ((), ChunkRows(part, position, SLOT))
        assert write_step(device, device.manifest["functions"][name], singles, chunk) == count
        device.run(name)
        rows.append(device.read("logits", count).copy())
        position += count
    return np.concatenate(rows)


def write_pages(device, shift):
    """All pages of the cache, from the last one on; `shift` pages further."""
    pages = device.kv_types["cache"][0][0]
    device.write("pages.0", np.tile((pages - 1 - np.arange(CTX // PAGE) - shift) % pages, (SLOTS, 1)))


IDS = np.arange(3, 3 + 2 * 30, 2)


def check(device):
    np.testing.assert_allclose(evaluate(device, IDS), expected(IDS), rtol=1e-4, atol=1e-5)
