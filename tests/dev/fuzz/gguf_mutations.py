"""Damage to GGUF files, of their structure and of their bytes.

In: a synthetic model (`parts_of`) and a random generator. Out: `mutated`: (kind, what was changed, the bytes of the
damaged file), and `opened`: what the project's reader makes of such bytes. The parts of a file (`Parts`) are taken
apart and put together without the project's reader and writer.
"""

import contextlib
import random
import shutil
import struct
import tempfile
import warnings
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gguf import GGUFValueType as Kind

from mlc_amd.compiler.gguf import GGUFModel, write_gguf

SCRATCH = Path("/dev/shm") if Path("/dev/shm").is_dir() else None

_FORMS = {
    Kind.UINT8: "B", Kind.INT8: "b", Kind.BOOL: "?", Kind.UINT16: "H", Kind.INT16: "h", Kind.UINT32: "I",
    Kind.INT32: "i", Kind.FLOAT32: "f", Kind.UINT64: "Q", Kind.INT64: "q", Kind.FLOAT64: "d",
}  # fmt: skip
_ALIGNMENT = 32
_NUMBERS = (0, 1, 2, 3, -1, 7, 31, 63, 64, 127, 128, 255, 256, 1 << 15, 1 << 16, (1 << 31) - 1, 1 << 31, (1 << 32) - 1)
_FLOATS = (0.0, -0.0, 1.0, -1.0, 1e-45, 1e-30, 3e38, float("inf"), float("-inf"), float("nan"))
# Texts as bytes: not all are UTF-8.
TEXTS = (
    b"", b" ", b"a", b"\0", b"\n", b"\x1b]0;title\x07", b"\xff\xfe", b"\xed\xa0\x80", "\ufdd0".encode(), "▁".encode(),
    "\ufdd0<|im_end|>".encode(), b"<|im_end|>", b"<|im_start|>", b"</s>", b"<unk>", b"<0x0A>", b"EOT", "Ġ".encode(),
    b"A" * 300, b"A" * 5000, "é".encode() * 700, b"a b", b" b", b"a ", b"llama", b"gpt2", b"gemma4", b"default",
    b"gpt-4o", b"superbpe", b"tekken", b"[EMPTY_0]", b"%s%n", b"{{ messages }}", b"{% for", b"{{ 'a' * 10 ** 9 }}",
    b"../../etc/passwd", b"\xe2\x80\xae", b"(" * 2000,
)  # fmt: skip


@dataclass
class Parts:
    """pairs: [key, Kind, value] with keys and texts as bytes; the value of an array is (Kind, values). tensors: [name,
    dimensions, type, offset]. data: the tensors' bytes."""

    version: int
    pairs: list[list[Any]]
    tensors: list[list[Any]]
    data: bytes

    def copy(self) -> "Parts":
        """With lists of its own."""
        pairs = [
            [key, kind, (value[0], [*value[1]]) if kind == Kind.ARRAY else value] for key, kind, value in self.pairs
        ]
        tensors = [[name, [*dims], kind, offset] for name, dims, kind, offset in self.tensors]
        return Parts(self.version, pairs, tensors, self.data)


def parts_of(model: GGUFModel) -> Parts:
    """The parts of the file that the model is written to."""
    with tempfile.TemporaryDirectory(dir=SCRATCH) as folder:
        path = Path(folder) / "model.gguf"
        write_gguf(model, path)
        return parts(path.read_bytes())


@contextlib.contextmanager
def opened(data: bytes) -> Iterator[tuple[GGUFModel, Path]]:
    """The file of these bytes, opened, and the folder that it is in, where more may be written: the block's end removes
    it."""
    folder = Path(tempfile.mkdtemp(dir=SCRATCH, prefix="fuzz-"))
    try:
        path = folder / "model.gguf"
        path.write_bytes(data)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            with GGUFModel.open(path) as model:
                yield model, folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def parts(data: bytes) -> Parts:
    """The parts of a valid file."""
    place = 4

    def take(form: str) -> Any:
        nonlocal place
        place += struct.calcsize("<" + form)
        return struct.unpack_from("<" + form, data, place - struct.calcsize("<" + form))[0]

    def text() -> bytes:
        nonlocal place
        size = take("Q")
        place += size
        return data[place - size : place]

    def value(kind: Kind) -> Any:
        if kind == Kind.ARRAY:
            of, count = Kind(take("I")), take("Q")
            return of, [value(of) for _ in range(count)]
        return text() if kind == Kind.STRING else take(_FORMS[kind])

    version, tensors, pairs = take("I"), take("Q"), take("Q")
    found = []
    for _ in range(pairs):
        key, kind = text(), Kind(take("I"))
        found.append([key, kind, value(kind)])
    listed = [[text(), [take("Q") for _ in range(take("I"))], take("I"), take("Q")] for _ in range(tensors)]
    return Parts(version, found, listed, data[-(-place // _ALIGNMENT) * _ALIGNMENT :])


def joined(given: Parts, more_tensors: int = 0, more_pairs: int = 0) -> bytes:
    """The file of these parts. more_tensors, more_pairs: how many more it announces than it has."""
    counts = len(given.tensors) + more_tensors, len(given.pairs) + more_pairs
    made = [b"GGUF", struct.pack("<IQQ", given.version, *(max(count, 0) for count in counts))]
    for key, kind, value in given.pairs:
        made += [_text(key), struct.pack("<I", kind), _value(kind, value)]
    for name, dims, kind, offset in given.tensors:
        made += [_text(name), struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)]
    header = b"".join(made)
    return header + bytes(-len(header) % _ALIGNMENT) + given.data


def _text(text: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text


def _value(kind: int, value: Any) -> bytes:
    if kind == Kind.STRING:
        return _text(value)
    if kind == Kind.ARRAY:
        of, values = value
        if of in _FORMS and of != Kind.BOOL:
            with contextlib.suppress(struct.error):  # numbers that need no cutting
                return struct.pack(f"<IQ{len(values)}{_FORMS[of]}", of, len(values), *values)
        return struct.pack("<IQ", of, len(values)) + b"".join(_value(of, one) for one in values)
    form = _FORMS[Kind(kind)]
    if form in "fd":
        return struct.pack("<" + form, value)
    if form == "?":
        return bytes((int(value) & 0xFF,))
    bits = 8 * struct.calcsize(form)
    return (int(value) & ((1 << bits) - 1)).to_bytes(bits // 8, "little")


# ---- damage to the structure


def _scalar(draw: random.Random, kind: Kind) -> Any:
    return draw.choice(_FLOATS) if kind in (Kind.FLOAT32, Kind.FLOAT64) else draw.choice(_NUMBERS)


def _any_value(draw: random.Random) -> tuple[Kind, Any]:
    """A value of any kind."""
    kind = draw.choice(list(Kind))
    if kind == Kind.STRING:
        return kind, draw.choice(TEXTS)
    if kind == Kind.ARRAY:
        of = draw.choice([one for one in Kind if one != Kind.ARRAY])
        count = draw.choice((0, 1, 2, 3, 300))
        return kind, (of, [draw.choice(TEXTS) if of == Kind.STRING else _scalar(draw, of) for _ in range(count)])
    return kind, _scalar(draw, kind)


def _change_value(draw: random.Random, file: Parts) -> str:
    pair = draw.choice(file.pairs)
    if pair[1] == Kind.ARRAY:
        return _change_list(draw, file, pair)
    pair[2] = draw.choice(TEXTS) if pair[1] == Kind.STRING else _scalar(draw, pair[1])
    return f"{_shown(pair[0])} = {pair[2]!r:.60}"


def _change_kind(draw: random.Random, file: Parts) -> str:
    pair = draw.choice(file.pairs)
    pair[1:] = _any_value(draw)
    return f"{_shown(pair[0])} = {pair[1].name} {pair[2]!r:.60}"


def _change_keys(draw: random.Random, file: Parts) -> str:
    pair = draw.choice(file.pairs)
    action = draw.choice(("removed", "twice", "renamed", "added"))
    if action == "removed":
        file.pairs.remove(pair)
    elif action == "twice":
        file.pairs.append(deepcopy(pair))
    elif action == "renamed":
        pair[0] = draw.choice(TEXTS)
    else:
        names = ("general.alignment", "split.count", "tokenizer.ggml.add_eos_token", "tokenizer.chat_template.tool_use",
                 "tokenizer.ggml.eot_token_id", "general.sampling.temp", "tokenizer.ggml.add_space_prefix")  # fmt: skip
        pair = [draw.choice(names).encode(), *_any_value(draw)]
        file.pairs.append(pair)
    return f"{_shown(pair[0])} {action}"


def _change_list(draw: random.Random, file: Parts, pair: list[Any] | None = None) -> str:
    """Of the vocabulary, mostly."""
    pair = pair or draw.choice([pair for pair in file.pairs if pair[1] == Kind.ARRAY])
    of, values = pair[2]
    if not values:
        return "nothing"
    action = draw.choice(("set", "set", "set", "copied", "removed", "shorter", "longer", "shuffled", "joined"))
    at, other = draw.randrange(len(values)), draw.randrange(len(values))
    if action == "set":
        values[at] = draw.choice(TEXTS) if of == Kind.STRING else _scalar(draw, of)
    elif action == "copied":
        values[at] = values[other]
    elif action == "removed":
        del values[at]
    elif action == "shorter":
        del values[at:]
    elif action == "longer":
        values += values[:at]
    elif action == "shuffled":
        draw.shuffle(values)
    elif of == Kind.STRING:  # a piece that others make, or another control token
        values[at] = values[other] + values[draw.randrange(len(values))]
    return f"{_shown(pair[0])}[{at}] {action}"


def _change_tensors(draw: random.Random, file: Parts) -> str:
    tensor = draw.choice(file.tensors)
    action = draw.choice(("name", "dimension", "dimensions", "type", "offset", "removed", "twice", "swapped"))
    if action == "name":
        tensor[0] = draw.choice((*TEXTS, b"blk.0.attn_q.bias", b"output.weight", b"A" * 64, b"A" * 65))
    elif action == "dimension":
        sizes = 0, 1, 31, 33, 1 << 20, 1 << 40, 1 << 62, (1 << 64) - 1
        tensor[1][draw.randrange(len(tensor[1]))] = draw.choice(sizes)
    elif action == "dimensions":
        tensor[1] = [draw.choice((1, 2, 32)) for _ in range(draw.choice((0, 1, 3, 4, 5)))]
    elif action == "type":
        tensor[2] = draw.choice((*range(45), (1 << 32) - 1))
    elif action == "offset":
        tensor[3] = draw.choice((1, 32, tensor[3] + 1, len(file.data), 1 << 40, (1 << 64) - 32))
    elif action == "removed":
        file.tensors.remove(tensor)
    elif action == "twice":
        file.tensors.append(deepcopy(tensor))
    else:
        other = draw.choice(file.tensors)
        tensor[3], other[3] = other[3], tensor[3]
    return f"{_shown(tensor[0])} {action}"


def _shown(name: bytes) -> str:
    return ascii(name)[2:42]


_STRUCTURE: dict[str, Callable[[random.Random, Parts], str]] = {
    "value": _change_value,
    "kind": _change_kind,
    "keys": _change_keys,
    "list": _change_list,
    "tensors": _change_tensors,
}


# ---- damage to the bytes


def damaged_bytes(draw: random.Random, data: bytes, end: int) -> tuple[str, bytes]:
    """Damage between the beginning and `end`."""
    at, made = draw.randrange(end), bytearray(data)
    action = draw.choice(("bit", "bytes", "number", "cut", "removed", "inserted", "zeros"))
    if action == "bit":
        made[at] ^= 1 << draw.randrange(8)
    elif action == "bytes":
        made[at : at + 4] = draw.randbytes(4)
    elif action == "number":
        made[at : at + 8] = struct.pack("<Q", draw.choice((0, 1, 1 << 31, 1 << 32, 1 << 62, (1 << 64) - 1)))
    elif action == "cut":
        del made[at:]
    elif action == "removed":
        del made[at : at + draw.choice((1, 8, 100))]
    elif action == "inserted":
        made[at:at] = draw.randbytes(draw.choice((1, 8, 100)))
    else:
        made[at : at + draw.choice((8, 100, 1000))] = bytes(100)
    return f"{action} at {at}", bytes(made)


def mutated(draw: random.Random, file: Parts) -> tuple[str, str, bytes]:
    """A damaged file: one change, or several."""
    kind = draw.choice((*_STRUCTURE, "list", "counts", "bytes", "several"))
    file = file.copy()
    if kind == "bytes":
        whole = joined(file)
        return kind, *damaged_bytes(draw, whole, len(whole) - len(file.data))
    if kind == "counts":
        more = draw.choice((-1, 1, 1000, 1 << 40)), draw.choice((-1, 1, 1000, 1 << 40))
        file.version = draw.choice((file.version, 2, 1, 4, 1 << 16, 0))
        return kind, f"{more}, version {file.version}", joined(file, *more)
    names = draw.choices(list(_STRUCTURE), k=draw.randint(2, 5)) if kind == "several" else [kind]
    what = [_STRUCTURE[name](draw, file) for name in names if file.tensors and file.pairs]
    return kind, ", ".join(what), joined(file)
