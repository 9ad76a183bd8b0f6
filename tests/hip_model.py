"""A model of three kernels for the rocm device without a GPU: embed; remember in the cache and average (two launches
with a scratch buffer); project. Its artifact, and what it computes."""

import json

import numpy as np

from mlc_amd.runtime.artifact import Artifact, TensorSpec, WeightsWriter

VOCAB, WIDTH, CTX = 96, 16, 256
EXPERT = "blk.0.ffn_up_exps.weight/head"  # so that it may stay in host memory
RNG = np.random.default_rng(7)
TABLE = RNG.standard_normal((VOCAB, WIDTH), np.float32)
HEAD = RNG.standard_normal((WIDTH, VOCAB), np.float32)


def f32(memory, *shape):
    return memory[: 4 * int(np.prod(shape))].view(np.float32).reshape(shape)


def state_of(memory):
    return memory[:8].view(np.int32).tolist()


def embed(state, tokens, table, x):
    _, live = state_of(state)
    f32(x, live, WIDTH)[:] = f32(table, VOCAB, WIDTH)[tokens[: 4 * live].view(np.int32)]


def remember(state, x, cache, total):
    position, live = state_of(state)
    cache = f32(cache, CTX, WIDTH)
    cache[position : position + live] = f32(x, live, WIDTH)
    f32(total, CTX, WIDTH)[:] = np.cumsum(cache, 0)


def average(state, total, y):
    position, live = state_of(state)
    count = np.arange(position + 1, position + live + 1, dtype=np.float32)[:, None]
    f32(y, live, WIDTH)[:] = f32(total, CTX, WIDTH)[position : position + live] / count


def project_last(state, y, head, logits):
    live = state_of(state)[1]
    f32(logits, 1, VOCAB)[:] = f32(y, live, WIDTH)[live - 1 :] @ f32(head, WIDTH, VOCAB)


def project_all(state, y, head, logits):
    live = state_of(state)[1]
    f32(logits, live, VOCAB)[:] = f32(y, live, WIDTH) @ f32(head, WIDTH, VOCAB)


KERNELS = {
    "embed_k": (4, embed),
    "mix_k": (4, remember),
    "mix_k_1": (3, average),
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
    "mix": {"scratch": [64, CTX * WIDTH * 4], "steps": [step("mix_k", 0, 1, 2, 5), step("mix_k_1", 0, 5, 3)]},
    "last": {"scratch": [], "steps": [step("last_k", 3, 0, 1, 2)]},  # the kernel's own order differs from the call's
    "all": {"scratch": [], "steps": [step("all_k", 3, 0, 1, 2)]},
}


def function(tokens, head):
    x, y = ["arena", 0, "float32", [tokens, WIDTH]], ["arena", 4096, "float32", [tokens, WIDTH]]
    return {
        "tokens": tokens,
        "all_logits": head == "all",
        "launches": [
            {"kernel": "embed", "args": [["io", "state"], ["io", "tokens"], ["weight", "table"], x]},
            {"kernel": "mix", "args": [["io", "state"], x, ["kv", "cache"], y]},
            {"kernel": head, "args": [y, ["weight", EXPERT], ["io", "logits"], ["io", "state"]]},
        ],
    }


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
            "model": {"vocab": VOCAB, "context": 2 * CTX, "layers": [{}, {}]},
            "tensors": {EXPERT: {"dtype": "float32", "shape": HEAD.shape}},
            "weight_bytes": TABLE.nbytes + HEAD.nbytes,
            "token_bytes": 4 * WIDTH,
            "target": {"kind": "rocm", "archs": list(archs)},
            "context": CTX,
            "functions": {
                "decode": function(1, "last"),
                "prefill_16": function(16, "last"),
                "score_16": function(16, "all"),
            },
            "libraries": {arch: f"{arch}.hsaco" for arch in archs},
            "launches": {arch: LAUNCHES for arch in archs},
            "arena_bytes": 8192,
            "io": {
                "state": {"dtype": "int32", "shape": [4]},
                "tokens": {"dtype": "int32", "shape": [16]},
                "logits": {"dtype": "float32", "shape": [16, VOCAB]},
            },
            "kv": [
                {"name": "other", "dtype": "float16", "shape": [3]},
                {"name": "cache", "dtype": "float32", "shape": [CTX, WIDTH]},
            ],
        }
        return Artifact(folder, json.loads(json.dumps(manifest)))

    return make


def evaluate(device, ids):
    """Logits after each of `ids`: chunks through score_16, then two tokens one by one."""
    device.clear()
    rows, position = [], 0
    for name, count in (("score_16", 16), ("score_16", len(ids) - 18), ("decode", 1), ("decode", 1)):
        device.write("state", (position, count))
        device.write("tokens", ids[position : position + count])
        device.run(name)
        rows.append(device.read("logits", count).copy())
        position += count
    return np.concatenate(rows)


IDS = np.arange(3, 3 + 2 * 30, 2)


def check(device):
    np.testing.assert_allclose(evaluate(device, IDS), expected(IDS), rtol=1e-4, atol=1e-5)
