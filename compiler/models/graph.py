"""Emits one Relax function of a decoder, op by op, and remembers what each parameter is.

A model file (llama.py, qwen2.py ..) calls the methods below in the order of its formula; nothing here knows an
architecture. `parameters` says for each function parameter where the runtime finds it: ("io", "tokens"), ("weight",
"output_norm.weight"), ("kv", "k.0").
"""

from dataclasses import dataclass, field

from tvm import relax

from mlc_amd.compiler import ops
from mlc_amd.compiler.ops import shape_of, tensor_type


@dataclass
class Graph:
    """One function under construction: `m` tokens a call, KV capacity `ctx`, logits of the last live token or of
    all."""

    model: object  # GGUFModel: config and tensors
    target: object  # layouts: planes(format, n, k), kv_types(config, ctx)
    m: int
    ctx: int
    all_logits: bool
    bb: relax.BlockBuilder
    parameters: dict[str, tuple] = field(default_factory=dict)  # name: (Var, kind)

    def __post_init__(self):
        self.config = self.model.config
        self.state = self.parameter("state", "io", tensor_type((4,), "int32"))
        self.tokens = self.parameter("tokens", "io", tensor_type((self.m,), "int32"))
        for name, (shape, dtype) in self.target.kv_types(self.config, self.ctx).items():
            self.parameter(name, "kv", tensor_type(shape, dtype))
        self.workspace = self.target.attention_workspace(self.config, self.ctx) if self.m == 1 else {}
        self.rope_table = self.parameter("rope.table", "weight", tensor_type((self.ctx, self.config.rope.dim)))

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
        return self.parameter(
            name, "weight", relax.TupleType([tensor_type(shape, dtype) for shape, dtype in planes.values()])
        )

    def emit(self, name: str, args, **attrs) -> relax.Var:
        return self.bb.emit(ops.call(name, [self.state, *args], **attrs))

    # ---- the decoder's vocabulary

    def embed(self, name: str) -> relax.Var:
        tensor = self.model.tensors[name]
        return self.emit(
            "embed", [self.tokens, self.weight(name)], format=tensor.format, vocab=tensor.shape[0], k=tensor.shape[1]
        )

    def rms_norm(self, x, name: str, row: str = "all") -> relax.Var:
        return self.emit("rms_norm", [x, self.vector(name)], eps=self.config.norm_eps, row=row, act="")

    def linear(self, x, name: str) -> relax.Var:
        """x W^T, plus the bias that stands beside the weight if the file has one."""
        tensor, bias = self.model.tensors[name], name.removesuffix("weight") + "bias"
        biases = [self.vector(bias)] if self.has(bias) else []
        m, k = shape_of(x)
        return self.emit(
            "linear", [x, self.weight(name), *biases],
            formats=[tensor.format], n=[tensor.shape[0]], biases=[len(biases)], residual=0, k=k, m=m, act="",
        )  # fmt: skip

    def silu(self, x) -> relax.Var:
        return self.bb.emit(relax.op.nn.silu(x))

    def multiply(self, x, y) -> relax.Var:
        return self.bb.emit(relax.op.multiply(x, y))

    def add(self, x, y) -> relax.Var:
        return self.bb.emit(relax.op.add(x, y))

    def attention(self, q, k, v, layer: int, head_norms: tuple[str, str] | None = None) -> relax.Var:
        """RoPE, KV write and causal attention of one layer; `head_norms` names the weights of an RMS norm over each
        head of q and k."""
        c = self.config
        norms = [self.vector(name) for name in head_norms] if head_norms else []
        cache = [self.parameters[f"{which}.{layer}"][0] for which in "kv"]
        written = self.emit(
            "rope_kv_write", [q, k, v, *norms, self.rope_table, *cache],
            heads=c.heads, kv_heads=c.kv_heads, d=c.head_dim, ctx=self.ctx, neox=int(c.rope.neox), rotary=c.rope.dim,
            head_norm=int(bool(norms)), eps=c.norm_eps, query_dtype=self.target.query_dtype,
        )  # fmt: skip
        q, keys, values = (self.bb.emit(relax.TupleGetItem(written, i)) for i in range(3))
        workspace = [self.parameter(name, "kv", tensor_type(*of)) for name, of in self.workspace.items()]
        return self.emit(
            "attention",
            [q, keys, values, *workspace],
            heads=c.heads,
            kv_heads=c.kv_heads,
            d=c.head_dim,
            ctx=self.ctx,
            act="",
        )
