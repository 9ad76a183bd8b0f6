"""The configurations of mixers that keep a state of fixed size for each sequence, instead of keys and values.

states(hidden): {name: shape} of the states, float32. width(hidden): columns of the widest intermediate tensor. hidden:
columns of the residual stream.
"""

from dataclasses import dataclass

from mlc_amd.compiler.models.compressed.config import CompressedConfig

Shape = tuple[int, ...]
NORMS = {"weight": ".weight", "short": ""}  # MambaConfig.norms: the end of the names of norms' weights


@dataclass(frozen=True)
class ShortConvConfig:
    """A gated short convolution (LFM2): [B, C, X] = in_proj h; y_p = C_p * sum over t of W_t (B * X)_{p-t}; result
    out_proj y. W has `taps` numbers for each column."""

    taps: int  # number of positions that a row reads, with its own

    def states(self, hidden: int) -> dict[str, Shape]:
        return {"conv": (self.taps - 1, hidden)}

    def width(self, hidden: int) -> int:
        return 3 * hidden


NGRAMS = "per_layer_token_embd.weight"  # name of NgramConfig's table
NGRAM_NORMS = "key", "query", "conv"  # ple_norm_<name>
# Products with multipliers are computed in int32, as LIMBS limbs of BITS bits.
BITS, LIMBS = 6, 11
LAGS = 32  # columns of the state with the last tokens, of which as many are used as needed


@dataclass(frozen=True)
class NgramConfig:
    """Embeddings of the last tokens, which are added to the residual streams X_i (residuals/config.py) before a layer.

    For each n from 2 to `size` and each of `heads` there is a row of a table, with the number offset + (xor over j < n
    of multiplier_j * token_{p-j}) % size of that head. Tokens at or before a token `end` (other than the row's own)
    count as `end`, and so do positions before the sequence. E is the concatenation of all these rows.

        s_i = norm_key(ple_key E)_i . norm_query(X)_i / sqrt(hidden)         g_i = sigmoid(sign(s_i) sqrt(|s_i|))
        V_i = g_i * ple_value E                         X_i += V_i + silu(conv(norm_conv(V)))_i

    conv has `taps` numbers for each column, for every `size`th position. The norms are RMS norms of each stream.
    """

    size: int
    heads: int
    dim: int  # columns of the table
    rows: int  # rows of the table
    taps: int
    streams: int
    end: int
    image: int  # token that stands for the rows of an image
    multipliers: tuple[int, ...]
    offsets: tuple[int, ...]  # one for each n and head
    sizes: tuple[int, ...]

    @property
    def reach(self) -> int:
        """The number of positions that conv reads."""
        return (self.taps - 1) * self.size + 1

    def states(self, hidden: int) -> dict[str, Shape]:
        return {"ngram": (self.size - 1, LAGS), "ngram_conv": (self.reach - 1, self.streams * hidden)}


@dataclass(frozen=True)
class DeltaNetConfig:
    """A gated delta net (Qwen3-Next, Qwen3.5). qkv = silu(conv(attn_qkv h)) has heads of q and k, each divided by its
    length, and heads of v. Each value head has a matrix M; per row

        M *= exp(ssm_a * softplus(ssm_alpha h + ssm_dt)); M += k d^T, d = sigmoid(ssm_beta h) * (v - M^T k); y = M^T q

    with q divided by sqrt(head_dim). The result is ssm_out (norm(y) * silu(attn_gate h)), with a norm over each head.
    """

    key_heads: int  # heads of q and of k
    value_heads: int  # a multiple of key_heads
    head_dim: int  # columns of a head of q, k and v
    taps: int  # of the convolution
    grouped: bool = False  # the value heads of a key head are consecutive; False: key head = value head % key_heads
    merged_inputs: bool = False  # ssm_in has, for each key head, the rows of q, k, v and of attn_gate
    sigmoid: bool = False  # the gate's function is sigmoid instead of silu
    ngrams: NgramConfig | None = None
    merged_gates: bool = False  # ssm_ba has, for each key head, the rows of ssm_beta, then those of ssm_alpha

    @property
    def keys(self) -> int:
        """The columns of all heads of k."""
        return self.key_heads * self.head_dim

    @property
    def values(self) -> int:
        """The columns of all heads of v."""
        return self.value_heads * self.head_dim

    @property
    def channels(self) -> int:
        """The columns of the convolution."""
        return 2 * self.keys + self.values

    def states(self, hidden: int) -> dict[str, Shape]:
        states = {"conv": (self.taps - 1, self.channels), "delta": (self.value_heads, self.head_dim, self.head_dim)}
        return states | (self.ngrams.states(hidden) if self.ngrams else {})

    def width(self, hidden: int) -> int:
        return self.channels + 2 * self.values  # of the projections


@dataclass(frozen=True)
class ChannelDeltaConfig:
    """A gated delta net whose states decay by channel (Kimi Linear). q = silu(conv(attn_q h)), and k and v likewise;
    each head of q and k is divided by its length. Each head has a matrix M; for each row

        M *= exp(ssm_a * softplus(ssm_f_b ssm_f_a h + ssm_dt)), one number for each row of M
        M += k d^T, d = sigmoid(ssm_beta h) * (v - M^T k); y = M^T q

    with q divided by sqrt(head_dim). The result is attn_output (norm(y) * sigmoid(ssm_g_b ssm_g_a h)), with a norm over
    each head. With a bound, M *= exp(bound * sigmoid(sign * ssm_a * (ssm_f_b ssm_f_a h + ssm_dt))).
    """

    heads: int
    head_dim: int  # columns of a head of q, k and v, and between ssm_f_a and ssm_f_b, ssm_g_a and ssm_g_b
    taps: int  # of the convolutions
    bound: float = 0.0  # lower limit of the exponent of decays, negative; 0: no limit
    sign: float = 1.0  # -1: ssm_a is negative, and has one dimension
    decays: tuple[str, ...] = ("ssm_f_a", "ssm_f_b")  # the one or two matrices that compute decays from h
    gates: tuple[str, ...] = ("ssm_g_a", "ssm_g_b")

    @property
    def columns(self) -> int:
        """The columns of all heads of q; k and v have as many."""
        return self.heads * self.head_dim

    def states(self, hidden: int) -> dict[str, Shape]:
        return {"conv": (self.taps - 1, 3 * self.columns), "delta": (self.heads, self.head_dim, self.head_dim)}

    def width(self, hidden: int) -> int:
        return 8 * self.columns  # q, k and v, their convolution, decays and gates


@dataclass(frozen=True)
class Mamba2Config:
    """A selective state space (Mamba-2). [z, u, t] = ssm_in h, [x, B, C] = silu(conv(u)). Each head has some columns of
    x, and a matrix S [these columns, state]; per row, with dt = softplus(t + ssm_dt),

        S *= exp(ssm_a * dt); S += dt * x B^T; y = S C + ssm_d * x

    and the result is ssm_out norm(y * silu(z)), with a norm over each group of columns. The heads of a group share B
    and C.
    """

    inner: int  # columns of x, of all heads
    state: int  # columns of B and of C, of a group
    heads: int  # divides inner
    groups: int  # divides heads
    taps: int  # of the convolution
    norm_eps: float = 0.0  # epsilon of the norm; 0: no norm

    @property
    def head_dim(self) -> int:
        """Columns of x of a head."""
        return self.inner // self.heads

    @property
    def channels(self) -> int:
        """Columns of the convolution."""
        return self.inner + 2 * self.groups * self.state

    def states(self, hidden: int) -> dict[str, Shape]:
        return {"conv": (self.taps - 1, self.channels), "ssm": (self.heads, self.head_dim * self.state)}

    def width(self, hidden: int) -> int:
        return self.inner + 2 * self.channels  # of the projection, and of the convolution


@dataclass(frozen=True)
class MambaConfig:
    """A selective state space whose steps, B and C are computed from x (Mamba-1, PLaMo 2). [x, z] = ssm_in h, x =
    silu(conv(x)), [t, B, C] = ssm_x x, each with a norm in some models; for each row, with dt = softplus(ssm_dt t),

        S *= exp(ssm_a * dt); S += dt * x B^T; y = S C + ssm_d * x

    and ssm_out (y * silu(z)). Each column of x has a dt and an ssm_d, and for each column of B an ssm_a. With `heads`,
    the columns of a head share these; ssm_in then has for each head the rows of z, then those of x, and ssm_x has the
    rows of B, C, then t.
    """

    inner: int  # columns of x
    state: int  # columns of B and of C
    rank: int  # columns of t
    taps: int  # of the convolution
    heads: int = 0  # 0: columns have no heads
    norms: str = ""  # norms of t, B and C: a key of NORMS (ends of their names); "bare": without weights; "": none

    def states(self, hidden: int) -> dict[str, Shape]:
        of = self.heads or 1
        return {"conv": (self.taps - 1, self.inner), "ssm": (of, self.inner // of * self.state)}

    def width(self, hidden: int) -> int:
        return 5 * self.inner + 2 * self.state


@dataclass(frozen=True)
class LinearAttentionConfig:
    """Attention without softmax, whose states decay (MiniMax 01). attn_qkv has, for each head, the rows of q, k and v;
    SiLU is applied to all of them. Each head has a matrix S; for each row

        S *= exp(-slope); S += v k^T; y = S q         slope = factor * start**(head + 1), start = 2**(-8 / heads)

    and the result is attn_output (norm(y) * sigmoid(attn_gate h)), with the norm attn_norm_2 over all columns.
    """

    heads: int
    head_dim: int
    factor: float  # depends on the layer

    @property
    def columns(self) -> int:
        return self.heads * self.head_dim

    def states(self, hidden: int) -> dict[str, Shape]:
        return {"ssm": (self.heads, self.head_dim * self.head_dim)}

    def width(self, hidden: int) -> int:
        return 5 * self.columns


Recurrent = (
    ShortConvConfig | DeltaNetConfig | ChannelDeltaConfig | Mamba2Config | MambaConfig | LinearAttentionConfig
    | CompressedConfig
)  # fmt: skip
