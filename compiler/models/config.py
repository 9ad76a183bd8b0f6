"""What a decoder is: sizes and variants, layer by layer.

An architecture's file (llama.py, gemma2.py ...) makes a `ModelConfig` of a GGUF file's metadata; tensor lists, graphs,
caches and RoPE tables follow from it. JSON-serializable with `dataclasses.asdict`: the artifact's manifest keeps it.
"""

from dataclasses import dataclass, field


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
    factors: str = ""  # tensor [dim/2] that divides the angle of each pair, such as rope_freqs.weight (Llama 3.1)


@dataclass(frozen=True)
class AttentionConfig:
    """Causal attention with grouped queries; `schedules.attention.Attention` has the formula."""

    heads: int  # query heads
    kv_heads: int  # key and value heads; divides heads
    head_dim: int  # columns of a head (key = value); heads * head_dim need not be the hidden size
    rope: str  # key of ModelConfig.ropes; "": no rotation
    scale: float = 0.0  # of q . k; 0: 1/sqrt(head_dim)
    window: int = 0  # keys that a token sees, its own included; 0: all
    softcap: float = 0.0  # score becomes softcap * tanh(score / softcap); 0: none
    sinks: bool = False  # attn_sinks.weight: one more logit per query head in the softmax's denominator
    qkv_bias: bool = False  # attn_q/k/v.bias
    output_bias: bool = False  # attn_output.bias
    head_norms: bool = False  # attn_q_norm/k_norm: RMS norm over each head of Q and K before RoPE


@dataclass(frozen=True)
class FeedForwardConfig:
    """down(act(gate(x)) * up(x)), dense."""

    size: int  # columns between gate/up and down
    act: str = "silu"  # or "gelu" (tanh approximation), of schedules' activations


@dataclass(frozen=True)
class Norms:
    """RMS norms around a block, by the name of their weight within the layer: x + after(block(before(x))). "": none."""

    before: str = ""
    after: str = ""


@dataclass(frozen=True)
class LayerConfig:
    """x += attention, then x += feed_forward, each within its norms."""

    attention: AttentionConfig
    feed_forward: FeedForwardConfig
    attention_norms: Norms = Norms(before="attn_norm")
    feed_forward_norms: Norms = Norms(before="ffn_norm")


@dataclass(frozen=True)
class ModelConfig:
    """One decoder: embedding, layers, output norm, logits."""

    architecture: str  # key of ARCHITECTURES
    name: str  # general.name, or ""
    vocab: int  # tokens
    hidden: int  # columns of the residual stream
    context: int  # tokens the model was trained for
    norm_eps: float  # RMSNorm's epsilon
    tied: bool  # no output.weight: logits use token_embd.weight
    layers: tuple[LayerConfig, ...]
    ropes: dict[str, RopeConfig] = field(default_factory=dict)  # by kind of layer
    embedding_scale: float = 1.0  # on the embedding's rows
    logit_softcap: float = 0.0  # logits become softcap * tanh(logits / softcap); 0: none
