"""The description of a model: sizes and variants, layer by layer.

An architecture's function makes a `ModelConfig` from the metadata of a GGUF file. Tensors, graphs, caches and RoPE
tables follow from it. `dataclasses.asdict` makes it JSON-serializable, for the artifact's manifest.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from mlc_amd.compiler.models.drafts.config import DraftConfig, PredictorConfig
from mlc_amd.compiler.models.encoders.config import EncoderConfig
from mlc_amd.compiler.models.recurrent_config import Recurrent
from mlc_amd.compiler.models.residuals.config import Streams

BARE = "bare"  # a value of ModelConfig.embedding_norm
POSITION = 8  # columns for a key's position: ALiBi is computed as a part of q . k


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding; `rope.py` turns it into a table of angles."""

    dim: int  # leading columns of a head that are rotated (even, <= head_dim)
    base: float  # theta of pair i is position * base^(-2i/dim)
    neox: bool  # pairs are (i, i + dim/2); False: (2i, 2i + 1), as GGUF permutes llama's Q and K
    scaling: str = "none"  # "none", "linear" or "yarn"
    factor: float = 1.0  # context extension; positions are divided by it (yarn: those of the slow pairs)
    original_context: int = 0  # tokens before extension (yarn)
    attn_factor: float = 1.0  # factor on cos and sin
    ext_factor: float = 0.0  # yarn: weight of the unscaled angle in the fast pairs
    beta_fast: float = 32.0  # yarn: pairs that turn more often than this in original_context keep their angle
    beta_slow: float = 1.0  # yarn: pairs that turn less often than this are divided by factor
    log_multiplier: float = 0.0  # yarn: 1 + 0.1 * log_multiplier * ln(factor) divides cos and sin; 0: does not
    back: bool = False  # rotates in the opposite direction
    factors: str = ""  # tensor [dim/2] that divides the angle of each pair, such as rope_freqs.weight (Llama 3.1)
    offset: int = 0  # added to the position
    long_factors: str = ""  # like `factors`, for caches of more than original_context tokens (longrope)
    sections: tuple[int, ...] = ()  # numbers of pairs that rotate by t, y and x of an image's row (M-RoPE); (): none
    interleaved: bool = False  # pairs of the sections alternate (Qwen3-VL); False: the sections are consecutive

    def components(self, pair):
        """Which of (t, y, x) rotates a pair, as [(its number, condition)]; t if no condition holds. pair: an int or an
        expression. Source: ggml_mrope_cache_init (ggml/src/ggml-cpu/ops.cpp). But pairs in none of the three sections
        rotate by t, as in Qwen3-VL's own code; in ggml they do not rotate."""
        t, y, x, *_ = self.sections
        if self.interleaved:
            return [(1, (pair % 3 == 1) & (pair < 3 * y)), (2, (pair % 3 == 2) & (pair < 3 * x))]
        within = pair % sum(self.sections)
        return [(1, (within >= t) & (within < t + y)), (2, (within >= t + y) & (within < t + y + x))]


@dataclass(frozen=True)
class TemperatureConfig:
    """A factor on the queries at position p: 1 + scale * ln(1 + floor((p + offset) / length))."""

    scale: float
    length: int  # tokens
    offset: int = 0


@dataclass(frozen=True)
class LatentConfig:
    """Multi-head latent attention (DeepSeek V2): keys and values of all heads are compressed to one vector, the latent.

    attn_kv_a_mqa computes `rank` columns, whose norm (attn_kv_a_norm) is the latent c, and the columns of the key that
    rotate; all heads share both. (Without a rope these columns do not rotate.) The key is [c | rotated], the value is
    c. A head with the query columns [q | columns to rotate] has the query [attn_k_b q | rotated]. attn_v_b computes the
    output of the head from attention's result.
    """

    rank: int  # columns of the latent
    nope: int  # columns of a head's query that do not rotate; 0: keys have no columns of the latent
    value: int  # columns of a head's output
    query_rank: int = 0  # columns between attn_q_a and attn_q_b; 0: the file has attn_q instead
    merged: bool = False  # attn_kv_b has, for each head, the rows of attn_k_b transposed, then those of attn_v_b
    key_norm: bool = False  # attn_k_norm: RMS norm of the rotating columns of the key before RoPE


@dataclass(frozen=True)
class IndexerConfig:
    """An indexer chooses the keys that a row attends to, if there are more than `used`
    (`schedules.operators.indexer.SelectKeys`).

    With latent attention: indexer.attn_q_b computes its queries from the result of attn_q_a_norm; indexer.attn_k and
    the layer norm indexer.k_norm compute its keys, which all heads share; indexer.proj computes the weights of heads.
    With other attention it chooses blocks of keys: indexer.q_proj and indexer.k_proj, both with an RMS norm of each
    head before RoPE. by_head: each KV head chooses its own blocks; otherwise the key of a block is the mean of the keys
    of its positions, normalized and rotated as at its first position.
    """

    heads: int
    dim: int  # columns of a key
    used: int
    rope: str  # key of ModelConfig.ropes, for the first columns or the last ones
    last: bool = False
    eps: float = 1e-6  # epsilon of the keys' norm
    block: int = 1  # positions that are chosen together; divides `used`
    by_head: bool = False
    local: int = 0  # blocks directly before a row that are always chosen
    own: bool = True  # False: the layer uses the choice of the last layer with an indexer of its own


@dataclass(frozen=True)
class AttentionConfig:
    """Causal attention with grouped queries; `schedules.operators.attention.Attention` has the formula."""

    heads: int  # query heads
    kv_heads: int  # key and value heads; divides heads
    head_dim: int  # columns of a head (key = value); heads * head_dim need not be the hidden size
    rope: str  # key of ModelConfig.ropes; "": no rotation
    scale: float = 0.0  # of q . k; 0: 1/sqrt(head_dim)
    window: int = 0  # keys that a token attends to, with its own; 0: all
    chunk: int = 0  # a token attends to the keys from the last multiple of chunk on; 0: all
    softcap: float = 0.0  # score becomes softcap * tanh(score / softcap); 0: none
    sinks: bool = False  # attn_sinks.weight: one more logit per query head in the softmax's denominator
    head_norms: bool = False  # attn_q_norm/k_norm: RMS norm over each head of Q and K before RoPE
    norm_after_rope: bool = False  # head_norms follow RoPE
    norm_weights: bool = True  # False: head_norms without weights
    row_norms: bool = False  # attn_q_norm/k_norm: RMS norm over all heads of Q, and over all of K, before RoPE
    value_norm: bool = False  # RMS norm over each head of V, without weights
    kv_layer: int | None = None  # the layer whose keys and values it attends to; None: its own
    merged_qkv: bool = False  # attn_qkv holds the rows of attn_q, attn_k and attn_v, in that order
    value_is_key: bool = False  # no attn_v: values are the projected keys, before norm and RoPE
    temperature: "TemperatureConfig | None" = None
    latent: LatentConfig | None = None  # kv_heads is 1, and head_dim the columns of attention's keys
    indexer: IndexerConfig | None = None
    alibi: float = 0.0  # ALiBi's largest bias; 0: none
    value_dim: int = 0  # columns of a head's value, if fewer than head_dim; 0: head_dim
    clamp: float = 0.0  # q, k and v are limited to -clamp .. clamp; 0: no limit
    own_gate: str = ""  # "sigmoid" or "softplus": the output is multiplied by this function of attn_gate h
    head_gate: bool = False  # attn_gate has one row for each head
    each_norm: str = ""  # "layer" or "rms": norm over each head before RoPE, weights for each head (attn_q_norm/k_norm)
    head_factors: bool = False  # RMS norms over the heads of q and k, without weights; attn_q_norm: a factor on q's
    output_gate: bool = False  # attn_q has each head's rows of Q, then of a gate: the output is times sigmoid(gate)
    images: bool = False  # the rows of an image attend to one another

    @property
    def values(self) -> int:
        """The columns of a head's value and output."""
        return self.value_dim or self.head_dim

    @property
    def columns(self) -> int:
        """The columns of a head's key in the cache; with ALiBi there are additional ones for the position."""
        return self.head_dim + (POSITION if self.alibi else 0)


# A mixer: the part of a layer that combines the rows of a sequence.
Mixer = AttentionConfig | Recurrent


@dataclass(frozen=True)
class FeedForwardConfig:
    """A dense feed-forward block: down(act(gate(x)) * up(x)); without a gate down(act(up(x)))."""

    size: int  # columns between gate/up and down
    act: str = "silu"  # or "gelu" (tanh approximation), "relu_sq": of schedules' activations
    gated: bool = True
    merged: bool = False  # ffn_up holds the rows of gate, then those of up
    divided: bool = False  # the columns before down are divided by ffn.act.scales (AWQ)


@dataclass(frozen=True)
class SharedExpertConfig:
    """A feed-forward block that all rows use, in addition to their experts."""

    size: int
    act: str = "silu"
    gated: bool = True
    gated_output: bool = False  # multiplied by sigmoid(ffn_gate_inp_shexp . x)
    merged: bool = False  # ffn_up_shexp holds the rows of gate, then those of up
    factor: float = 1.0  # on the output
    suffix: str = "_shexp"  # the end of its matrices' names


@dataclass(frozen=True)
class AdjugateConfig:
    """Additional small experts (GroveMoE). Each group of `group` neighbouring experts has one. They read the sum of a
    row's experts: sum += factor * the small experts of the chosen experts, with the weights of the experts of the same
    numbers."""

    count: int
    used: int
    size: int
    group: int
    factor: float


@dataclass(frozen=True)
class ExpertsConfig:
    """A mixture of experts: the sum over a row's `used` experts e of weight_e * down_e(act(gate_e x) * up_e x).

    The router's logits give probabilities by the function `gating` (`schedules.operators.experts.GATINGS`). Experts are
    chosen by probability plus bias; the weights are the probabilities of the chosen experts.
    """

    count: int
    used: int
    size: int  # columns between gate/up and down
    act: str = "silu"  # or "gelu", "swiglu_oai" (gpt-oss), "relu" (see `gated`), "gelu_alone" (of up), or with numbers
    gated: bool = True  # False: there is no gate, and up stands for it: relu(up x) * (up x) is the square of relu(up x)
    latent: int = 0  # columns of the experts' inputs and outputs, by ffn_latent_down and ffn_latent_up; 0: those of x
    latent_name: str = "latent"  # part of the names of these two
    latent_norm: bool = False  # ffn_latent_norm: RMS norm of the experts' sum
    gating: str = "softmax"
    normalize: bool = True  # weights are divided by their sum
    scale: float = 1.0  # factor on the weights, after the division
    groups: int = 1  # groups of experts; a row chooses among the experts of the groups_used best groups
    groups_used: int = 1
    selection_bias: bool = False  # exp_probs_b.bias, added to the probabilities that choose
    bias_name: str = "exp_probs_b.bias"  # its name in some files
    early: bool = False  # the router reads the layer's input, before its norms
    biases: bool = False  # ffn_gate_exps.bias, ffn_up_exps.bias, ffn_down_exps.bias
    merged: bool = False  # ffn_gate_up_exps holds each expert's rows of gate, then those of up
    adjugate: AdjugateConfig | None = None
    weigh_input: bool = False  # the weight multiplies the expert's input instead of its output
    table: int = 0  # rows of EXPERT_TABLE, which has the numbers of each token's experts; 0: the router chooses
    shared: SharedExpertConfig | None = None


Block = FeedForwardConfig | ExpertsConfig


@dataclass(frozen=True)
class Norms:
    """The norms around a block, each given by the name of its weight within the layer, "" for no norm: y = joined(x +
    after(block(before(x)))), then again(x + y) if there is such a norm."""

    before: str = ""
    after: str = ""
    joined: str = ""
    again: str = ""
    bare: str = ""  # the norm of these whose weight's name has no ".weight"
    factor: float = 1.0  # on the block's result
    residual: float = 0.0  # y = joined(residual * before(x) + after(block(before(x)))) instead; 0: as above
    after_eps: float = 0.0  # epsilon of `after`; 0: the model's


@dataclass(frozen=True)
class LayerConfig:
    """A layer: x += mixer(x), then x += feed_forward(x), each with its norms; either may be missing. In a parallel
    layer x += mixer(x) + feed_forward(x)."""

    mixer: Mixer | None
    feed_forward: Block | None
    mixer_norms: Norms = Norms(before="attn_norm")
    feed_forward_norms: Norms = Norms(before="ffn_norm")
    experts: ExpertsConfig | None = None  # experts in addition to the feed-forward block
    experts_norm: str = ""  # norm before these experts, of the layer's input; "": see gemma4.py
    output_scale: bool = False  # layer_output_scale: a factor on x at the layer's end
    skip: bool = False  # x += layer_output_scale * the decoder's input, at the layer's end
    parallel: bool = False  # parallel layer; both use the mixer's norm if the feed-forward block has none before it
    beside: Recurrent | None = None  # a second mixer: x += mixer(h) + beside(h) (falcon-h1)
    predictor: PredictorConfig | None = None  # the layer guesses tokens, and is not a part of the decoder

    @property
    def attention(self) -> AttentionConfig | None:
        return self.mixer if isinstance(self.mixer, AttentionConfig) else None

    @property
    def recurrent(self) -> Recurrent | None:
        """The layer's mixer that keeps a state for each sequence, or None."""
        return self.mixer if isinstance(self.mixer, Recurrent) else self.beside

    @property
    def mixers(self) -> tuple[Mixer, ...]:
        return tuple(mixer for mixer in (self.mixer, self.beside) if mixer)


@dataclass(frozen=True)
class ModelConfig:
    """A decoder: embedding, layers, output norm, logits. If `encoder` is not None, an embedding model."""

    architecture: str  # GGUF's general.architecture
    name: str  # general.name, or ""
    vocab: int  # tokens
    hidden: int  # columns of the residual stream
    context: int  # tokens the model was trained for
    norm_eps: float  # epsilon of the norms
    tied: bool  # no output.weight: logits use token_embd.weight
    layers: tuple[LayerConfig, ...]
    ropes: dict[str, RopeConfig] = field(default_factory=dict)  # by kind of layer
    output_norm: str = "output_norm"  # name of the last norm's weight; "": there is none
    norm: str = "rms"  # or "layer": layer norms, which subtract the mean
    norm_weights: bool = True  # False: norms without weights
    positions: int = 0  # rows of position_embd, which are added to the embedding's; 0: there is none
    embedding_scale: float = 1.0  # factor on the embedding's rows
    embedding_norm: str = ""  # name of the norm of the embedding's rows; BARE: an RMS norm without weights; "": none
    logit_scale: float = 1.0  # factor on the logits
    logit_softcap: float = 0.0  # logits become softcap * tanh(logits / softcap); 0: none
    layer_embedding: int = 0  # columns, for each layer, of a second embedding of each token (gemma4); 0: none
    unused: tuple[str, ...] = ()  # tensors of the file that are not used
    streams: Streams | None = None  # residual streams, instead of x + block(x)
    encoder: EncoderConfig | None = None
    draft: DraftConfig | None = None  # a draft, whose layers follow the model's own

    @property
    def columns(self) -> int:
        """The columns of a row of the results."""
        return self.encoder.features if self.encoder else self.vocab

    @property
    def decoder_layers(self) -> tuple[LayerConfig, ...]:
        """The layers without those that guess tokens, which come last."""
        return self.layers[: self.predictor]

    @property
    def predictor(self) -> int | None:
        """The number of the first layer that guesses tokens, or None."""
        return next((i for i, layer in enumerate(self.layers) if layer.predictor), None)

    @property
    def of_draft(self) -> "ModelConfig":
        """The configuration for the graphs of the draft's functions; the model's own without a draft."""
        d = self.draft
        return replace(self, hidden=d.hidden, norm_eps=d.norm_eps, norm="rms", norm_weights=True) if d else self

    @property
    def drafted(self) -> int:
        """The columns of the rows that a guess reads from the guess before; 0 if guesses are independent."""
        if self.draft:
            return self.draft.drafted
        return 0 if self.predictor is None else self.hidden

    @property
    def kept(self) -> tuple[int, ...]:
        """The numbers of the layers whose inputs steps keep for guesses; the number of layers stands for the output of
        the last one."""
        if self.draft:
            return self.draft.kept
        return () if self.predictor is None else (self.predictor,)


def attentions(config: ModelConfig) -> Iterator[AttentionConfig]:
    """The attention of all layers that have it."""
    return (layer.attention for layer in config.layers if layer.attention)
