"""Emits one Relax function of an image encoder: the methods of compiler/models/graph.py, and those that only encoders
need.

Rows are patches of several images, one image after the other; tokens are groups of merge x merge rows. io buffers are
those of PATCHES in runtime/artifact/io_names.py; "state" has the number of live rows, "answers" that of live tokens.
"""

import math
from dataclasses import dataclass, field
from typing import Any

from tvm import relax, te

from mlc_amd.compiler import ops
from mlc_amd.compiler.models.graph import BLOCK, ONES, OPS, Graph
from mlc_amd.compiler.models.images import features_type
from mlc_amd.compiler.models.vision.config import NEIGHBOURS, VisionConfig
from mlc_amd.compiler.ops import shape_of, tensor_type
from mlc_amd.runtime.errors import UserError
from mlc_amd.schedules.formats import HALF_MAX
from mlc_amd.schedules.operators import LayerNorm, Operator, PackedAttention, RmsNorm
from mlc_amd.schedules.operators.layouts import padded


@dataclass
class VisionGraph(Graph):
    """See the module's docstring. used: names of tensors that the function takes."""

    used: set[str] = field(default_factory=set)

    def __post_init__(self):
        vision: Any = self.model
        self.vision: VisionConfig = vision.vision.config
        self.m = self.spec.m
        self.state = self.parameter("state", "io", tensor_type((4,), "int32"))
        self._tokens = self.parameter("answers", "io", tensor_type((4,), "int32"))
        columns = self.model.tensors["v.patch_embd.weight"].shape[-1]
        self.patches = self.parameter("patches", "io", tensor_type((self.m, columns)))

    @property
    def added(self) -> relax.Var:
        return self.parameter("added", "io", tensor_type((self.m, self.vision.hidden)))

    # ---- methods of decoders' graphs, for rows and for tokens, which also check the shapes of tensors

    def tensor(self, name: str, shape: tuple[int | None, ...]):
        """The tensor of that name. Raises UserError if it is missing, or does not have this shape; None stands for any
        size."""
        self.used.add(name)
        found = self.model.tensors.get(name)
        path: Any = self.model
        if found is None:
            raise UserError(f"{path.vision.path}: tensor {name} is missing; use a complete file")
        fits = len(found.shape) == len(shape) and all(b in (None, a) for a, b in zip(found.shape, shape, strict=True))
        if not fits:
            wanted = "x".join("any" if size is None else str(size) for size in shape)
            raise UserError(f"{path.vision.path}: tensor {name} has shape {found.shape}, expected {wanted}")
        return found

    def emit(self, op: Operator, args) -> relax.Var:
        # With two levels of merging "answers" has the live rows of the first one; kernels clamp it to those they have.
        rows = shape_of(args[-1] if isinstance(op, PackedAttention) else args[0])[0]
        return self.bb.emit(ops.call(op, [self.state if rows == self.m else self._tokens, *args]))

    def vector(self, name: str, exact: bool = False) -> relax.Var:
        self.tensor(name, (None,))
        return super().vector(name, exact)

    def whole_vector(self, name: str) -> relax.Var:
        return self.vector(name, exact=True)

    def linear(self, x, name: str, exact: bool = False) -> relax.Var:
        """x W^T + b, without padding; float32 weights are multiplied in float32. Tensors may have more columns than x,
        which are zeros (`prepare.py`), and limits to which x and the result are clamped (Gemma 4)."""
        base, k = name.removesuffix("weight"), shape_of(x)[1]
        tensor = self.tensor(name, (None, k + -k % BLOCK))
        if self.has(base + "bias"):
            self.tensor(base + "bias", (tensor.rows,))
        if tensor.shape[1] > k:
            x = self.bb.emit(OPS.nn.pad(x, [0, 0, 0, tensor.shape[1] - k]))
        y = super().linear(self._clamped(x, base + "input"), name, exact or tensor.format == "f32")
        return self._clamped(self.columns(y, 0, tensor.rows), base + "output")

    def _clamped(self, x, name: str):
        if not self.has(name + "_min"):
            return x
        low, high = (float(self.tensor(f"{name}_{end}", (1,)).dequantize()[0]) for end in ("min", "max"))
        finite = all(map(math.isfinite, (low, high)))
        return self.bb.emit(OPS.clip(x, low, high)) if finite and max(-low, high) < HALF_MAX else x

    def norm(self, x, name: str, rows: str = "all", eps: float | None = None, kind: str = "") -> relax.Var:
        """A norm over whole rows, of the encoder's kind or of `kind`."""
        (m, k), eps = shape_of(x), self.vision.eps if eps is None else eps
        self.tensor(name + ".weight", (k,))
        weights = [self.vector(name + ".weight")]
        rms = (kind or self.vision.norm) == "rms"
        if not rms and self.has(name + ".bias"):
            self.tensor(name + ".bias", (k,))
            weights.append(self.vector(name + ".bias"))
        if k % BLOCK == 0:
            common: Any = {"k": k, "m": m, "eps": eps, "rows": "all", "layout": ""}
            return self.emit(RmsNorm(**common) if rms else LayerNorm(**common, bias=len(weights) > 1), [x, *weights])
        weight, *bias = (self.columns_of(one, k) for one in weights)
        if rms:
            return self.bb.emit(OPS.nn.rms_norm(x, weight, -1, eps))
        return self.bb.emit(OPS.nn.layer_norm(x, weight, bias[0] if bias else OPS.zeros_like(weight), -1, eps))

    def columns_of(self, vector, count: int) -> relax.Var:
        """A vector without its padding."""
        return self.bb.emit(OPS.strided_slice(vector, [0], [0], [count])) if count % 16 else vector

    def optional_norm(self, x, name: str, **options) -> relax.Var:
        return self.norm(x, name, **options) if self.has(name + ".weight") else x

    def grouped_norm(self, x, size: int, name: str = "") -> relax.Var:
        """An RMS norm over each group of `size` columns. name: of its weight, or ""."""
        (m, k) = shape_of(x)
        if name:
            self.tensor(name, (size,))
        ones = self.parameter(f"{ONES}{size}", "weight", tensor_type((padded(size),)))
        weight = self.columns_of(self.vector(name) if name else ones, size)
        parts = self.bb.emit(OPS.reshape(x, (m, k // size, size)))
        normed = self.bb.emit(OPS.nn.rms_norm(parts, weight, -1, self.vision.eps))
        return self.bb.emit(OPS.reshape(normed, (m, k)))

    # ---- images

    def head_norm(self, x, name: str) -> relax.Var:
        """A norm over each head, or over all heads together, if the file has its weight."""
        if not self.has(name + ".weight"):
            return x
        size = self.tensor(name + ".weight", (None,)).shape[0]
        if size == shape_of(x)[1]:
            return self.norm(x, name)
        return self.grouped_norm(x, self.vision.head_dim, name + ".weight")

    def turned(self, x) -> relax.Var:
        """x after rotary positions, if the encoder has them. io "turns": cosines, then sines with their signs."""
        if not (turns := self.vision.turns):
            return x
        d, span = self.vision.head_dim, turns.span(self.vision.head_dim)
        angles = self.parameter("turns", "io", tensor_type((self.m, 2 * d)))

        def turn(x, angles):
            def element(row, column):
                other = column // span * span + (column % span + span // 2) % span
                return x[row, column] * angles[row, column % d] + x[row, other] * angles[row, d + column % d]

            return te.compute(x.shape, element, "turned")

        return self.bb.emit_te(turn, x, angles, primfunc_name_hint="turn_heads")

    def attend(self, q, k, v, layer: int | None) -> relax.Var:
        """Attention within images, or within windows in layers without full attention. layer None: within windows."""
        c, m = self.vision, shape_of(q)[0]
        windows = layer is None or (c.window and layer not in c.full)
        segments = self.parameter("windows" if windows else "segments", "io", tensor_type((self.m, 2), "int32"))
        if m < self.m:
            segments = self.bb.emit_te(_merged_segments, segments, m, primfunc_name_hint="merge_segments")
        op = PackedAttention(heads=c.heads, kv_heads=c.heads, d=c.head_dim, m=m, scale=c.scale)
        return self.emit(op, [segments, q, k, v])

    def merged(self, x) -> relax.Var:
        """The rows of each token side by side; with `inner`, the 2 x 2 rows that become one."""
        (m, k), count = shape_of(x), self._count
        return self.bb.emit(OPS.reshape(x, (m // count, count * k))) if count > 1 else x

    @property
    def _count(self) -> int:
        return 4 if self.vision.inner else self.vision.merge**2

    def pooled(self, x, factor: float = 1.0) -> relax.Var:
        """The mean of the rows that `merged` puts side by side, times a factor."""
        (m, k), count = shape_of(x), self._count
        parts = self.bb.emit(OPS.reshape(x, (m // count, count, k)))
        return self.scaled(self.bb.emit(OPS.sum(parts, [1])), factor / count)

    def convolved(self, x, name: str) -> relax.Var:
        """A convolution of 3 x 3 rows with a stride of 2. io "neighbours": for each group of 4 patches, the numbers of
        its 9 rows, -1 for none; then for each group of 16 patches, the numbers of its 9 groups of 4."""
        (m, k), first = shape_of(x), 0 if shape_of(x)[0] == self.m else self.m // 4
        table = self.parameter("neighbours", "io", tensor_type((self.m, NEIGHBOURS), "int32"))

        def gather(table, x):
            def element(row, column):
                source = table[first + row, column // k]
                return te.if_then_else(source < 0, 0.0, x[te.max(source, 0), column % k])

            return te.compute((m // 4, NEIGHBOURS * k), element, "gathered")

        return self.linear(self.bb.emit_te(gather, table, x, primfunc_name_hint="gather_neighbours"), name)

    def made(self, x) -> relax.Var:
        """Features in the dtype in which the host gets them."""
        if features_type(self.model, self.target) == "float32":
            return x
        return self.bb.emit(OPS.astype(self.bb.emit(OPS.clip(x, -HALF_MAX, HALF_MAX)), "float16"))

    def subtract(self, x, y) -> relax.Var:
        return self.bb.emit(OPS.subtract(x, y))


def _merged_segments(segments, m: int):
    """The segments of groups of rows."""
    each = int(segments.shape[0]) // m
    return te.compute((m, 2), lambda row, end: segments[row * each, end] // each, "merged_segments")
