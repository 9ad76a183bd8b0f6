"""Emits one Relax function of a decoder, op by op, and remembers what each parameter is.

A model file calls the methods below in the order of its formula; nothing here knows an architecture. `parameters` says
for each function parameter where the runtime finds it: ("io", "tokens"), ("weight", "output_norm.weight"), ("kv",
"k.0").
"""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tvm import relax

from mlc_amd.compiler import ops
from mlc_amd.compiler.models.config import ModelConfig
from mlc_amd.compiler.ops import shape_of, tensor_type

if TYPE_CHECKING:
    from mlc_amd.compiler.codegen.target import Target
    from mlc_amd.compiler.gguf import GGUFModel

ACTIVATIONS = {"silu": relax.op.nn.silu, "gelu": relax.op.nn.gelu_tanh}  # of FeedForwardConfig.act


@dataclass
class Graph:
    """One function under construction: `m` tokens a call, KV capacity `ctx`, logits of the last live token or of
    all."""

    model: "GGUFModel"  # GGUFModel: config and tensors
    target: "Target"  # layouts: planes(format, n, k), kv_types(config, ctx)
    m: int
    ctx: int
    all_logits: bool
    bb: relax.BlockBuilder
    parameters: dict[str, tuple] = field(default_factory=dict)  # name: (Var, kind)

    def __post_init__(self):
        self.config: ModelConfig = self.model.config
        self.state = self.parameter("state", "io", tensor_type((4,), "int32"))
        self.tokens = self.parameter("tokens", "io", tensor_type((self.m,), "int32"))
        for name, (shape, dtype) in self.target.kv_types(self.config, self.ctx).items():
            self.parameter(name, "kv", tensor_type(shape, dtype))
        for name, rope in self.config.ropes.items():
            self.parameter(f"{name}.table", "weight", tensor_type((self.ctx, rope.dim)))

    def parameter(self, name: str, kind: str, ty) -> relax.Var:
        if name not in self.parameters:
            self.parameters[name] = (relax.Var(name, ty), kind)
        return self.parameters[name][0]

    def has(self, name: str) -> bool:
        return name in self.model.tensors

    def vector(self, name: str) -> relax.Var:
        """A norm's or a bias' float32 vector; a bias is padded like the linear's rows."""
        (n,) = self.model.tensors[name].shape
        return self.parameter(name, "weight", tensor_type((ops.padded(n),)))

    def weight(self, name: str) -> relax.Var:
        tensor = self.model.tensors[name]
        planes = self.target.planes(tensor.format, *tensor.shape)
        types = [tensor_type(shape, dtype) for shape, dtype in planes.values()]
        return self.parameter(name, "weight", relax.TupleType(types))

    def emit(self, name: str, args, **attrs) -> relax.Var:
        return self.bb.emit(ops.call(name, [self.state, *args], **attrs))

    # ---- the decoder's vocabulary

    def embed(self, name: str, scale: float = 1.0) -> relax.Var:
        tensor = self.model.tensors[name]
        vocab, k = tensor.shape
        return self.emit(
            "embed", [self.tokens, self.weight(name)], format=tensor.format, vocab=vocab, k=k, scale=float(scale)
        )

    def rms_norm(self, x, name: str, rows: str = "all") -> relax.Var:
        return self.emit("rms_norm", [x, self.vector(name)], eps=self.config.norm_eps, rows=rows, layout="")

    def linear(self, x, name: str) -> relax.Var:
        """x W^T, plus the bias that stands beside the weight if the file has one."""
        tensor, bias = self.model.tensors[name], name.removesuffix("weight") + "bias"
        biases = [self.vector(bias)] if self.has(bias) else []
        m, k = shape_of(x)
        return self.emit(
            "linear", [x, self.weight(name), *biases],
            formats=[tensor.format], n=[tensor.shape[0]], biases=[len(biases)], residual=0, k=k, m=m, layout="",
        )  # fmt: skip

    def activation(self, x, name: str) -> relax.Var:
        return self.bb.emit(ACTIVATIONS[name](x))

    def multiply(self, x, y) -> relax.Var:
        return self.bb.emit(relax.op.multiply(x, y))

    def add(self, x, y) -> relax.Var:
        return self.bb.emit(relax.op.add(x, y))

    def softcap(self, x, cap: float) -> relax.Var:
        """cap * tanh(x / cap)."""
        scaled = self.bb.emit(relax.op.multiply(x, relax.const(1 / cap, "float32")))
        return self.bb.emit(relax.op.multiply(self.bb.emit(relax.op.tanh(scaled)), relax.const(cap, "float32")))

    def attention(self, q, k, v, layer: int) -> relax.Var:
        """Head norms, RoPE, KV write and causal attention, as the layer's AttentionConfig describes them."""
        a, block = self.config.layers[layer].attention, f"blk.{layer}."
        rope = self.config.ropes.get(a.rope)
        table = [self.parameters[f"{a.rope}.table"][0]] if rope else []
        shape = {
            "heads": a.heads, "kv_heads": a.kv_heads, "d": a.head_dim, "ctx": self.ctx,
            "scale": a.scale, "window": a.window, "softcap": a.softcap, "sinks": int(a.sinks),
        }  # fmt: skip
        norms = [self.vector(f"{block}attn_{which}_norm.weight") for which in "qk"] if a.head_norms else []
        cache = [self.parameters[f"{which}.{layer}"][0] for which in "kv"]
        written = self.emit(
            "rope_kv_write", [q, k, v, *norms, *table, *cache], **shape,
            neox=int(rope.neox) if rope else 0, rotary=rope.dim if rope else 0, head_norm=int(a.head_norms),
            eps=self.config.norm_eps, query_dtype=self.target.query_dtype,
        )  # fmt: skip
        q, keys, values = (self.bb.emit(relax.TupleGetItem(written, i)) for i in range(3))
        sinks = [self.vector(f"{block}attn_sinks.weight")] if a.sinks else []
        workspace = self.target.attention_workspace(a, self.ctx) if self.m == 1 else {}
        buffers = [self.parameter(name, "kv", tensor_type(*of)) for name, of in workspace.items()]
        return self.emit("attention", [q, keys, values, *sinks, *buffers], **shape, layout="")
