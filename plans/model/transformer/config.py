"""Configurations of decoder-only (or encoder-only) transformers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from plans.errors import TwofoldError
from plans.operators.experts import expert_capacity

__all__ = ["Activation", "Experts", "Latent", "Norm", "NormPlace", "Position", "Rope", "Scales", "TransformerConfig"]

Norm = Literal["rms", "layer", "layer_no_bias", "layer_no_weights"]
NormPlace = Literal["before", "after", "around", "sum"]
Position = Literal["rope", "learned", "alibi", "none"]
Activation = Literal["silu", "gelu", "relu"]
QKNorm = Literal["none", "head", "head_no_weights", "row"]
Float = Literal["bfloat16", "float16", "float32", "float64"]
MOST_LAYERS = 10_000
MOST_SIZE = 1 << 24  # of any other count: numbers of elements and bytes made of three of them stay exact


@dataclass(frozen=True, slots=True, kw_only=True)
class Rope:
    """Rotary position embedding (Su et al. 2021, arXiv 2104.09864).

    Args:
        base: of the geometric row of angles ("theta").
        fraction: of a head's elements that are rotated, the first ones.
        interleaved: pairs are neighbours (2i, 2i + 1), as in Llama's own code; else halves (i, i + d / 2), as in
            Hugging Face's, which permutes the weights to match.
        scaling: "none"; "linear" divides positions by `factor`; "llama3" divides low frequencies by it (Llama 3.1:
            wavelengths above `original_seq / low_factor` entirely, below `original_seq / high_factor` not at all).
        factor, low_factor, high_factor, original_seq: of the scaling.
        angles: what tells them: "base", all of the above; or constants of a captured model, "frequencies" (radians per
            position of each pair) or "tables" (cosines and sines of every position and pair).
    """

    base: float = 10_000.0
    fraction: float = 1.0
    interleaved: bool = False
    scaling: Literal["none", "linear", "llama3"] = "none"
    factor: float = 1.0
    low_factor: float = 1.0
    high_factor: float = 4.0
    original_seq: int = 8192
    angles: Literal["base", "frequencies", "tables"] = "base"

    def __post_init__(self) -> None:
        if self.base <= 0 or not 0 < self.fraction <= 1 or self.factor <= 0 or self.original_seq < 1:
            raise TwofoldError(f"{self}: base and factor must be positive, fraction above 0 and at most 1")
        if self.scaling not in ("none", "linear", "llama3"):
            raise TwofoldError(f"rope scaling {self.scaling!r} is not known; known: none, linear, llama3")
        if self.angles not in ("base", "frequencies", "tables"):
            raise TwofoldError(f"rope angles {self.angles!r} are not known; known: base, frequencies, tables")


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """A mixture of experts in place of the MLP.

    Args:
        num_experts: routed ones.
        top_k: of them that each token goes to.
        ffn: inner size of one expert.
        num_shared: experts of the same size that every token goes to.
        num_dense_layers: first layers that keep the plain MLP.
        capacity_factor: places at an expert, over an even share of a sample's choices; tokens without a place are
            dropped. 1.25 is what GShard trained with (arXiv 2006.16668, section 2.2 caps it so). Its padding is
            computed too.
        weights: "chosen": a softmax over the chosen experts; "all": over all experts, where the chosen ones keep their
            weights.
        shared_gate: whether the output of the shared experts is multiplied by sigmoid(w x), w [1, hidden] (Qwen 2).
    """

    num_experts: int
    top_k: int
    ffn: int
    num_shared: int = 0
    num_dense_layers: int = 0
    capacity_factor: float = 1.25
    weights: Literal["chosen", "all"] = "chosen"
    shared_gate: bool = False

    def __post_init__(self) -> None:
        if min(self.num_experts, self.top_k, self.ffn) < 1 or min(self.num_shared, self.num_dense_layers) < 0:
            raise TwofoldError(f"{self}: num_experts, top_k and ffn must be at least 1, the others at least 0")
        if not self.capacity_factor > 0 or self.weights not in ("chosen", "all"):
            raise TwofoldError(f"{self}: capacity_factor must be above 0, weights must be 'chosen' or 'all'")
        if self.top_k > self.num_experts:
            raise TwofoldError(f"top_k {self.top_k} of {self.num_experts} experts is too large")
        if self.shared_gate and not self.num_shared:
            raise TwofoldError(f"{self}: gated shared experts need num_shared of at least 1")

    def capacity(self, seq: int) -> int:
        """Places of a sample of `seq` tokens at each expert."""
        return expert_capacity(seq, self.num_experts, self.top_k, self.capacity_factor)


@dataclass(frozen=True, slots=True, kw_only=True)
class Latent:
    """Multi-head latent attention (DeepSeek-AI 2024, arXiv 2405.04434, section 2.1).

    Keys and values are made of one narrow, normalised latent; in addition to its own parts, every head uses a shared
    key that contains the position.

    Args:
        kv_rank: width of the latent of keys and values.
        q_rank: of the queries; None: they are made in one product.
        nope_dim: elements of a head's query and key that bear no position.
        rope_dim: those that do, rotated. Here they come first in a head; the published code has them last, which
            permutes rows of the weights.
        value_dim: elements of a head's value.
    """

    kv_rank: int
    q_rank: int | None = None
    nope_dim: int
    rope_dim: int
    value_dim: int

    def __post_init__(self) -> None:
        counts = (self.kv_rank, 1 if self.q_rank is None else self.q_rank, self.nope_dim, self.rope_dim, self.value_dim)
        if min(counts) < 1 or self.rope_dim % 2:
            raise TwofoldError(f"{self}: all must be at least 1, and rope_dim must be even, because rope rotates pairs")


@dataclass(frozen=True, slots=True, kw_only=True)
class Scales:
    """Numbers that tensors are multiplied by, for models whose authors chose them.

    Args:
        embedding: what comes out of the table of tokens (Gemma: the square root of the hidden size).
        attention: the scores of queries and keys; None: 1 / sqrt(head_dim).
        residual: what attention and MLP add to the residual stream (Granite).
        logits: the output of the head (Granite, Cohere).
        logits_cap: logits become cap x tanh(logits / cap) (Gemma 2); None: they stay.
    """

    embedding: float = 1.0
    attention: float | None = None
    residual: float = 1.0
    logits: float = 1.0
    logits_cap: float | None = None

    def __post_init__(self) -> None:
        given = (self.embedding, self.attention, self.residual, self.logits, self.logits_cap)
        if any(each is not None and not each > 0 for each in given):
            raise TwofoldError(f"{self}: all must be above 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class TransformerConfig:
    """The architecture of a transformer.

    Args:
        name: name for messages and reports.
        num_layers: number of blocks.
        hidden: width of the residual stream.
        num_heads: number of query heads.
        num_kv_heads: number of key-value heads, a divisor of `num_heads`; `num_heads` if None.
        head_dim: elements of one head; hidden / num_heads if None.
        ffn: inner size of the MLP; 4 x hidden if None.
        vocab: vocabulary size.
        seq: tokens per sample.
        gated: three matrices, w2(act(w1 x) * w3 x); else two, w2(act(w1 x)).
        activation: "silu", "gelu" or "relu"; None: silu where gated, else gelu.
        norm: "rms" (a weight), "layer" (a weight and a bias), "layer_no_bias" (a weight) or "layer_no_weights".
        norm_eps: added to the variance.
        norm_offset: added to the weights of the norms (Gemma: 1, so that they begin at 0).
        norm_place: position of norms, where f is the attention or the MLP: "before": x + f(norm(x)); "after": x +
            norm(f(x)) (OLMo 2); "around": x + norm(f(norm(x))) (Gemma 2); "sum": norm(x + f(x)), without a norm at the
            end (BERT).
        qk_norm: whether queries and keys are normalised: "none", "head" by head before they are rotated (Qwen 3),
            "head_no_weights" likewise by a norm without weights (Llama 4), or all heads of a token as one "row"
            (OLMo 2).
        embedding_norm: whether a norm follows the embedding.
        qkv_bias, out_bias, mlp_bias, head_bias: which linear layers add a bias.
        tied: whether the head shares its weights with the embedding.
        position: "rope", "learned" (a table with a row per position), "alibi" (a number per head and distance added to
            the scores; Press et al. 2021, arXiv 2108.12409) or "none".
        first_position: row of the learned table for the first token (OPT: 2).
        num_positions: rows of the learned table; seq + first_position if None.
        token_types: rows of a table of segments, with the input "token_types"; 0: none.
        segment: the segment of all tokens, without an input "token_types"; None: the input has it.
        rope: settings of rotary positions.
        causal: whether a token attends only to itself and earlier tokens.
        parallel_residual: x + attention(norm(x)) + mlp(norm(x)), as in GPT-NeoX; otherwise sequential.
        shared_norm: whether attention and MLP share one norm, as in GPT-J.
        head_transform: whether the head begins with a linear layer hidden x hidden, the activation and a norm (BERT).
        scales: see `Scales`.
        dropout: dropout probability after the attention and the MLP.
        embedding_dropout: dropout probability after the embedding; `dropout` if None.
        attention_dropout: dropout probability of attention weights.
        ignore_index: label that is ignored; None: all labels count.
        dtype: dtype of parameters and activations.
        float_loss: whether logits in half precision are cast to float32 before the loss; otherwise the loss is in
            half precision too.
        experts: mixture of experts; None for a dense model.
        latent: multi-head latent attention, where head_dim is that of queries and keys; None: plain attention.
        source: publication of the figures.

    Raises:
        TwofoldError: sizes below 1, heads that do not divide, an unknown norm, position or dtype.

    >>> TransformerConfig(num_layers=2, hidden=64, num_heads=4, vocab=256, seq=32).num_parameters
    164160
    """

    name: str = "transformer"
    num_layers: int
    hidden: int
    num_heads: int
    num_kv_heads: int | None = None
    head_dim: int | None = None
    ffn: int | None = None
    vocab: int
    seq: int
    gated: bool = True
    activation: Activation | None = None
    norm: Norm = "rms"
    norm_eps: float = 1e-5
    norm_offset: float = 0.0
    norm_place: NormPlace = "before"
    qk_norm: QKNorm = "none"
    embedding_norm: bool = False
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    head_bias: bool = False
    tied: bool = False
    position: Position = "rope"
    first_position: int = 0
    num_positions: int | None = None
    token_types: int = 0
    segment: int | None = None
    rope: Rope = Rope()
    causal: bool = True
    parallel_residual: bool = False
    shared_norm: bool = False
    head_transform: bool = False
    scales: Scales = Scales()
    dropout: float = 0.0
    embedding_dropout: float | None = None
    attention_dropout: float = 0.0
    ignore_index: int | None = None
    dtype: str = "bfloat16"
    float_loss: bool = True
    experts: Experts | None = None
    latent: Latent | None = None
    source: str = ""

    def __post_init__(self) -> None:
        for field in ("num_layers", "hidden", "num_heads", "vocab", "seq"):
            self._check_count(field)
        derived = {"num_kv_heads": self.num_heads, "ffn": 4 * self.hidden}
        if self.latent is not None:
            self._check_latent(self.latent)
        if self.head_dim is None and self.hidden % self.num_heads:
            raise TwofoldError(
                f"{self.name}: hidden {self.hidden} is not a multiple of num_heads {self.num_heads} "
                f"({self.hidden} % {self.num_heads} = {self.hidden % self.num_heads}); give head_dim"
            )
        derived["head_dim"] = self.hidden // self.num_heads
        for field, value in derived.items():
            if getattr(self, field) is None:
                object.__setattr__(self, field, value)
            self._check_count(field)
        if self.num_heads % self.kv_heads:
            raise TwofoldError(
                f"{self.name}: num_heads {self.num_heads} is not a multiple of num_kv_heads {self.num_kv_heads}"
            )
        if self.activation is None:
            object.__setattr__(self, "activation", "silu" if self.gated else "gelu")
        for field, words in _WORDS.items():
            if getattr(self, field) not in words:
                raise TwofoldError(f"{self.name}: {field} {getattr(self, field)!r} is not known; known: {words}")
        if min(self.first_position, self.token_types) < 0:
            raise TwofoldError(f"{self.name}: first_position and token_types must be at least 0")
        if self.segment is not None and not 0 <= self.segment < self.token_types:
            raise TwofoldError(f"{self.name}: segment {self.segment} is not among {self.token_types} token_types")
        if self.num_positions is not None and self.num_positions < self.seq + self.first_position:
            raise TwofoldError(
                f"{self.name}: {self.seq} tokens from row {self.first_position} on do not fit into a table of "
                f"{self.num_positions} positions; use shorter samples"
            )
        if self.norm_place != "before" if self.parallel_residual else self.shared_norm:
            raise TwofoldError(
                f"{self.name}: a parallel residual needs norm_place='before', and shared_norm needs parallel_residual"
            )
        if self.embedding_dropout is None:
            object.__setattr__(self, "embedding_dropout", self.dropout)
        for field in ("dropout", "embedding_dropout", "attention_dropout"):
            if not 0 <= getattr(self, field) < 1:
                raise TwofoldError(f"{self.name}: {field} {getattr(self, field)} must be a probability below 1")
        if self.dtype not in get_args(Float):
            raise TwofoldError(f"{self.name}: dtype {self.dtype!r} is not a float; known: {', '.join(get_args(Float))}")
        if self.position == "rope" and self.rotary_dim % 2:
            raise TwofoldError(
                f"{self.name}: rope rotates pairs, so it cannot rotate {self.rotary_dim} elements of a head"
            )

    def _check_latent(self, latent: Latent) -> None:
        size = latent.nope_dim + latent.rope_dim
        if self.head_dim is None:
            object.__setattr__(self, "head_dim", size)
        if self.head_dim != size or self.num_kv_heads not in (None, self.num_heads):
            raise TwofoldError(
                f"{self.name}: latent attention has heads of nope_dim + rope_dim = {size} elements and as many "
                f"key-value heads as query heads, not head_dim {self.head_dim} and num_kv_heads {self.num_kv_heads}; "
                "omit both"
            )
        has_more = self.qkv_bias or self.out_bias or self.qk_norm != "none"
        if self.position != "rope" or self.rope.fraction != 1 or has_more:
            raise TwofoldError(
                f"{self.name}: latent attention has rope on its rope_dim elements, no biases and no qk_norm"
            )

    def _check_count(self, field: str) -> None:
        value = getattr(self, field)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise TwofoldError(f"{self.name}: {field} must be a whole number of at least 1, not {value!r}")
        most = MOST_LAYERS if field == "num_layers" else MOST_SIZE
        if value > most:
            raise TwofoldError(f"{self.name}: {field} must be at most {most:,}, not {value}")

    @property
    def kv_heads(self) -> int:
        """The number of key and value heads."""
        assert self.num_kv_heads is not None
        return self.num_kv_heads

    @property
    def head_size(self) -> int:
        """Elements of one head of queries and keys."""
        assert self.head_dim is not None
        return self.head_dim

    @property
    def value_size(self) -> int:
        """The number of elements of one value head."""
        return self.head_size if self.latent is None else self.latent.value_dim

    @property
    def attention_weights(self) -> int:
        """Elements of the matrices of one block's attention."""
        if self.latent is None:
            return self.hidden * self.head_size * (2 * self.num_heads + 2 * self.kv_heads)
        latent, queries = self.latent, self.num_heads * self.head_size
        made = self.hidden * queries if latent.q_rank is None else latent.q_rank * (self.hidden + queries)
        compressed = self.hidden * (latent.kv_rank + latent.rope_dim)
        spread = latent.kv_rank * self.num_heads * (latent.nope_dim + latent.value_dim)
        return made + compressed + spread + self.num_heads * latent.value_dim * self.hidden

    @property
    def inner(self) -> int:
        """The inner size of the MLP."""
        assert self.ffn is not None
        return self.ffn

    @property
    def rotary_dim(self) -> int:
        """The number of elements of a head that RoPE rotates."""
        if self.latent is not None:
            return self.latent.rope_dim
        return int(self.head_size * self.rope.fraction)

    def has_experts(self, layer: int) -> bool:
        """Whether a layer's MLP is a mixture of experts."""
        return self.experts is not None and layer >= self.experts.num_dense_layers

    @property
    def position_rows(self) -> int:
        """Rows of a learned table of positions."""
        return self.seq + self.first_position if self.num_positions is None else self.num_positions

    @property
    def num_parameters(self) -> int:
        """The number of parameters of the complete model; a tied table counts once."""
        dense = min(self.num_layers, self.experts.num_dense_layers) if self.experts is not None else self.num_layers
        blocks = dense * self.block_parameters(0) if dense else 0
        if dense < self.num_layers:
            blocks += (self.num_layers - dense) * self.block_parameters(dense)
        return blocks + self._end_parameters()

    def _end_parameters(self) -> int:
        """Number of parameters before and after the blocks."""
        norm = self._norm_parameters(self.hidden)
        rows = self.vocab * (1 if self.tied else 2) + self.token_types
        rows += self.position_rows if self.position == "learned" else 0
        num_norms = self.embedding_norm + (self.norm_place != "sum") + self.head_transform
        transform = self.hidden * (self.hidden + 1) if self.head_transform else 0
        return rows * self.hidden + num_norms * norm + transform + (self.vocab if self.head_bias else 0)

    @property
    def num_active_parameters(self) -> int:
        """The number of parameters used for one token: of the experts, only the chosen and the shared ones."""
        if self.experts is None:
            return self.num_parameters
        idle = self.experts.num_experts - self.experts.top_k
        num_moe = sum(self.has_experts(layer) for layer in range(self.num_layers))
        return self.num_parameters - num_moe * idle * self._mlp_parameters(self.experts.ffn)

    def _norm_parameters(self, width: int) -> int:
        return width * {"layer": 2, "layer_no_weights": 0}.get(self.norm, 1)

    def _mlp_parameters(self, inner: int) -> int:
        matrices = (3 if self.gated else 2) * self.hidden * inner
        return matrices + (((2 if self.gated else 1) * inner + self.hidden) if self.mlp_bias else 0)

    def block_parameters(self, layer: int = 0) -> int:
        """The number of parameters of one block."""
        q, kv = self.num_heads * self.head_size, self.kv_heads * self.head_size
        num_norms = 1 if self.shared_norm else 4 if self.norm_place == "around" else 2
        attention = self.attention_weights + num_norms * self._norm_parameters(self.hidden)
        if self.latent is not None:
            attention += self._norm_parameters(self.latent.kv_rank) + self._norm_parameters(self.latent.q_rank or 0)
        if self.qk_norm in ("head", "row"):
            widths = (self.head_size, self.head_size) if self.qk_norm == "head" else (q, kv)
            attention += sum(map(self._norm_parameters, widths))
        attention += (q + 2 * kv if self.qkv_bias else 0) + (self.hidden if self.out_bias else 0)
        experts = self.experts
        if experts is None or not self.has_experts(layer):
            return attention + self._mlp_parameters(self.inner)
        mlps = (experts.num_experts + experts.num_shared) * self._mlp_parameters(experts.ffn)
        return attention + mlps + (experts.num_experts + experts.shared_gate) * self.hidden


_WORDS = {
    "norm": get_args(Norm), "norm_place": get_args(NormPlace), "qk_norm": get_args(QKNorm),
    "position": get_args(Position), "activation": get_args(Activation),
}  # fmt: skip
"""Field -> the words that it can be."""
