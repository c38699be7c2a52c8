"""Configurations of decoder-only (or encoder-only) transformers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from plans.errors import TwofoldError

__all__ = ["Experts", "Latent", "Rope", "TransformerConfig"]

Norm = Literal["rms", "layer"]
Position = Literal["rope", "learned", "none"]
Float = Literal["bfloat16", "float16", "float32", "float64"]


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
    """

    base: float = 10_000.0
    fraction: float = 1.0
    interleaved: bool = False
    scaling: Literal["none", "linear", "llama3"] = "none"
    factor: float = 1.0
    low_factor: float = 1.0
    high_factor: float = 4.0
    original_seq: int = 8192

    def __post_init__(self) -> None:
        if self.base <= 0 or not 0 < self.fraction <= 1 or self.factor <= 0 or self.original_seq < 1:
            raise TwofoldError(f"{self}: base and factor are positive, fraction lies above 0 and is at most 1")
        if self.scaling not in ("none", "linear", "llama3"):
            raise TwofoldError(f"rope scaling {self.scaling!r} is not known; known: none, linear, llama3")


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """A mixture of experts in place of the MLP.

    Args:
        num_experts: routed ones.
        top_k: of them that each token goes to.
        ffn: inner size of one expert.
        num_shared: experts of the same size that every token goes to.
        num_dense_layers: first layers that keep the plain MLP.
        capacity_factor: places at an expert, over an even share of a sample's choices; who finds none is dropped. 1.25
            is what GShard trained with (arXiv 2006.16668, section 2.2 caps it so). Its padding is computed too.
        weights: "chosen": a softmax over the chosen experts; "all": over all, of which the chosen keep theirs.
    """

    num_experts: int
    top_k: int
    ffn: int
    num_shared: int = 0
    num_dense_layers: int = 0
    capacity_factor: float = 1.25
    weights: Literal["chosen", "all"] = "chosen"

    def __post_init__(self) -> None:
        if min(self.num_experts, self.top_k, self.ffn) < 1 or min(self.num_shared, self.num_dense_layers) < 0:
            raise TwofoldError(f"{self}: num_experts, top_k and ffn are at least 1, the others at least 0")
        if not self.capacity_factor > 0 or self.weights not in ("chosen", "all"):
            raise TwofoldError(f"{self}: capacity_factor is above 0, weights are 'chosen' or 'all'")
        if self.top_k > self.num_experts:
            raise TwofoldError(f"top_k {self.top_k} of {self.num_experts} experts: there are not that many")


@dataclass(frozen=True, slots=True, kw_only=True)
class Latent:
    """Multi-head latent attention (DeepSeek-AI 2024, arXiv 2405.04434, section 2.1).

    Keys and values are made of one narrow, normalised latent; beside what a head has of its own, all heads share one
    key that bears the position.

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
            raise TwofoldError(f"{self}: all are at least 1, and rope turns pairs, so rope_dim is even")


@dataclass(frozen=True, slots=True, kw_only=True)
class TransformerConfig:
    """The shape of a transformer.

    Args:
        name: for messages and reports.
        num_layers: blocks.
        hidden: width of the residual stream.
        num_heads: of the queries.
        num_kv_heads: of keys and values; `num_heads` when None. They divide the query heads.
        head_dim: elements of one head; hidden / num_heads when None.
        ffn: inner size of the MLP; 4 x hidden when None.
        vocab: rows of the table of embeddings.
        seq: tokens of a sample, and rows of a learned table of positions.
        gated: three matrices, w2(silu(w1 x) * w3 x); else two, w2(gelu(w1 x)).
        norm: "rms" (a weight) or "layer" (a weight and a bias), before attention, before the MLP and at the end.
        norm_eps: added to the variance.
        qkv_bias, out_bias, mlp_bias: which linear layers add a bias; the head never does.
        tied: whether the head's matrix is the table of embeddings.
        position: "rope", "learned" (a table with a row per position) or "none".
        rope: its angles.
        causal: whether a token sees itself and the tokens before it only.
        parallel_residual: x + attention(norm(x)) + mlp(norm(x)), as in GPT-NeoX; else one after the other.
        dropout: probability after the embedding, the attention and the MLP.
        attention_dropout: probability of the attention's weights.
        dtype: of parameters and activations; the loss is taken in float32.
        experts: None for a dense model.
        latent: of multi-head latent attention; head_dim is then that of queries and keys. None: plain attention.
        source: where the figures were published.

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
    norm: Norm = "rms"
    norm_eps: float = 1e-5
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    tied: bool = False
    position: Position = "rope"
    rope: Rope = Rope()
    causal: bool = True
    parallel_residual: bool = False
    dropout: float = 0.0
    attention_dropout: float = 0.0
    dtype: str = "bfloat16"
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
        for field, known in (("norm", get_args(Norm)), ("position", get_args(Position))):
            if getattr(self, field) not in known:
                raise TwofoldError(f"{self.name}: {field} {getattr(self, field)!r} is not known; known: {known}")
        for field in ("dropout", "attention_dropout"):
            if not 0 <= getattr(self, field) < 1:
                raise TwofoldError(f"{self.name}: {field} {getattr(self, field)} is a probability below 1")
        if self.dtype not in get_args(Float):
            raise TwofoldError(f"{self.name}: dtype {self.dtype!r} is no float; known: {', '.join(get_args(Float))}")
        if self.position == "rope" and self.rotary_dim % 2:
            raise TwofoldError(
                f"{self.name}: rope turns pairs, so {self.rotary_dim} elements of a head cannot be turned"
            )

    def _check_latent(self, latent: Latent) -> None:
        size = latent.nope_dim + latent.rope_dim
        if self.head_dim is None:
            object.__setattr__(self, "head_dim", size)
        if self.head_dim != size or self.num_kv_heads not in (None, self.num_heads):
            raise TwofoldError(
                f"{self.name}: latent attention has heads of nope_dim + rope_dim = {size} elements and as many of keys "
                f"and values as of queries, not head_dim {self.head_dim} and num_kv_heads {self.num_kv_heads}; leave "
                "both out"
            )
        if self.position != "rope" or self.rope.fraction != 1 or self.qkv_bias or self.out_bias:
            raise TwofoldError(f"{self.name}: latent attention has rope on its rope_dim elements, and no biases")

    def _check_count(self, field: str) -> None:
        value = getattr(self, field)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise TwofoldError(f"{self.name}: {field} is a whole number of at least 1, not {value!r}")

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
    def num_parameters(self) -> int:
        """The number of parameters of the whole model; a tied table counts once."""
        layers = sum(self.block_parameters(layer) for layer in range(self.num_layers))
        tables = self.vocab * self.hidden * (1 if self.tied else 2)
        positions = self.seq * self.hidden if self.position == "learned" else 0
        return layers + tables + positions + self._norm_parameters(self.hidden)

    @property
    def num_active_parameters(self) -> int:
        """The number of parameters used for one token: of the experts, only the chosen and the shared ones."""
        if self.experts is None:
            return self.num_parameters
        idle = self.experts.num_experts - self.experts.top_k
        num_moe = sum(self.has_experts(layer) for layer in range(self.num_layers))
        return self.num_parameters - num_moe * idle * self._mlp_parameters(self.experts.ffn)

    def _norm_parameters(self, width: int) -> int:
        return width * (1 if self.norm == "rms" else 2)

    def _mlp_parameters(self, inner: int) -> int:
        matrices = (3 if self.gated else 2) * self.hidden * inner
        return matrices + (((2 if self.gated else 1) * inner + self.hidden) if self.mlp_bias else 0)

    def block_parameters(self, layer: int = 0) -> int:
        """The number of parameters of one block."""
        q, kv = self.num_heads * self.head_size, self.kv_heads * self.head_size
        attention = self.attention_weights + 2 * self._norm_parameters(self.hidden)
        if self.latent is not None:
            attention += self._norm_parameters(self.latent.kv_rank) + self._norm_parameters(self.latent.q_rank or 0)
        attention += (q + 2 * kv if self.qkv_bias else 0) + (self.hidden if self.out_bias else 0)
        if self.experts is None or not self.has_experts(layer):
            return attention + self._mlp_parameters(self.inner)
        mlps = (self.experts.num_experts + self.experts.num_shared) * self._mlp_parameters(self.experts.ffn)
        return attention + mlps + self.experts.num_experts * self.hidden
