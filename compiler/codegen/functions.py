"""Mathematical functions of one or two numbers (exp, tanh, pow and others) as arithmetic that all code generators
support.

TVM would call ROCm's device library, which is not used here, or the C library, one number at a time. Vulkan's own
functions are only as accurate as its specification demands. `expand` is a pass over lowered functions: each call
becomes additions, products, bit operations and 2**x for |x| <= 1/2, the same on every GPU.

Accuracy: relative errors are below 5e-7 for results that are normal numbers. For tanh, erf, sin and cos this is the
absolute error; for pow it is 1e-6 while |y ln x| < 16. Arguments of sin and cos: up to 1e5. Types: float32 scalars;
float16 is computed in float32. Calls on other types are not changed, and code generators reject them.
"""

import math

import tvm
import tvm_ffi
from tvm import tirx
from tvm.tirx.op import call_llvm_pure_intrin

from mlc_amd.schedules.generic import EXPANDED

FLOATS = ("float32", "float16")  # types whose calls are expanded
LOG2_E = math.log2(math.e)
# ln 2 and pi / 2 as sums of float32 numbers: products of the first ones with small whole numbers are exact
LN2 = (0.693145751953125, 1.42860682030941723e-6)
HALF_PI = (1.5703125, 4.837512969970703125e-4, 7.54978995489188e-8)
# Polynomials, highest power first; TANH to COS are those of Cephes, in x*x.
# (tanh(x) - x) / x**3, |x| < 0.625
TANH = (-5.70498872745e-3, 2.06390887954e-2, -5.37397155531e-2, 1.33314422036e-1, -3.33332819422e-1)
# erf(x) / x, |x| < 1
ERF = (
    7.853861353153693e-5, -8.010193625184903e-4, 5.188327685732524e-3, -2.685381193529856e-2, 1.128358514861418e-1,
    -3.761262582423300e-1, 1.128379165726710,
)  # fmt: skip
# Abramowitz and Stegun 7.1.26: 1 - erf(x) = exp(-x*x) * (t * polynomial of t), t = 1 / (1 + ERFC_P x)
ERFC, ERFC_P = (1.061405429, -1.453152027, 1.421413741, -0.284496736, 0.254829592), 0.3275911
SIN = (-1.9515295891e-4, 8.3321608736e-3, -1.6666654611e-1)  # (sin(x) - x) / x**3, |x| < pi / 4
COS = (2.443315711809948e-5, -1.388731625493765e-3, 4.166664568298827e-2)  # (cos(x) - 1 + x*x/2) / x**4
EXP2 = tuple(math.log(2) ** i / math.factorial(i) for i in range(7, -1, -1))  # Taylor: 2**x, |x| <= 1/2, error 2e-9
LARGEST_POWER = 16  # whole exponents up to this size become products


def expand(gpu: bool = True):
    """The pass that replaces the calls. For a GPU: all calls in _FUNCTIONS. For a CPU: those in EXPANDED, so that LLVM
    can vectorize them. Must run after simplification, which would substitute bound values again, and before TVM lowers
    intrinsics."""

    @tirx.transform.prim_func_pass(opt_level=0, name="ExpandFunctions")
    def replace(func, _module, _context):
        return func.with_body(_Expander(gpu).run(func.body))

    return replace


class _Expander:
    """Replaces the calls in a statement. pending: a stack of lists of statements that must come before the statement
    that is being rewritten. `expander(value)` binds a value to a register; constants stay as they are."""

    def __init__(self, gpu: bool):
        self.pending, self._gpu = [[]], gpu

    def run(self, body):
        statements = [(kind, self._statement) for kind in (tirx.BufferStore, tirx.Bind)]
        return tvm_ffi.structural_mutate(body, [*statements, (tvm.ir.Call, self._call)])

    def _statement(self, node, mutator):
        self.pending.append([])
        node = mutator.default_mutate(node)
        before = self.pending.pop()
        return _sequence([*before, node])

    def _call(self, call, mutator):
        name = call.op.name.partition(".")[2]  # after tirx or prim
        function = _FUNCTIONS.get(name) if self._gpu or name in EXPANDED else None
        branch = name == "if_then_else"
        dtype = str(call.ty) if function or branch else ""  # TVM takes long to print a type
        if branch and (self._gpu or dtype in FLOATS):
            return self._branch(call, mutator)
        if function is None or dtype not in FLOATS:
            return mutator.default_mutate(call)
        args = [mutator.mutate(arg) for arg in call.args]
        result = function(self, *(self(tirx.Cast("float32", x) if dtype == "float16" else x) for x in args))
        return tirx.Cast(dtype, result) if dtype == "float16" else result

    def _branch(self, call, mutator):
        """Puts the statements that an arm needs into that arm: one that is not taken might load out of bounds."""
        condition, arms = mutator.mutate(call.args[0]), []
        for arm in call.args[1:]:
            self.pending.append([])
            value = mutator.mutate(arm)
            arms.append((value, self.pending.pop()))
        if not any(before for _, before in arms):
            return tirx.if_then_else(condition, *(value for value, _ in arms))
        place, first = tirx.decl_buffer((1,), str(call.ty), name="chosen", scope="local"), tirx.const(0, "int32")
        taken, other = (_sequence([*before, tirx.BufferStore(place, value, [first])]) for value, before in arms)
        self.pending[-1] += [tirx.AllocBuffer(place), tirx.IfThenElse(condition, taken, other)]
        return tirx.BufferLoad(place, [first])

    def exp2_small(self, x):
        """2**x for |x| <= 1/2."""
        return _llvm("amdgcn.exp2.f32", x) if self._gpu else _polynomial(self, x, EXP2)

    def __call__(self, value):
        if isinstance(value, tirx.Var | tirx.FloatImm | tirx.IntImm):
            return value
        if self._gpu:
            var = tirx.Var("f", str(value.ty))
            self.pending[-1].append(tirx.Bind(var, value))
            return var
        # On CPUs values go through a local buffer, which LLVM turns into registers. TVM's lowering of intrinsics would
        # substitute the expression of a bound variable at each use, and nested expressions would grow exponentially.
        place, first = tirx.decl_buffer((1,), str(value.ty), name="f", scope="local"), tirx.const(0, "int32")
        self.pending[-1] += [tirx.AllocBuffer(place), tirx.BufferStore(place, value, [first])]
        return tirx.BufferLoad(place, [first])


def _sequence(statements):
    return statements[0] if len(statements) == 1 else tirx.SeqStmt(statements)


# ---- the functions: (b, arguments in registers) -> expression; b(value) binds a value to a register; all float32


def _f(x):
    return tirx.const(x, "float32")


def _i(x):
    return tirx.const(x, "int32")


def _llvm(name, *args):
    return call_llvm_pure_intrin("float32", f"llvm.{name}", *args)


def _fma(a, b, c):
    return _llvm("fma", a, b, c)


def _polynomial(b, x, coefficients):
    total = _f(coefficients[0])
    for c in coefficients[1:]:
        total = b(_fma(total, x, _f(c)))
    return total


def _power_of_two(n):
    """2.0**n, n int32 from -126 to 127."""
    return tirx.reinterpret("float32", tirx.shift_left(n + _i(127), _i(23)))


def _scaled(b, x, n):
    """x * 2**n, n int32 from -252 to 254, in two steps: a single factor could overflow where the result does not."""
    half = b(tirx.shift_right(n, _i(1)))
    return x * b(_power_of_two(half)) * b(_power_of_two(b(n - half)))


def _not_a_number(b, x):
    """Whether x is NaN, tested by its bits: code generators assume that x != x is false."""
    return tirx.bitwise_and(b(tirx.reinterpret("int32", x)), _i(0x7FFFFFFF)) > _i(0x7F800000)


def _clamped(b, x, low, high):
    return b(_llvm("maxnum", b(_llvm("minnum", x, _f(high))), _f(low)))


def _exp(b, x):
    inside = _clamped(b, x, -110.0, 90.0)
    n = b(_llvm("rint", inside * _f(LOG2_E)))
    rest = b(_fma(n, _f(-LN2[1]), b(_fma(n, _f(-LN2[0]), inside))))
    found = b(_scaled(b, b(b.exp2_small(b(rest * _f(LOG2_E)))), b(tirx.Cast("int32", n))))
    return tirx.Select(_not_a_number(b, x), x, found)


def _exp2(b, x):
    inside = _clamped(b, x, -160.0, 130.0)
    n = b(_llvm("rint", inside))
    found = b(_scaled(b, b(b.exp2_small(b(inside - n))), b(tirx.Cast("int32", n))))
    return tirx.Select(_not_a_number(b, x), x, found)


def _log(b, x):
    """x = 2**e * m, m from sqrt(1/2) to sqrt(2); ln m = 2 atanh((m - 1) / (m + 1))."""
    small = b(tirx.Select(x < _f(2.0**-126), x * _f(2.0**25), x))
    bits = b(tirx.reinterpret("int32", small))
    shifted = b(bits - _i(0x3F3504F3))  # the bits of sqrt(1/2)
    e = b(tirx.shift_right(shifted, _i(23)))
    m = b(tirx.reinterpret("float32", b(bits - tirx.shift_left(e, _i(23)))))
    s = b((m - _f(1)) / (m + _f(1)))
    square = b(s * s)
    series = _polynomial(b, square, (2 / 9, 2 / 7, 2 / 5, 2 / 3))
    of_m = b(_fma(b(series * square), s, s + s))
    exponent = b(tirx.Cast("float32", e) - tirx.Select(x < _f(2.0**-126), _f(25), _f(0)))
    found = b(_fma(exponent, _f(LN2[0]), b(_fma(exponent, _f(LN2[1]), of_m))))
    infinite = tirx.Select(x == _f(math.inf), x, found)
    valid = tirx.Select(x == _f(0), _f(-math.inf), infinite)
    return tirx.Select(x >= _f(0), valid, _f(math.nan))


def _sigmoid(b, x):
    return _f(1) / (_f(1) + b(_exp(b, b(_f(0) - x))))


def _tanh(b, x):
    size, square = b(_llvm("fabs", x)), b(x * x)
    near = b(_fma(b(_polynomial(b, square, TANH) * square), x, x))
    far = b(_f(1) - _f(2) / (b(_exp(b, b(size + size))) + _f(1)))
    return tirx.Select(size < _f(0.625), near, tirx.Select(x < _f(0), _f(0) - far, far))


def _erf(b, x):
    size, square = b(_llvm("fabs", x)), b(x * x)
    near = b(_polynomial(b, square, ERF) * x)
    t = b(_f(1) / b(_fma(_f(ERFC_P), size, _f(1))))
    rest = b(_polynomial(b, t, ERFC) * t * b(_exp(b, b(_f(0) - square))))
    far = b(_f(1) - rest)
    return tirx.Select(size < _f(1), near, tirx.Select(x < _f(0), _f(0) - far, far))


def _pow(b, x, y):
    if isinstance(y, tirx.FloatImm) and y.value == int(y.value) and abs(y.value) <= LARGEST_POWER:
        return _whole_power(b, x, int(y.value))
    logarithm = b(_log(b, b(_llvm("fabs", x))))
    product = b(y * logarithm)
    rest = b(_fma(y, logarithm, _f(0) - product))  # the rounding error of the product
    finite = tirx.all(_llvm("fabs", product) < _f(128), x != _f(0))
    size = b(_exp(b, product))
    size = b(tirx.Select(finite, b(_fma(size, rest, size)), size))
    size = b(tirx.Select(y == _f(0), _f(1), size))
    whole, even = b(_llvm("floor", y)), b(_llvm("floor", y * _f(0.5)) * _f(2))
    negative = tirx.Select(whole != y, _f(math.nan), tirx.Select(even == y, size, _f(0) - size))
    return tirx.Select(x < _f(0), negative, size)


def _whole_power(b, x, n):
    result, factor, left = None, x, abs(n)
    while left:
        if left & 1:
            result = factor if result is None else b(result * factor)
        left >>= 1
        if left:
            factor = b(factor * factor)
    if result is None:
        return _f(1)
    return _f(1) / result if n < 0 else result


def _turned(b, x, quarter):
    """sin(x + quarter * pi/2)."""
    n = b(_llvm("rint", x * _f(2 / math.pi)))
    rest = x
    for part in HALF_PI:
        rest = b(_fma(n, _f(-part), rest))
    square = b(rest * rest)
    sine = b(_fma(b(_polynomial(b, square, SIN) * square), rest, rest))
    fourth = b(_polynomial(b, square, COS) * square)
    cosine = b(_fma(fourth, square, b(_fma(square, _f(-0.5), _f(1)))))
    turns = b(tirx.Cast("int32", n) + _i(quarter))
    size = b(tirx.Select(tirx.bitwise_and(turns, _i(1)) == _i(1), cosine, sine))
    return tirx.Select(tirx.bitwise_and(turns, _i(2)) == _i(2), _f(0) - size, size)


def _one(name):
    return lambda b, x: _llvm(name, x)


# TIR's function -> the function that builds its expression
_FUNCTIONS = {
    "exp": _exp,
    "exp2": _exp2,
    "log": _log,
    "log2": lambda b, x: b(_log(b, x)) * _f(LOG2_E),
    "log10": lambda b, x: b(_log(b, x)) * _f(1 / math.log(10)),
    "pow": _pow,
    "sigmoid": _sigmoid,
    "tanh": _tanh,
    "erf": _erf,
    "sin": lambda b, x: _turned(b, x, 0),
    "cos": lambda b, x: _turned(b, x, 1),
    **{name: _one(name) for name in ("sqrt", "fabs", "floor", "ceil", "trunc")},
    "rsqrt": lambda b, x: _f(1) / b(_llvm("sqrt", x)),
    "round": _one("rint"),
    "nearbyint": _one("rint"),
    "fma": lambda b, x, y, z: _fma(x, y, z),
}
