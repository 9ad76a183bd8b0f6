"""Emits one Relax function of a model, operator by operator.

Modules such as transformer.py call the methods of `Graph` in the order of their formula; nothing here depends on an
architecture. `parameters` says for each function parameter where the runtime finds it: ("io", "tokens"), ("weight",
"output_norm.weight"), ("kv", "k.0").
"""

import math
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from tvm import relax, te

from mlc_amd.compiler import ops
from mlc_amd.compiler.functions import FunctionSpec
from mlc_amd.compiler.models import exchanges, index_keys, packed
from mlc_amd.compiler.models.activations import ACTIVATIONS
from mlc_amd.compiler.models.config import AttentionConfig, ModelConfig, attentions
from mlc_amd.compiler.models.model import Model
from mlc_amd.compiler.models.tensors import SCALE
from mlc_amd.compiler.ops import dtype_of, shape_of, tensor_type
from mlc_amd.runtime.artifact.io_names import HIDDEN, page_table
from mlc_amd.runtime.cache.pages import STATE
from mlc_amd.runtime.sampling.layout import row_shapes
from mlc_amd.schedules.formats import FORMATS
from mlc_amd.schedules.operators import (
    CausalAttention,
    Embed,
    Gate,
    HeadLinear,
    LatentKvWrite,
    LayerNorm,
    Linear,
    Operator,
    Quantize,
    RmsNorm,
    RopeKvWrite,
    Sample,
    SelectedAttention,
)  # fmt: skip
from mlc_amd.schedules.operators.attention import PAGE, SLOTS, Rope
from mlc_amd.schedules.operators.layouts import output_rows, padded
from mlc_amd.schedules.operators.recurrent import Mixer
from mlc_amd.schedules.runs import COLUMNS

if TYPE_CHECKING:
    from mlc_amd.compiler.codegen.target import Target


OPS: Any = relax.op  # TVM declares their arguments as expressions only
ONES = "ones."  # prefix of the names of vectors of ones, before their length
TEMPERATURES = "temperatures"  # name of the table of TemperatureConfig's factors
BLOCK = 32  # columns: kernels of norms need a multiple of it


@dataclass
class Graph:
    """A function under construction, for sequences of up to `ctx` tokens."""

    model: Model
    target: "Target"  # determines layouts: planes(format, n, k), kv_types(config, ctx)
    spec: FunctionSpec
    ctx: int
    bb: relax.BlockBuilder
    parameters: dict[str, tuple] = field(default_factory=dict)  # {name: (Var, kind)}
    terms: set[relax.Var] = field(default_factory=set)  # terms of sums over the GPUs that share the model
    row_tables: dict[str, relax.Var] = field(default_factory=dict)  # see images.place
    hidden: dict[int, relax.Var] = field(default_factory=dict)  # {layer: its input}
    drafted: relax.Var | None = None  # see transformer.predictor
    input: relax.Var | None = None  # the rows before the first layer
    checkpoints: list[relax.Var] = field(default_factory=list)  # see CheckpointConfig
    chosen: relax.Var | None = None  # the keys chosen by the last layer with an indexer (indexers.selected)

    def __post_init__(self):
        config = self.model.config
        self.config: ModelConfig = config.of_draft if self.spec.drafts else config
        self.m = self.spec.m
        self.state = self.parameter("state", "io", tensor_type((4,), "int32"))
        self.tokens = self.parameter("tokens", "io", tensor_type((self.m,), "int32"))
        self.rows = self.parameter("rows", "io", tensor_type((self.m, 2), "int32"))
        for name, (shape, dtype) in self.target.kv_types(self.config, self.ctx).items():
            self.parameter(name, "kv", tensor_type(shape, dtype))
        for name, columns in table_columns(self.config).items():
            self.parameter(name, "weight", tensor_type((self.ctx, columns)))

    def parameter(self, name: str, kind: str, ty) -> relax.Var:
        if name not in self.parameters:
            self.parameters[name] = (relax.Var(name, ty), kind)
        return self.parameters[name][0]

    def has(self, name: str) -> bool:
        return name in self.model.tensors

    def vector(self, name: str, exact: bool = False) -> relax.Var:
        """A float32 vector of a norm or a bias; those of experts are concatenated. The artifact pads it to a multiple
        of 16; exact: the variable's type has no padding."""
        size = math.prod(self.model.tensors[name].shape)
        return self.parameter(name, "weight", tensor_type((size if exact else padded(size),)))

    def ones(self, size: int) -> relax.Var:
        """A vector of ones, as `vector` returns it."""
        return self.parameter(f"{ONES}{size}", "weight", tensor_type((padded(size),)))

    def weight(self, name: str) -> relax.Var:
        tensor = self.model.tensors[name]
        planes = self.target.planes(tensor.format, tensor.rows, tensor.shape[-1])
        types = [tensor_type(shape, dtype) for shape, dtype in planes.values()]
        return self.parameter(name, "weight", relax.TupleType(types))

    def emit(self, op: Operator, args) -> relax.Var:
        return self.bb.emit(ops.call(op, [self.state, *(exchanges.whole(self, arg) for arg in args)]))

    # ---- operators of decoders

    def embed(self, name: str, scale: float = 1.0, features: relax.Var | None = None) -> relax.Var:
        """The embedding's rows. features: rows for negative tokens, which otherwise get the row of token 0."""
        tensor = self.model.tensors[name]
        vocab, k = tensor.shape
        given = [] if features is None else [features]
        kind = {"features": self.model.features, "of": dtype_of(features)} if given else {}
        op = Embed(fmt=tensor.format, vocab=vocab, k=k, m=self.m, scale=float(scale), **kind)
        return self.emit(op, [self.tokens, *given, self.weight(name)])

    def norm(self, x, name: str, rows: str = "all", eps: float = 0.0) -> relax.Var:
        """A norm of the model's kind, with a bias if the file has one. name: of the weight, without ".weight". eps: of
        an RMS norm, 0 for the model's."""
        bias = name + ".bias" if self.has(name + ".bias") else ""
        if self.config.norm == "rms":
            weight = name + ".weight" if self.has(name + ".weight") else name
            y = self.rms_norm(x, weight if self.config.norm_weights else "", rows, eps)
            return self.add(y, self.vector(bias, exact=True)) if bias else y
        m, k = shape_of(x)
        op = LayerNorm(k=k, m=m, eps=self.config.norm_eps, bias=bool(bias), rows=rows, layout="")
        weight = self.vector(name + ".weight") if self.config.norm_weights else self.ones(k)
        return self.emit(op, [x, weight, *([self.vector(bias)] if bias else [])])

    def kept(self, layer: int) -> relax.Var:
        """The inputs of a layer in the decoder's last step; the number of layers: the output of the last one."""
        return self.parameter(f"{HIDDEN}{layer}", "kv", tensor_type((self.m, self.model.config.hidden)))

    def gathered(self, name: str, columns: int) -> relax.Var:
        """For each row, the row of a kept tensor with the number in `sources`."""
        rows = max(spec.m for spec in self.target.functions(self.ctx))
        kept = self.parameter(name, "kv", tensor_type((rows, columns)))
        sources = self.parameter("sources", "io", tensor_type((self.m,), "int32"))

        def gather(sources, kept):
            def element(row, column):
                return kept[te.max(te.min(sources[row], rows - 1), 0), column]

            return te.compute((self.m, columns), element, "gathered")

        return self.bb.emit_te(gather, sources, kept, primfunc_name_hint="gather_rows")

    def joined(self, x, *others) -> relax.Var:
        """The concatenation of the columns of x and of the others."""
        return self.bb.emit(OPS.concat([x, *others], axis=1)) if others else x

    def answers(self, x, *names: str) -> relax.Var:
        """The last norm, which keeps only the rows whose logits the function returns. names: of the weights; with
        several, the columns are divided equally between them."""
        n = shape_of(x)[1] // len(names)
        parts = [self.norm(self.columns(x, i * n, n), name, rows=self.spec.answers) for i, name in enumerate(names)]
        y = self.joined(*parts)
        if output_rows(self.spec.answers, self.m) not in (1, self.m):
            self.state = self.parameter("answers", "io", tensor_type((4,), "int32"))
        return y

    def sample(self, logits) -> tuple[relax.Var, relax.Var]:
        """(a token for each row of logits, its log-probability), by the buffers of runtime/sampling/layout.py."""
        n, columns = shape_of(logits)
        shapes = row_shapes(n, columns)
        buffers = [self.parameter(name, "io", tensor_type(shape, "int32")) for name, shape in shapes.items()]
        found = self.emit(Sample(vocab=self.config.vocab, columns=columns, m=n), [logits, *buffers])
        ids, probabilities = (self.bb.emit(relax.TupleGetItem(found, i)) for i in range(2))
        return ids, probabilities

    def rms_norm(self, x, name: str, rows: str = "all", eps: float = 0.0) -> relax.Var:
        """An RMS norm. name: of the weight, "" for none."""
        m, k = shape_of(x)
        if k % BLOCK and rows == "all":
            return self.grouped_rms_norm(x, name, 1, k)
        op = RmsNorm(k=k, m=m, eps=eps or self.config.norm_eps, rows=rows, layout="")
        return self.emit(op, [x, self.vector(name) if name else self.ones(k)])

    def linear(self, x, name: str, exact: bool = False, scaled_bias: bool = False) -> relax.Var:
        """x W^T, times the weight's scale and plus its bias, if the file has them. exact: for routers, which have no
        scale: x stays float32 if the weight's format allows it. scaled_bias: whether the bias is scaled, too."""
        tensor, base = self.model.tensors[name], name.removesuffix("weight")
        biases = [self.vector(base + "bias", exact=True)] if self.has(base + "bias") else []
        scaled = self.has(base + SCALE) and not exact
        apart = biases if scaled and not scaled_bias else []
        within = [] if apart else biases
        m, k = shape_of(x)
        op = Linear(
            segments=((tensor.format, tensor.rows),), k=k, m=m, layout="", biases=(bool(within),),
            exact=exact and FORMATS[tensor.format].kind == "float",
        )  # fmt: skip
        y = self.emit(op, [x, self.weight(name), *within])
        if scaled:
            y = self.bb.emit(OPS.multiply(y, self.number(base + SCALE)))
        for _ in apart:
            y = self.bb.emit(OPS.add(y, self.vector(base + "bias")))
        return exchanges.term(self, y, name)

    def head_linear(self, x, name: str) -> relax.Var:
        """x W^T with a matrix for each head, from a stack: x [m, heads * k] to [m, heads * n]."""
        tensor, m = self.model.tensors[name], shape_of(x)[0]
        heads, n, k = tensor.shape
        op = HeadLinear(fmt=tensor.format, heads=heads, n=n, k=k, m=m, layout="")
        return self.emit(op, [x, self.weight(name)])

    def activation(self, x, name: str) -> relax.Var:
        return self.bb.emit(ACTIVATIONS[name](x))

    def multiply(self, x, y) -> relax.Var:
        return self.bb.emit(relax.op.multiply(*(exchanges.whole(self, one) for one in (x, y))))

    def add(self, x, y) -> relax.Var:
        return exchanges.add(self, x, y)

    def scaled(self, x, factor: float) -> relax.Var:
        return self.multiply(x, relax.const(factor, "float32"))

    def softcap(self, x, cap: float) -> relax.Var:
        """cap * tanh(x / cap)."""
        return self.scaled(self.bb.emit(relax.op.tanh(self.scaled(x, 1 / cap))), cap)

    def gate(self, x, z, size: int, silu: bool = False, norm: str = "") -> relax.Var:
        """y * sigmoid(z), or y * silu(z). y is x, or if `norm` names a weight, its RMS norm over each `size` columns. z
        may have additional columns of padding."""
        m, k = shape_of(x)
        g, z = [self.vector(norm)] if norm else [], self.columns(z, 0, k)
        op = Gate(k=k, m=m, size=size, eps=self.config.norm_eps if norm else None, silu=silu, layout="")
        return self.emit(op, [x, z, *g])

    def columns(self, x, first: int, count: int) -> relax.Var:
        """Columns first .. first+count-1 of x."""
        if first == 0 and count == shape_of(x)[1]:
            return x
        return self.bb.emit(OPS.strided_slice(x, [1], [first], [first + count]))

    def number(self, name: str) -> relax.Var:
        """A tensor of one number, float32 [1]."""
        return self.bb.emit(OPS.strided_slice(self.vector(name), [0], [0], [1]))

    def grouped_rms_norm(self, x, name: str, groups: int, size: int) -> relax.Var:
        """RMS norm of each of `groups` parts of a row, of `size` columns, all with the same weight."""
        parts = self.bb.emit(OPS.reshape(x, (self.m, groups, size)))
        normed = self.bb.emit(OPS.nn.rms_norm(parts, self.vector(name), -1, self.config.norm_eps))
        return self.bb.emit(OPS.reshape(normed, (self.m, groups * size)))

    def group_norm(self, x, name: str, groups: int, eps: float) -> relax.Var:
        """RMS norm of each of `groups` equal parts of a row, each with weights of its own."""
        m, columns = shape_of(x)
        if groups == 1 and columns % BLOCK == 0:
            return self.emit(RmsNorm(k=columns, m=m, eps=eps, rows="all", layout=""), [x, self.vector(name)])
        size = columns // groups
        parts = self.bb.emit(OPS.reshape(x, (m, groups, size)))
        normed = self.bb.emit(OPS.nn.rms_norm(parts, self.ones(size), -1, eps))
        return self.multiply(self.bb.emit(OPS.reshape(normed, (m, columns))), self.vector(name, exact=True))

    def times_sigmoid(self, x, logit) -> relax.Var:
        """Each row of x times sigmoid(column 0 of the row of logit)."""
        factor = self.bb.emit(relax.op.sigmoid(self.columns(logit, 0, 1)))
        return exchanges.terms_of(self, self.bb.emit(relax.op.multiply(x, factor)), x)

    def scaled_by_position(self, x, table: str) -> relax.Var:
        """Each row of x times the entry for its position in a table, float32 [ctx, 1]."""

        def times_factor(rows, x, factors):
            def element(row, column):
                position = te.max(te.min(rows[row, 0], factors.shape[0] - 1), 0)
                return x[row, column] * factors[position, 0]

            return te.compute(x.shape, element, "scaled_by_position")

        arguments = self.rows, x, self.parameters[table][0]
        return self.bb.emit_te(times_factor, *arguments, primfunc_name_hint="scale_by_position")

    def attention(self, q, k, v, layer: int, ids=None) -> relax.Var:
        """Head norms, RoPE, cache write and causal attention, as in the layer's AttentionConfig. ids: the chosen
        blocks, from `indexers.selected_blocks`; None for all keys."""
        if self.config.encoder:
            return packed.attention(self, q, k, v, layer)
        a = self.config.layers[layer].attention
        assert a, "a layer with attention"
        if a.temperature and self.ctx + a.temperature.offset > a.temperature.length:
            q = self.scaled_by_position(q, TEMPERATURES)
        q, cache = self._rotated(a, q, k, v, layer)
        if ids is not None:
            choice = index_keys.operator(a, self.ctx, self.m)
            op = SelectedAttention(
                layer=self.target.layer(a, self.ctx), used=choice.used, m=self.m, block=choice.block, sets=choice.sets,
                tail=not choice.by_head,
            )  # fmt: skip
            return self.emit(op, [self.rows, self.pages(0), q, ids, *cache, *self._sinks(a, layer)])
        return self._attended(a, q, cache, self._sinks(a, layer))

    def _sinks(self, a: AttentionConfig, layer: int) -> list[relax.Var]:
        return [self.vector(f"blk.{layer}.attn_sinks.weight", exact=True)] if a.sinks else []

    def write_keys(self, k, v, layer: int) -> list[relax.Var]:
        """Writes keys and values of a layer to its cache, as `attention` does. Returns the cache."""
        a = self.config.layers[layer].attention
        assert a, "a layer with attention"
        return self._rotated(replace(a, heads=a.kv_heads), k, k, v, layer)[1]

    def _rotated(self, a: AttentionConfig, q, k, v, layer: int) -> tuple[relax.Var, list[relax.Var]]:
        """(rotated queries, the cache with the keys and values of the rows)."""
        rope, block = self.config.ropes.get(a.rope), f"blk.{layer}."
        table = [self.row_tables.get(a.rope, self.parameters[f"{a.rope}.table"][0])] if rope else []
        layer_of = self.target.layer(a, self.ctx)
        writes = a.kv_layer is None
        norms = [self.head_norm(block, which, a) for which in ("qk" if writes else "q")] if a.head_norms else []
        cache = [self.parameters[f"{which}.{layer if writes else a.kv_layer}"][0] for which in layer_of.cache]
        sources = [self.rows, q, *norms, *table]
        if writes:
            sources = [self.rows, self.pages(layer_of.span), q, k, v, *norms, *table, *cache]
        rotation = Rope(
            neox=bool(rope and rope.neox), rotary=rope.dim if rope else 0,
            eps=self.config.norm_eps if a.head_norms else None, norm_after=a.norm_after_rope,
            value_norm=a.value_norm and writes, writes=writes,
            by_row=a.rope in self.row_tables,
        )  # fmt: skip
        op = RopeKvWrite(layer=layer_of, rope=rotation, m=self.m, query_dtype=self.target.query_dtype)
        rotated = self.emit(op, sources)
        # Another layer's cache is written already: this layer's input depends on that layer's output.
        if writes:
            q, *cache = (self.bb.emit(relax.TupleGetItem(rotated, i)) for i in range(1 + len(cache)))
            return q, cache
        return rotated, cache

    def latent_attention(self, latent, rotating, key, layer: int, ids=None) -> relax.Var:
        """Norm of the latent, RoPE, cache write and causal attention of a layer with a LatentConfig. latent: the
        queries' columns for the latent. rotating: their columns to rotate. key: the latent before its norm, and the
        columns to rotate. (Without RoPE these are not rotated.) ids: the chosen keys of rows, None for all."""
        a = self.config.layers[layer].attention
        assert a, "a layer with attention"
        rope, layer_of = self.config.ropes.get(a.rope), self.target.layer(a, self.ctx)
        table = [self.parameters[f"{a.rope}.table"][0]] if rope else []
        cache = [self.parameters[f"{which}.{layer}"][0] for which in layer_of.cache]
        pages, norm = self.pages(layer_of.span), self.vector(f"blk.{layer}.attn_kv_a_norm.weight")
        sources = [self.rows, pages, rotating, latent, key, norm, *table, *cache]
        rotation = Rope(neox=bool(rope and rope.neox), rotary=rope.dim if rope else 0, eps=self.config.norm_eps)
        op = LatentKvWrite(layer=layer_of, rope=rotation, m=self.m, query_dtype=self.target.query_dtype)
        written = self.emit(op, sources)
        q, *cache = (self.bb.emit(relax.TupleGetItem(written, i)) for i in range(1 + len(cache)))
        sinks = self._sinks(a, layer)
        if ids is not None:
            op = SelectedAttention(layer=layer_of, used=shape_of(ids)[1], m=self.m)
            return self.emit(op, [self.rows, pages, q, ids, *cache, *sinks])
        return self._attended(a, q, cache, sinks)

    def _attended(self, a: AttentionConfig, q, cache, sinks) -> relax.Var:
        """Attention of rotated queries with the cache, which must have the rows' own keys."""
        source = a if a.kv_layer is None else self.config.layers[a.kv_layer].attention
        assert source, "a layer with attention"
        pages = self.pages(self.target.layer(source, self.ctx).span)
        workspace = self.target.attention_workspace(a, self.ctx, self.spec.single)
        buffers = [self.parameter(name, "kv", tensor_type(*of)) for name, of in workspace.items()]
        inputs = [self.rows, pages, q, *cache, *sinks, *buffers]
        seen = a.images and (self.model.features > 0 or self.spec.drafts) and self.m > self.spec.single
        layer = replace(self.target.layer(a, self.ctx), images=seen)
        op = CausalAttention(layer=layer, m=self.m, single=self.spec.single, layout="")
        found = self.emit(op, inputs)
        if not layer.rotation:
            return found
        back = Quantize(m=self.m, k=layer.heads * layer.value_d, layout="", rotation=layer.rotation)
        return self.emit(back, [found])

    def pages(self, span: int) -> relax.Var:
        """The page tables of the layers whose rows attend to up to `span` keys (0: all)."""
        return self.parameter(page_table(span), "io", tensor_type((SLOTS, self.ctx // PAGE), "int32"))

    def head_norm(self, block: str, which: str, a: AttentionConfig) -> relax.Var:
        """The weight of the norm over a head of q or k (which); ones for a norm without weights."""
        if a.norm_weights:
            return self.vector(f"{block}attn_{which}_norm.weight")
        return self.ones(a.head_dim)

    # ---- mixers that keep a state

    def run(self, op: Mixer, x: list, layer: int, state: str) -> relax.Var:
        """An operator over the rows of each sequence that changes the layer's state `state` in place."""
        kept = self.parameters[f"{state}.{layer}"][0]
        return self.bb.emit(relax.TupleGetItem(self.emit(op, [self.rows, self.cells, *x, kept]), 0))

    @property
    def cells(self) -> relax.Var:
        """The cells of each slot: from which its state is read, and to which it is written."""
        return self.parameter(page_table(STATE), "io", tensor_type((SLOTS, COLUMNS), "int32"))


def table_columns(config: ModelConfig) -> dict[str, int]:
    """{name: columns} of the tables with a row for each position: RoPE's angles and attention's temperatures."""
    tables = {f"{name}.table": rope.dim for name, rope in config.ropes.items()}
    return tables | ({TEMPERATURES: 1} if any(a.temperature for a in attentions(config)) else {})
