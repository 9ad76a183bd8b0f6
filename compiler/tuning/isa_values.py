"""What a wave's registers hold, as far as that is the same in all lanes: `isa_trace.py`'s loops and branches hang on
it.

In: instructions in LLVM's syntax, one after the other. Out: values of scalar registers, and of vector registers whose
lanes are equal; None is unknown. Scalar loads find what `memory` says.
"""

import functools
import re

MASK = 0xFFFFFFFF
REGISTER = re.compile(r"s(\d+)$|s\[(\d+):(\d+)\]$")
VECTOR = re.compile(r"v(\d+)$|v\[(\d+):(\d+)\]$")
NAMES = {"vcc_lo": "vcc", "vcc": "vcc", "exec_lo": "exec", "exec": "exec", "src_scc": "scc", "scc": "scc"}
IDLE = ("s_wait", "s_nop", "s_delay", "s_clause", "s_barrier", "s_sendmsg", "s_code", "s_set", "s_inst")
LOADS = (
    "global_load",
    "flat_load",
    "buffer_load",
    "scratch_load",
    "ds_load",
    "ds_read",
    "ds_bpermute",
    "ds_permute",
    "ds_swizzle",
)
SUFFIX = re.compile(r"_e(32|64)$")
CARRY = re.compile(r"v_(add|sub|subrev|addc|subb|subbrev)_co_|v_addc|v_subb|v_div_scale|v_mad_[iu]64")


@functools.lru_cache(maxsize=4096)
def registers(operand: str) -> range:
    """Numbers of the scalar registers that an operand names."""
    return _numbers(REGISTER.match(operand))


@functools.lru_cache(maxsize=4096)
def vectors(operand: str) -> range:
    """Numbers of the vector registers that an operand names."""
    return _numbers(VECTOR.match(operand))


def _numbers(found) -> range:
    if not found:
        return range(0)
    return range(int(found[1]), int(found[1]) + 1) if found[1] else range(int(found[2]), int(found[3]) + 1)


def parts(name: str, operands: list[str]) -> list[tuple[str, list[str]]]:
    """The operations of an instruction: RDNA3 and later issue two at once."""
    if not any("::" in operand for operand in operands):
        return [(SUFFIX.sub("", name), operands)]
    found = []
    for text in f"{name} {', '.join(operands)}".split("::"):
        mnemonic, _, rest = text.strip().partition(" ")
        found.append((mnemonic.replace("v_dual_", "v_"), [operand.strip() for operand in rest.split(",")]))
    return found


def reads_vectors(name: str) -> bool:
    """Whether an instruction of that name gives a scalar register something out of vector ones that may be equal in all
    lanes."""
    return name.startswith(("v_readfirstlane", "v_readlane", "v_add_co_u32", "v_sub_co_u32")) or (
        name.startswith("v_cmp_") and name.endswith(("32_e32", "32_e64", "32"))
    )


def sources(name: str, operands: list[str]) -> set[int]:
    """Vector registers that decide on what this instruction writes, for those that `Values` computes."""
    if (
        name.startswith(("v_cmp", "v_readfirstlane", "v_readlane", "v_add_co_u32", "v_sub_co_u32"))
        or name.removeprefix("v_") in _VECTOR
    ):
        return {number for operand in operands[1:] for number in vectors(operand)}
    return set()


def written(name: str, operands: list[str]) -> range:
    """Vector registers that an instruction writes."""
    if name.startswith("v_"):
        writes = not name.startswith(("v_cmp", "v_read"))
    elif "_atomic_" in name:
        writes = any(mark in " ".join(operands).split() for mark in ("glc", "sc0", "th:TH_ATOMIC_RETURN"))
    else:
        writes = name.startswith(LOADS)
    if writes:
        return vectors(operands[0]) if operands else range(0)
    return range(0)


class Values:
    """Of a wave. "vcc_hi" is what it is in waves of 32 lanes, a register of its own.

    memory: words by their addresses. arrival: what an atomic counter returns, as far as it reaches a scalar register.
    """

    def __init__(self, memory: dict[int, int] | None = None, arrival: int | None = None):
        self.values = {"exec": MASK, "vcc": None, "scc": None}
        self.lanes: dict[int, int | None] = {}  # by vector register
        self.packed: set[int] = (
            set()
        )  # vector registers with the lane's numbers in the workgroup, ten bits for each axis
        self.memory, self.arrival, self.arrived = memory or {}, arrival, False

    def read(self, operand: str, wide: bool = False) -> int | None:
        if found := REGISTER.match(operand):
            if found[1]:
                return self.values.get(operand)
            low, high = self.values.get(f"s{found[2]}"), self.values.get(f"s{int(found[2]) + 1}")
            return None if low is None or high is None else low | high << 32
        if operand in NAMES or operand == "vcc_hi" or operand.startswith("ttmp"):
            return self.values.get(NAMES.get(operand, operand))
        if operand == "null":
            return 0
        try:
            value = int(operand, 0)
        except ValueError:
            return None
        return value & (MASK << 32 | MASK if wide else MASK)

    def write(self, operand: str, value: int | None) -> None:
        if found := REGISTER.match(operand):
            for i, register in enumerate(registers(operand)):
                self.values[f"s{register}"] = None if value is None or i > 1 else value >> 32 * i & MASK
            return
        name = NAMES.get(operand, operand)
        if name == "exec":
            return  # lanes that are masked out take part
        if name in ("vcc", "scc") or found is None:
            self.values[name] = value

    def branches(self, name: str) -> bool | None:
        """Whether a branch is taken; None if that is unknown, as for all that hang on the lanes' mask."""
        kind = name.removeprefix("s_cbranch_").removeprefix("s_")
        if kind == "branch":
            return True
        if kind.startswith("exec"):
            return None
        value = self.values["scc" if kind.startswith("scc") else "vcc"]
        return None if value is None else (value != 0) == (kind in ("scc1", "vccnz"))

    def execute(self, name: str, operands: list[str]) -> None:
        """Does an operation: one of `parts`."""
        if not name.startswith("s_"):
            self._vector(name, operands)
        elif name.startswith("s_load"):
            self._load(name, operands)
        elif name.startswith("s_cmp"):
            self.values["scc"] = self._compare(name, operands)
        elif name.startswith("s_cselect"):
            scc = self.values["scc"]
            self.write(operands[0], None if scc is None else self.read(operands[1 if scc else 2], name.endswith("64")))
        elif "saveexec" in name:
            self.write(operands[0], None)
            self.values["scc"] = None
        elif not name.startswith(IDLE):
            self._scalar(name, operands)

    def _scalar(self, name: str, operands: list[str]) -> None:
        base, _, kind = name.removeprefix("s_").rpartition("_")
        wide = kind in ("b64", "u64", "i64")
        if base in ("addk", "mulk", "addk_co"):
            base, operands = base[:3], [operands[0], operands[0], operands[1]]
        function = _OPERATIONS.get(base)
        values = [self.read(operand, wide) for operand in operands[1:]]
        scc = self.values["scc"]
        if function is None or None in values or not values or (base in _CARRIES and scc is None):
            self.write(operands[0], None)
            self.values["scc"] = scc if base in _KEEPS else None
            return
        signed = [
            _signed(value, 64 if wide else 32) if kind.startswith("i") or base == "movk" else value for value in values
        ]
        result = function(*signed) + (_CARRIES[base] * scc if base in _CARRIES else 0)
        full = MASK << 32 | MASK if wide else MASK
        self.write(operands[0], result & full)
        if base in _SUMS and kind == "u32":
            self.values["scc"] = int(not 0 <= result <= full)
        elif base in _SUMS and kind == "i32":
            self.values["scc"] = int(result != _signed(result, 32))
        elif base in ("min", "max"):
            self.values["scc"] = int(result == signed[0])
        elif base not in _KEEPS:
            self.values["scc"] = int(result & full != 0)

    def _compare(self, name: str, operands: list[str]) -> int | None:
        relation, kind = name.split("_")[2:]
        values = [self.read(operand, kind.endswith("64")) for operand in operands]
        if None in values or relation not in _RELATIONS:
            return None
        bits = int(kind[1:])
        a, b = (_signed(value, bits) if kind[0] == "i" else value for value in values)
        if name.startswith("s_cmpk") and kind[0] == "i":
            b = _signed(b, 32) if b > 0xFFFF else b
        return int(_RELATIONS[relation](a, b))

    def _load(self, name: str, operands: list[str]) -> None:
        base, offsets = self.read(operands[1]), [word for word in operands[2].split() if word != "glc"]
        values = [self.read(word.removeprefix("offset:")) for word in offsets]
        known = base is not None and None not in values
        for i, register in enumerate(registers(operands[0]) or [operands[0]]):
            value = self.memory.get(base + sum(_signed(value, 32) for value in values) + 4 * i) if known else None
            self.values[register if isinstance(register, str) else f"s{register}"] = value

    # ---- vector registers

    def lane(self, operand: str) -> int | None:
        """A source that is equal in all lanes."""
        if found := VECTOR.match(operand):
            return self.lanes.get(int(found[1])) if found[1] else None
        return self.read(operand)

    def _write_lanes(self, numbers: range, value: int | None) -> None:
        for number in numbers:
            self.lanes[number] = value
            self.packed.discard(number)

    def _vector(self, name: str, operands: list[str]) -> None:
        if name.startswith(("v_readfirstlane", "v_readlane")):
            value = self.lane(operands[1])
            if value is None and self.arrived and name.startswith("v_readfirstlane"):
                value = self.arrival
            self.write(operands[0], value)
        elif name.startswith("v_cmp_"):
            self.write(operands[0], self._compare_lanes(name, operands))
        elif name.startswith("v_cmp"):
            return
        elif name in ("v_add_co_u32", "v_sub_co_u32"):
            self._carried(name, operands)
        else:
            targets = written(name, operands)
            self.arrived |= "_atomic_" in name and bool(targets)
            value = self._computed(name, operands)
            self._write_lanes(targets, value)
            if CARRY.match(name) and len(operands) > 1:
                self.write(operands[1], None)

    def _carried(self, name: str, operands: list[str]) -> None:
        """A sum or difference, and the lanes where it carries: all or none of equal ones."""
        values = [self.lane(operand) for operand in operands[2:]]
        result = None if None in values else values[0] + values[1] if name == "v_add_co_u32" else values[0] - values[1]
        self._write_lanes(vectors(operands[0]), None if result is None else result & MASK)
        self.write(operands[1], None if result is None else 0 if 0 <= result <= MASK else MASK << 32 | MASK)

    def _computed(self, name: str, operands: list[str]) -> int | None:
        base = name.removeprefix("v_")
        if base not in _VECTOR or " " in operands[-1]:  # a modifier behind the last operand
            return self._clamped(operands) if base in ("sub_u32", "sub_nc_u32") else None
        if number := self._workitem(base, operands):
            return number[0]
        values = [self.lane(operand) for operand in operands[1:]]
        if None in values:
            return None
        if base.endswith("i32") or base == "med3_i32":
            values = [_signed(value, 32) for value in values]
        return _VECTOR[base](*values) & MASK

    def _clamped(self, operands: list[str]) -> int | None:
        last, _, modifier = operands[-1].partition(" ")
        a, b = self.lane(operands[1]), self.lane(last)
        return max(0, a - b) if modifier.strip() == "clamp" and a is not None and b is not None else None

    def _workitem(self, base: str, operands: list[str]) -> tuple[int] | None:
        """The workitem's number on the second axis, which is the wave's, out of the packed ones."""
        numbers = vectors(operands[-1]) if base == "lshrrev_b32" else vectors(operands[1])
        if not numbers or numbers[0] not in self.packed or self.values.get("wave") is None:
            return None
        shift = operands[1:2] if base == "lshrrev_b32" else operands[2:] if base == "bfe_u32" else []
        return (self.values["wave"],) if shift in (["10"], ["10", "10"]) else None

    def _compare_lanes(self, name: str, operands: list[str]) -> int | None:
        _, _, relation, kind, *_ = name.split("_")
        values = [self.lane(operand) for operand in operands[1:]]
        relation = {"ne": "lg"}.get(relation, relation)
        if kind not in ("i32", "u32") or relation not in _RELATIONS or None in values:
            return None
        a, b = (_signed(value, 32) if kind == "i32" else value for value in values)
        return MASK << 32 | MASK if _RELATIONS[relation](a, b) else 0


def _signed(value: int, bits: int) -> int:
    value &= (1 << bits) - 1
    return value - (1 << bits) if value >> bits - 1 else value


_RELATIONS = {
    "eq": int.__eq__, "lg": int.__ne__, "gt": int.__gt__, "ge": int.__ge__, "lt": int.__lt__, "le": int.__le__,
}  # fmt: skip
_KEEPS = {"mov", "movk", "mul", "mul_hi", "add_nc", "sub_nc", "pack_ll", "sext_i32", "bfm"}  # leave scc as it is
_SUMS = {"add", "sub", "add_co", "sub_co", "addc", "subb", "add_co_ci", "sub_co_ci"}
_CARRIES = {"addc": 1, "add_co_ci": 1, "subb": -1, "sub_co_ci": -1}
_OPERATIONS = {
    "mov": lambda a: a,
    "movk": lambda a: _signed(a, 16) if a <= 0xFFFF else a,
    "add": lambda a, b: a + b,
    "add_co": lambda a, b: a + b,
    "add_nc": lambda a, b: a + b,
    "addc": lambda a, b: a + b,
    "add_co_ci": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "sub_co": lambda a, b: a - b,
    "subb": lambda a, b: a - b,
    "sub_co_ci": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "mul_hi": lambda a, b: a * b >> 32,
    "abs": abs,
    "lshl": lambda a, b: a << (b & 63),
    "lshr": lambda a, b: a >> (b & 63),
    "ashr": lambda a, b: a >> (b & 63),
    "lshl1_add": lambda a, b: (a << 1) + b,
    "lshl2_add": lambda a, b: (a << 2) + b,
    "lshl3_add": lambda a, b: (a << 3) + b,
    "lshl4_add": lambda a, b: (a << 4) + b,
    "and": lambda a, b: a & b,
    "or": lambda a, b: a | b,
    "xor": lambda a, b: a ^ b,
    "not": lambda a: ~a,
    "andn2": lambda a, b: a & ~b,
    "and_not1": lambda a, b: a & ~b,
    "min": min,
    "max": max,
    "bfe": lambda a, b: (a >> (b & 31)) & ((1 << (b >> 16 & 127)) - 1),
}
_VECTOR = {
    "mov_b32": lambda a: a,
    "add_u32": lambda a, b: a + b,
    "add_nc_u32": lambda a, b: a + b,
    "add_i32": lambda a, b: a + b,
    "sub_u32": lambda a, b: a - b,
    "sub_nc_u32": lambda a, b: a - b,
    "subrev_u32": lambda a, b: b - a,
    "subrev_nc_u32": lambda a, b: b - a,
    "add3_u32": lambda a, b, c: a + b + c,
    "min_i32": min,
    "max_i32": max,
    "min_u32": min,
    "max_u32": max,
    "min3_i32": min,
    "max3_i32": max,
    "med3_i32": lambda a, b, c: sorted((a, b, c))[1],
    "med3_u32": lambda a, b, c: sorted((a, b, c))[1],
    "and_b32": lambda a, b: a & b,
    "or_b32": lambda a, b: a | b,
    "lshlrev_b32": lambda a, b: b << (a & 31),
    "lshrrev_b32": lambda a, b: b >> (a & 31),
    "ashrrev_i32": lambda a, b: b >> (a & 31),
    "lshl_add_u32": lambda a, b, c: (a << (b & 31)) + c,
    "add_lshl_u32": lambda a, b, c: (a + b & MASK) << (c & 31),
    "bfe_u32": lambda a, b, c: a >> (b & 31) & (1 << (c & 31)) - 1,
    "mul_lo_u32": lambda a, b: a * b,
    "mul_hi_u32": lambda a, b: a * b >> 32,
    "mul_u32_u24": lambda a, b: (a & 0xFFFFFF) * (b & 0xFFFFFF),
    "mad_u32_u24": lambda a, b, c: (a & 0xFFFFFF) * (b & 0xFFFFFF) + c,
}
