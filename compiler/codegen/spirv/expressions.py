"""Converts TIR expressions to SPIR-V: `value(e)` returns an id, or a list of ids for a vector."""

from typing import Any

from tvm import tirx

from mlc_amd.compiler.codegen.spirv.types import Type, Unsupported, kind, parse
from mlc_amd.compiler.codegen.spirv.values import Values

ARITHMETIC = {"Add": "Add", "Sub": "Sub", "Mul": "Mul"}
COMPARISONS = {"LT": "LessThan", "LE": "LessThanEqual", "GT": "GreaterThan", "GE": "GreaterThanEqual"}
EQUALITY = {  # by the first letter of the register's type
    "EQ": {"f": "FOrdEqual", "i": "IEqual", "b": "LogicalEqual"},
    "NE": {"f": "FUnordNotEqual", "i": "INotEqual", "b": "LogicalNotEqual"},
}
# instruction for integers: instruction for booleans
BITWISE = {"BitwiseAnd": "LogicalAnd", "BitwiseOr": "LogicalOr", "BitwiseXor": "LogicalNotEqual"}
SIGNS = {"float": "F", "int": "S", "uint": "U", "bool": "U"}


class Expressions(Values):
    """Part of the emitter: expressions."""

    def value(self, e) -> Any:
        """The id of an expression's value; a list of ids if it is a vector."""
        return self.dispatch("expr_", e)

    def lanes(self, e, count):
        """The ids of a vector's lanes. A scalar is repeated `count` times."""
        value = self.value(e)
        return value if isinstance(value, list) else [value] * count

    def map(self, function, ty, *operands):
        """Applies `function` to the values of the operands, lane by lane."""
        if ty.lanes == 1:
            return function(*(self.value(o) for o in operands))
        return [function(*lanes) for lanes in zip(*(self.lanes(o, ty.lanes) for o in operands), strict=True)]

    def expr_Var(self, e):
        return self.environment[e]

    def expr_IntImm(self, e):
        return self.asm.const(self.register(parse(e.ty)), int(e))

    def expr_FloatImm(self, e):
        return self.asm.const(self.register(parse(e.ty)), float(e.value))

    def expr_Ramp(self, e):
        return self.lane_indices(e)

    def expr_Broadcast(self, e):
        return [self.value(e.value)] * int(e.lanes)

    def expr_Shuffle(self, e):
        lanes = [lane for vector in e.vectors for lane in self.lanes(vector, parse(vector.ty).lanes)]
        if not all(isinstance(i, tirx.IntImm) for i in e.indices):
            raise Unsupported(f"a shuffle by {list(e.indices)}: indices must be constant")
        out = [lanes[int(i)] for i in e.indices]
        return out if len(out) > 1 else out[0]

    def expr_Let(self, e):
        self.environment[e.var] = self.value(e.value)
        return self.value(e.body)

    def expr_Not(self, e):
        return self.map(lambda x: self.asm.op("LogicalNot", "bool", x), parse(e.ty), e.a)

    def expr_BitwiseNot(self, e):
        ty = parse(e.ty)
        return self.map(lambda x: self.wrap(self.asm.op("Not", self.register(ty), x), ty), ty, e.a)

    def expr_Select(self, e):
        ty = parse(e.ty)
        operands = e.condition, e.true_value, e.false_value
        return self.map(lambda c, x, y: self.asm.op("Select", self.register(ty), c, x, y), ty, *operands)

    def expr_Cast(self, e):
        source, target = parse(e.value.ty), parse(e.ty)
        return self.map(lambda x: self.cast(x, source, target), target, e.value)

    # ---- two operands

    def _binary(self, e):
        name, ty = kind(e), parse(e.a.ty)
        if name in ARITHMETIC and (ty.code, ty.bits) == ("float", 16) and ty.lanes % 2 == 0 and self.profile.float16:
            return self.packed_halves(lambda of, *x: self.asm.op("F" + ARITHMETIC[name], of, *x), ty, e.a, e.b)
        return self.map(lambda x, y: self.scalar(name, ty, x, y), ty, e.a, e.b)

    expr_Add = expr_Sub = expr_Mul = expr_Div = expr_Mod = expr_Min = expr_Max = expr_And = expr_Or = _binary
    expr_LT = expr_LE = expr_GT = expr_GE = expr_EQ = expr_NE = _binary
    expr_BitwiseAnd = expr_BitwiseOr = expr_BitwiseXor = expr_LShift = expr_RShift = _binary

    def packed_halves(self, function, ty, *operands):
        """float16 arithmetic on pairs of lanes: function(type, *vectors of two)."""
        operands, out = [self.lanes(o, ty.lanes) for o in operands], []
        for k in range(0, ty.lanes, 2):
            pairs = [self.pair("f16", *lanes[k : k + 2]) for lanes in operands]
            out += self.split_pair("f16", function(("vec", "f16", 2), *pairs))
        return out

    def scalar(self, name, ty: Type, x, y):
        """One lane of the TIR operation `name` on operands of type `ty`."""
        asm, register, sign = self.asm, self.register(ty), SIGNS[ty.code]
        if name in ARITHMETIC:
            return self.wrap(asm.op(("F" if sign == "F" else "I") + ARITHMETIC[name], register, x, y), ty)
        if name in BITWISE:
            return asm.op(BITWISE[name] if register == "bool" else name, register, x, y)
        if name in ("LShift", "RShift"):
            return self.shift(name == "LShift", ty, x, y)
        if name in ("Min", "Max"):
            return asm.glsl_op(sign + name, register, x, y)
        if name in COMPARISONS:
            return asm.op(("FOrd" if sign == "F" else sign) + COMPARISONS[name], "bool", x, y)
        if name in EQUALITY:
            return asm.op(EQUALITY[name][register[0]], "bool", x, y)
        if name in ("And", "Or"):
            return asm.op("Logical" + name, "bool", x, y)
        if name == "Div":
            return self.wrap(asm.op(sign + "Div", register, x, y), ty)
        if name == "Mod" and sign == "S":
            return self.remainder(register, x, y)
        if name == "Mod":
            return asm.op("FRem" if sign == "F" else "UMod", register, x, y)
        raise Unsupported(name)

    def shift(self, left, ty, x, by):
        """One lane of a shift. A right shift of a signed integer is arithmetic."""
        register = self.register(ty)
        if left:
            return self.wrap(self.asm.op("ShiftLeftLogical", register, x, by), ty)
        return self.asm.op("ShiftRightArithmetic" if ty.code == "int" else "ShiftRightLogical", register, x, by)

    def _floor(self, e):
        """floordiv and floormod. For powers of two: shifts and masks, which are exact for both signs. Otherwise
        unsigned division if the analyzer proves that the operands are not negative, else signed division with a
        correction."""
        ty, divide, asm = parse(e.ty), kind(e) == "FloorDiv", self.asm
        if ty.code not in ("int", "uint"):
            raise Unsupported(f"{kind(e)} on {e.ty}")
        register = self.register(ty)
        by = e.b.value if kind(e.b) == "Broadcast" else e.b
        n = int(by) if isinstance(by, tirx.IntImm) else 0
        if n > 0 and n & (n - 1) == 0:
            if divide:
                return self.map(lambda x: self.shift(False, ty, x, asm.const(register, n.bit_length() - 1)), ty, e.a)
            return self.map(lambda x: asm.op("BitwiseAnd", register, x, asm.const(register, n - 1)), ty, e.a)
        if ty.code == "uint" or (ty.lanes == 1 and self.analyzer.can_prove(tirx.all(e.a >= 0, e.b > 0))):
            return self.map(lambda x, y: asm.op("UDiv" if divide else "UMod", register, x, y), ty, e.a, e.b)
        return self.map(lambda x, y: self._floor_signed(divide, ty, x, y), ty, e.a, e.b)

    expr_FloorDiv = expr_FloorMod = _floor

    def _floor_signed(self, divide, ty, x, y):
        asm, register = self.asm, self.register(ty)
        zero, rest = asm.const(register, 0), self.remainder(register, x, y)
        # whether rest and y have different signs
        opposite = asm.op("SLessThan", "bool", asm.op("BitwiseXor", register, rest, y), zero)
        fix = asm.op("LogicalAnd", "bool", asm.op("INotEqual", "bool", rest, zero), opposite)
        if divide:
            one_less = asm.op("Select", register, fix, asm.const(register, 1), zero)
            return self.wrap(asm.op("ISub", register, asm.op("SDiv", register, x, y), one_less), ty)
        return asm.op("IAdd", register, rest, asm.op("Select", register, fix, y, zero))

    def remainder(self, register, x, y):
        """x - trunc(x / y) * y: Vulkan leaves OpSRem and OpSMod undefined for negative operands."""
        quotient = self.asm.op("SDiv", register, x, y)
        return self.asm.op("ISub", register, x, self.asm.op("IMul", register, quotient, y))
