"""Bad GGUF files: every one ends in a UserError of one line that names the file, what is wrong and what to do; nothing
hangs or allocates.

Files are made by `make`, a writer of its own that can lie: it writes any counts, types, dimensions and offsets
a test needs."""

import itertools
import os
import random
import resource
import struct
import subprocess
import sys
import textwrap
import time

import pytest

from mlc_amd.compiler.gguf import GGUFModel, synthetic, write_gguf
from mlc_amd.compiler.gguf.header import HEADER_LIMIT
from mlc_amd.runtime.errors import UserError

U32, F32, BOOL, STRING, ARRAY, U64 = 4, 6, 7, 8, 9, 10  # GGUF value types
SIZES = {U32: "<I", F32: "<f", BOOL: "<?", U64: "<Q"}


def text(value, size=None) -> bytes:
    data = value if isinstance(value, bytes) else value.encode()
    return struct.pack("<Q", len(data) if size is None else size) + data


def pair(key, kind, value) -> bytes:
    """One metadata entry. value of an ARRAY: (element type, count, payload bytes)."""
    if kind == ARRAY:
        body = struct.pack("<IQ", value[0], value[1]) + value[2]
    else:
        body = text(value) if kind == STRING else struct.pack(SIZES[kind], value)
    return text(key) + struct.pack("<I", kind) + body


def entry(name, dims, kind, offset) -> bytes:
    return (
        text(name)
        + struct.pack("<I", len(dims))
        + struct.pack(f"<{len(dims)}Q", *dims)
        + struct.pack("<IQ", kind, offset)
    )


METADATA = {
    "general.architecture": (STRING, "llama"),
    "llama.context_length": (U32, 128),
    "llama.embedding_length": (U32, 64),
    "llama.block_count": (U32, 1),
    "llama.feed_forward_length": (U32, 96),
    "llama.attention.head_count": (U32, 2),
    "llama.attention.head_count_kv": (U32, 1),
    "llama.attention.layer_norm_rms_epsilon": (F32, 1e-5),
    "llama.vocab_size": (U32, 40),
}
F32_TYPE, Q8_0 = 0, 8
TENSORS = {  # name: (dimensions in GGUF order, type)
    "token_embd.weight": ((64, 40), Q8_0),
    "blk.0.attn_norm.weight": ((64,), F32_TYPE),
    "blk.0.attn_q.weight": ((64, 64), Q8_0),
    "blk.0.attn_k.weight": ((64, 32), Q8_0),
    "blk.0.attn_v.weight": ((64, 32), Q8_0),
    "blk.0.attn_output.weight": ((64, 64), Q8_0),
    "blk.0.ffn_norm.weight": ((64,), F32_TYPE),
    "blk.0.ffn_gate.weight": ((64, 96), Q8_0),
    "blk.0.ffn_up.weight": ((64, 96), Q8_0),
    "blk.0.ffn_down.weight": ((96, 64), Q8_0),
    "output_norm.weight": ((64,), F32_TYPE),
}


def make(
    metadata=METADATA,
    tensors=TENSORS,
    *,
    offsets=None,
    version=3,
    n_pairs=None,
    n_tensors=None,
    extra_pairs=b"",
    cut=None,
) -> bytes:
    """A GGUF file. `offsets` replaces the offsets of tensors by name; `cut` removes bytes from the end."""
    header = b"GGUF" + struct.pack(
        "<IQQ", version, len(tensors) if n_tensors is None else n_tensors, len(metadata) if n_pairs is None else n_pairs
    )
    header += b"".join(pair(key, kind, value) for key, (kind, value) in metadata.items()) + extra_pairs
    position = 0
    for name, (dims, kind) in tensors.items():
        header += entry(name, dims, kind, (offsets or {}).get(name, position))
        count = 1
        for d in dims:
            count *= d
        position += -(-min(count * 4 if kind == F32_TYPE else count // 32 * 34, 1 << 20) // 32) * 32
    data = header + bytes(-len(header) % 32) + bytes(position)
    return data[: len(data) - (cut or 0)]


def without(table, name):
    return {key: value for key, value in table.items() if key != name}


def error_of(path) -> str:
    with pytest.raises(UserError) as caught:
        GGUFModel.open(path)
    message = str(caught.value)
    assert message.startswith(f"{path}: ") and "\n" not in message and "; " in message and len(message) < 800
    return message


def test_the_file_that_the_errors_are_made_of_is_right(tmp_path):
    path = tmp_path / "model.gguf"
    path.write_bytes(make())
    with GGUFModel.open(path) as model:
        config = model.config
        found = len(config.layers), config.layers[0].attention.head_dim, config.vocab, config.tied
        assert found == (1, 32, 40, True)


LLAMA_KEYS = [key for key in METADATA if key not in ("general.architecture", "llama.attention.head_count_kv")]


def having(key, kind, value) -> bytes:
    return make(METADATA | {key: (kind, value)})


def and_pair(data) -> bytes:
    return make(n_pairs=len(METADATA) + 1, extra_pairs=data)


def tensor(name, dims, kind) -> bytes:
    return make(tensors=TENSORS | {name: (dims, kind)})


CASES = {
    # the file as a whole
    "empty": (b"", "the file is empty"),
    "short": (b"GG", r"not a GGUF file \(it starts with b'GG'"),
    "magic": (b"PK\x03\x04" + bytes(100), "this is a PyTorch checkpoint or a zip archive, not GGUF"),
    "only magic": (b"GGUF", "ends inside the version"),
    "version 1": (make(version=1), r"version 1 is not supported \(2 and 3 are\)"),
    "version 9": (make(version=9), "version 9 is not supported"),
    "big-endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
    "vocabulary only": (make(tensors={}), "no tensors, only a vocabulary"),
    "header cut": (make()[:300], "truncated or damaged"),
    "data cut": (make(cut=64), "the file ends at byte .* but tensor 'output_norm.weight' would end at"),
    "data cut a lot": (make(cut=9000), "the file ends at byte"),
    # counts and lengths that lie
    "huge tensor count": (make(n_tensors=1 << 62), f"announces {1 << 62} tensors"),
    "huge metadata count": (make(n_pairs=(1 << 64) - 1), f"announces {(1 << 64) - 1} metadata entries"),
    "one pair more": (make(n_pairs=len(METADATA) + 1), "truncated or damaged"),
    "one tensor more": (make(n_tensors=len(TENSORS) + 1), "truncated or damaged"),
    "key too long": (and_pair(text(b"x" * 70000) + struct.pack("<IB", 0, 1)), "a metadata key is 70000 bytes long"),
    "string too long": (
        and_pair(text("k") + struct.pack("<IQ", STRING, 1 << 60)),
        "key 'k' is 1152921504606846976 bytes",
    ),
    "array too long": (and_pair(pair("k", ARRAY, (U32, 1 << 40, b""))), f"'k' is an array of {1 << 40} elements"),
    "array past the end": (and_pair(pair("k", ARRAY, (U64, 1 << 20, b""))), "ends inside metadata key 'k'"),
    "strings past the end": (and_pair(pair("k", ARRAY, (STRING, 1 << 20, b""))), "1048576 strings in metadata key 'k'"),
    "string in array": (and_pair(pair("k", ARRAY, (STRING, 1, text("", 1 << 50)))), "ends inside metadata key 'k'"),
    "nested array": (and_pair(pair("k", ARRAY, (ARRAY, 1, bytes(32)))), "'k' is an array of arrays"),
    "value type": (and_pair(text("k") + struct.pack("<I", 77)), "'k' has the unknown value type 77"),
    "same key": (and_pair(pair("llama.vocab_size", U32, 1)), "'llama.vocab_size' appears twice"),
    "key not UTF-8": (and_pair(pair(b"\xff\xfe", U32, 1)), "a metadata key is not valid UTF-8"),
    "value not UTF-8": (and_pair(pair("k", STRING, b"\xff")), "key 'k' is not valid UTF-8"),
    "token not UTF-8": (and_pair(pair("k", ARRAY, (STRING, 1, text(b"\xff")))), "key 'k' is not valid UTF-8"),
    "alignment": (having("general.alignment", U32, 48), "general.alignment is 48, not a power of two"),
    "alignment 0": (having("general.alignment", U32, 0), "general.alignment is 0"),
    "alignment text": (having("general.alignment", STRING, "x"), "general.alignment is 'x'"),
    # tensors
    "same tensor": (make().replace(b"attn_v.weight", b"attn_k.weight"), "tensor 'blk.0.attn_k.weight' appears twice"),
    "long name": (tensor("t" * 65, (32,), F32_TYPE), "a tensor name is 65 bytes long"),
    "no dimensions": (tensor("token_embd.weight", (), F32_TYPE), "has 0 dimensions"),
    "five dimensions": (tensor("token_embd.weight", (1, 1, 1, 1, 1), F32_TYPE), "has 5 dimensions"),
    "zero dimension": (tensor("token_embd.weight", (64, 0), Q8_0), r"impossible dimensions \[64, 0\]"),
    "negative dimension": (tensor("token_embd.weight", (64, (1 << 64) - 1), Q8_0), "impossible dimensions"),
    "overflowing": (tensor("token_embd.weight", (1 << 40, 1 << 40), Q8_0), "the file ends at byte"),
    "three dimensions": (tensor("token_embd.weight", (32, 40, 2, 2), Q8_0), "has 4 dimensions, at most 3"),
    "no whole blocks": (
        tensor("token_embd.weight", (48, 40), Q8_0),
        "48 columns, not a multiple of q8_0's block of 32",
    ),
    "type": (
        tensor("token_embd.weight", (64, 40), 15),
        "'token_embd.weight' has type Q8_K, supported are .*q4_k.*iq4_xs",
    ),
    "unknown type": (
        tensor("token_embd.weight", (64, 40), 999),
        "'token_embd.weight' has type number 999, supported are",
    ),
    "integers": (tensor("token_embd.weight", (64, 40), 26), "has type I32"),
    "unaligned": (make(offsets={"blk.0.attn_q.weight": 33}), "'blk.0.attn_q.weight' is not aligned to 32 bytes"),
    "outside": (make(offsets={"blk.0.attn_q.weight": 1 << 63}), "the file ends at byte .* 'blk.0.attn_q.weight'"),
    "overlap": (
        make(offsets={"blk.0.attn_q.weight": 0}),
        "tensors 'token_embd.weight' and 'blk.0.attn_q.weight' overlap",
    ),
    "shape": (
        tensor("blk.0.attn_k.weight", (64, 64), Q8_0),
        r"attn_k.weight has shape \(64, 64\), expected \(32, 64\)",
    ),
    "transposed": (tensor("blk.0.ffn_down.weight", (64, 96), Q8_0), r"has shape \(96, 64\), expected \(64, 96\)"),
    "quantized norm": (tensor("blk.0.ffn_norm.weight", (64,), Q8_0), "ffn_norm.weight is q8_0, but norms"),
    "unknown tensor": (
        tensor("blk.0.ffn_gate_inp.bias", (96,), F32_TYPE),
        "'blk.0.ffn_gate_inp.bias' is not part of a llama model",
    ),
    "scale of a matrix": (
        tensor("blk.0.attn_q.scale", (2,), F32_TYPE),
        r"attn_q.scale has shape \(2,\), expected \(1,\)",
    ),
    "part of a bias": (
        tensor("blk.0.attn_q.bias", (32,), F32_TYPE),
        r"attn_q.bias has shape \(32,\), expected \(64,\)",
    ),
    "layer too many": (having("llama.block_count", U32, 2), "blk.1.attn_norm.weight is missing"),
    "absurd layers": (
        having("llama.block_count", U32, (1 << 31) - 1),
        "block_count is 2147483647, expected an integer >= 1 and <= 1024",
    ),
    **{f"without {name}": (make(tensors=without(TENSORS, name)), f"tensor {name} is missing") for name in TENSORS},
    # metadata
    "architecture": (
        having("general.architecture", STRING, "deepseek5"),
        r"'deepseek5' is not supported; \d+ others are, such as deepseek,",
    ),
    "an image encoder": (
        having("general.architecture", STRING, "clip"),
        "mmproj files hold an image encoder; give its model, and this file with --mmproj",
    ),
    "long architecture": (having("general.architecture", STRING, "x" * 9999), r"'xxx.*\.\.\. is not supported"),
    "architecture type": (having("general.architecture", U32, 1), "general.architecture is 1, expected a string"),
    "no architecture": (make(without(METADATA, "general.architecture")), "general.architecture is missing"),
    "adapter": (having("general.type", STRING, "adapter"), "holds a 'adapter', not a model"),
    "experts": (having("llama.expert_count", U32, 8), "expert_used_count is missing"),
    "pooling": (having("llama.pooling_type", U32, 9), "pooling type 9 is not supported"),
    "ranking": (having("llama.pooling_type", U32, 4), "no head for ranking"),
    "layers differ": (
        having("llama.attention.head_count_kv", ARRAY, (U32, 2, struct.pack("<II", 1, 2))),
        "head_count_kv has 2 entries, the model has 1 layers",
    ),
    "empty list": (
        having("llama.attention.head_count", ARRAY, (U32, 0, b"")),
        r"head_count is \[\], expected an integer",
    ),
    "rope scaling": (having("llama.rope.scaling.type", STRING, "spiral"), "RoPE scaling 'spiral' is not supported"),
    "value length": (having("llama.attention.value_length", U32, 64), "value_length differs from key_length"),
    "heads": (having("llama.attention.head_count_kv", U32, 3), "multiple of KV heads"),
    "head size": (having("llama.attention.head_count", U32, 16), r"head size \(4\) must be a multiple of 8"),
    "hidden size": (
        make(
            METADATA
            | {
                "llama.embedding_length": (U32, 68),
                "llama.attention.key_length": (U32, 32),
                "llama.attention.value_length": (U32, 32),
            }
        ),
        r"hidden size \(68\) must be a multiple of 32",
    ),
    "rope odd": (having("llama.rope.dimension_count", U32, 31), r"RoPE's dimensions \(31\)"),
    "rope too wide": (
        having("llama.rope.dimension_count", U32, 64),
        r"RoPE's dimensions \(64\) must be even and <= 32",
    ),
    "rope base": (having("llama.rope.freq_base", F32, 0.5), "frequency base is 0.5"),
    "rope base nan": (having("llama.rope.freq_base", F32, float("nan")), "freq_base is nan, expected a number above 0"),
    "rope factor": (having("llama.rope.scaling.factor", F32, -2.0), "scaling.factor is -2.0, expected a number >= 0"),
    "epsilon": (
        having("llama.attention.layer_norm_rms_epsilon", F32, -1.0),
        "epsilon is -1.0, expected a number >= 0",
    ),
    "zero heads": (having("llama.attention.head_count", U32, 0), "head_count is 0, expected an integer >= 1"),
    "huge hidden": (having("llama.embedding_length", U64, 1 << 60), "embedding_length is 1152921504606846976"),
    "bool for a number": (having("llama.block_count", BOOL, True), "block_count is True, expected an integer"),
    "float for an integer": (having("llama.block_count", F32, 1.0), "block_count is 1.0, expected an integer"),
    "split without parts": (
        having("split.count", U32, 2),
        "split in 2, but its name does not end in -0000N-of-00002.gguf",
    ),
    **{f"without {key}": (make(without(METADATA, key)), f"metadata key {key} is missing") for key in LLAMA_KEYS},
}


@pytest.mark.parametrize("data, message", CASES.values(), ids=CASES)
def test_bad_file(tmp_path, data, message):
    path = tmp_path / "model.gguf"
    path.write_bytes(data)
    with pytest.raises(UserError, match=message):
        GGUFModel.open(path)
    error_of(path)


def test_not_a_file(tmp_path):
    assert "no such file" in error_of(tmp_path / "nothing.gguf")
    assert "this is a directory" in error_of(tmp_path)
    os.mkfifo(tmp_path / "pipe.gguf")
    assert "not a regular file" in error_of(tmp_path / "pipe.gguf")
    assert "cannot be read" in error_of(tmp_path / ("x" * 300))
    with pytest.raises(UserError, match="cannot be read"):
        GGUFModel.open("a\0b.gguf")


def test_not_readable(tmp_path):
    path = tmp_path / "model.gguf"
    path.write_bytes(make())
    path.chmod(0)
    was = os.geteuid()
    if was == 0:  # root may read everything, the user nobody may not
        os.seteuid(65534)
    try:
        assert "permission to read" in error_of(path)
    finally:
        os.seteuid(was)


def mutations(original: bytes, header: int, rng: random.Random):
    """Damaged copies: flipped bytes, cuts, 64-bit and 32-bit fields blown up, and pieces moved, all inside the
    header."""
    values = [0, 1, 0x7F, 0xFF, 1 << 31, (1 << 32) - 1, 1 << 33, 1 << 40, (1 << 63) - 1, 1 << 63, (1 << 64) - 1]
    for number in range(600):
        data, kind = bytearray(original), number % 5
        at = rng.randrange(header)
        if kind == 0:
            for _ in range(rng.choice((1, 1, 2, 8))):
                data[rng.randrange(header)] ^= 1 << rng.randrange(8)
        elif kind == 1:
            del data[at if rng.random() < 0.5 else rng.randrange(len(data)) :]
        elif kind == 2:
            data[at : at + 8] = struct.pack("<Q", rng.choice(values))
        elif kind == 3:
            data[at : at + 4] = struct.pack("<I", rng.choice(values) & 0xFFFFFFFF)
        else:
            source, size = rng.randrange(header), rng.randrange(1, 64)
            data[at : at + size] = data[source : source + size]
        yield bytes(data)


def test_fuzz(tmp_path):
    """Each damaged file opens or is a UserError, at once. Those that open can be read to the end."""
    write_gguf(synthetic("tiny:q4_0"), tmp_path / "tiny.gguf")
    tiny = (tmp_path / "tiny.gguf").read_bytes()
    path, opened, rng = tmp_path / "model.gguf", 0, random.Random(20)
    small = make()
    seeds = ((small, small.index(b"output_norm.weight") + 40), (tiny, 4000))
    for number, data in enumerate(itertools.chain.from_iterable(mutations(*seed, rng) for seed in seeds)):
        path.write_bytes(data)
        start = time.process_time()
        try:
            with GGUFModel.open(path) as model:
                opened += 1
                for tensor in model.tensors.values():
                    assert tensor.blocks().nbytes == tensor.nbytes
        except UserError as error:
            assert "\n" not in str(error), f"mutation {number}"
        assert time.process_time() - start < 4.0, f"mutation {number}"
    assert 0 < opened < 900  # the damage is neither harmless nor always fatal


def test_lies_about_lengths_cost_nothing(tmp_path):
    """In a sparse file of 40 GB every length seems plausible, yet no more is read than a header may have."""
    lies = {
        "string": and_pair(text("k") + struct.pack("<IQ", STRING, 30 << 30)),
        "array": and_pair(pair("k", ARRAY, (U64, 1 << 32, b""))),
        "strings": and_pair(pair("k", ARRAY, (STRING, 1 << 31, b""))),
        "pairs": make(n_pairs=1 << 31),
        "tensors": make(n_tensors=1 << 30),
    }
    for name, data in lies.items():
        with open(tmp_path / f"{name}.gguf", "wb") as file:
            file.write(data)
            file.truncate(40 << 30)
    code = f"""
        import resource, time
        from mlc_amd.compiler.gguf import GGUFModel
        from mlc_amd.runtime.errors import UserError
        before, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
        for name in {list(lies)}:
            try:
                GGUFModel.open({str(tmp_path)!r} + "/" + name + ".gguf")
            except UserError as error:
                print(error)
        assert time.process_time() - start < 5
        print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
    """
    *errors, used = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        check=True,
        capture_output=True,
        text=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_CPU, (60, 60)),
    ).stdout.splitlines()
    assert len(errors) == len(lies) and all("truncated or damaged" in error for error in errors)
    assert int(used) < (HEADER_LIMIT >> 10) + 20_000  # KiB
