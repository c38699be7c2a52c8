"""The operator graph of a transformer, built operator by operator from its configuration."""

from __future__ import annotations

from dataclasses import dataclass, field

from plans.model.graph import Attr, Graph, Operator, Tensor
from plans.model.transformer.config import Experts, Latent, TransformerConfig

__all__ = ["build_graph"]

_ALIBI = "alibi"

_ANGLES: dict[str, tuple[str, ...]] = {
    "base": (), "frequencies": ("rope.frequencies",), "tables": ("rope.cos", "rope.sin"),
}  # fmt: skip
"""The constants that contain the angles, by `Rope.angles`."""


def build_graph(config: TransformerConfig, batch_size: int, seq: int) -> Graph:
    """The training step of `config` on `batch_size` samples of `seq` tokens: inputs "tokens" and "labels" [b, s].

    With a table of segments there is a third input, "token_types" [b, s], unless all tokens are of one segment; with
    alibi a constant [heads, 1, s], what is added to the scores of a head for a key at a position (the same for every
    query, since a softmax does not change where all its scores change alike).

    Modules are named as in Meta's Llama code: tok_embeddings, layers.3.attention.wq, layers.3.feed_forward.w1, norm,
    output; an operator is named by its module, or by the module and its function.
    """
    return _Builder(config=config, batch=batch_size, seq=seq).run()


@dataclass(slots=True)
class _Builder:
    config: TransformerConfig
    batch: int
    seq: int
    tensors: dict[str, Tensor] = field(default_factory=dict)
    operators: list[Operator] = field(default_factory=list)

    def run(self) -> Graph:
        config = self.config
        for name in ("tokens", "labels"):
            self._tensor(name, (self.batch, self.seq), "int64", "input")
        x = self._embedding()
        for layer in range(config.num_layers):
            x = self._block(x, layer)
        if config.norm_place != "sum":
            x = self._norm("norm", x)
        if config.head_transform:
            x = self._linear("head.dense", x, config.hidden, True)
            x = self._norm("head.norm", self._activation("head.act", x, "head"))
        table = "tok_embeddings.weight"
        if not config.tied:
            table = self._parameter("output.weight", (config.vocab, config.hidden))
        bias = (self._parameter("output.bias", (config.vocab,)),) if config.head_bias else ()
        logits = self._add("output", "linear", (self.batch, self.seq, config.vocab), (x, table, *bias))
        logits = self._scaled("output.scale", logits, config.scales.logits)
        if (cap := config.scales.logits_cap) is not None:
            shape = self.tensors[logits].shape
            logits = self._scaled("output.cap_in", logits, 1 / cap)
            logits = self._add("output.cap", "tanh", shape, (logits,), "output")
            logits = self._scaled("output.cap_out", logits, cap)
        if config.float_loss and config.dtype not in ("float32", "float64"):
            # as Megatron-LM and Meta's Llama do: a sum over the vocabulary needs more than half precision
            logits = self._add("output.cast", "cast", (self.batch, self.seq, config.vocab), (logits,), dtype="float32")
        wide = self.tensors[logits].dtype
        read = [logits, "labels"]
        ignored: dict[str, Attr] = {}
        if config.ignore_index is not None:
            ignored = {"ignore_index": config.ignore_index}
            read.append(self._add("labels.count", "count_labels", (), ("labels",), attrs=ignored, dtype="float32"))
        loss = self._add("loss", "cross_entropy", (), tuple(read), attrs=ignored, dtype=wide)
        return Graph(
            name=config.name, batch_size=self.batch, tensors=self.tensors, operators=tuple(self.operators), loss=loss
        )

    # ------------------------------------------------------------------------------------------------------- parts

    def _embedding(self) -> str:
        config, shape = self.config, (self.batch, self.seq, self.config.hidden)
        table = self._parameter("tok_embeddings.weight", (config.vocab, config.hidden))
        x = self._add("tok_embeddings", "embedding", shape, ("tokens", table))
        x = self._scaled("tok_embeddings.scale", x, config.scales.embedding)
        if config.token_types:
            module = "type_embeddings"
            ids = self._segments(module)
            rows = self._parameter(f"{module}.weight", (config.token_types, config.hidden))
            types = self._add(module, "embedding", shape, (ids, rows))
            x = self._add(f"{module}.add", "add", shape, (x, types), module)
        if config.position == "learned":
            module = "pos_embeddings"
            rows = self._parameter(f"{module}.weight", (config.position_rows, config.hidden))
            numbers = self._add(
                f"{module}.positions", "arange", (self.seq,), (), module,
                {"start": config.first_position, "step": 1}, dtype="int64",
            )  # fmt: skip
            positions = self._add(module, "embedding", shape[1:], (numbers, rows))
            x = self._add(f"{module}.add", "add", shape, (x, positions), module)
        if config.position == "alibi":
            self._tensor(_ALIBI, (config.num_heads, 1, self.seq), config.dtype, "constant")
        if config.position == "rope":
            pairs = config.rotary_dim // 2
            for name in _ANGLES[config.rope.angles]:
                shape_of = (self.seq, pairs) if config.rope.angles == "tables" else (pairs,)
                self._tensor(name, shape_of, "float32", "constant")
        if config.embedding_norm:
            x = self._norm("embeddings.norm", x)
        return self._dropout("embeddings.dropout", x, p=config.embedding_dropout)

    def _segments(self, module: str) -> str:
        """The segment of every token: an input, or the same for all."""
        shape, segment = (self.batch, self.seq), self.config.segment
        if segment is None:
            return self._tensor("token_types", shape, "int64", "input")
        return self._add(f"{module}.ids", "fill", shape, ("tokens",), module, {"value": segment}, dtype="int64")

    def _block(self, x: str, layer: int) -> str:
        config, module = self.config, f"layers.{layer}"
        before = config.norm_place in ("before", "around")
        normed = self._norm(f"{module}.attention_norm", x) if before else x
        made = self._attention(f"{module}.attention", normed, layer)
        if config.parallel_residual:
            other = normed if config.shared_norm else self._norm(f"{module}.ffn_norm", x)
            second = self._mlp(module, other, layer)
            x = self._residual(f"{module}.attention_residual", module, x, made)
            return self._residual(f"{module}.residual", module, x, second)
        x = self._joined(f"{module}.attention_residual", f"{module}.attention", x, made)
        made = self._mlp(module, self._norm(f"{module}.ffn_norm", x) if before else x, layer)
        return self._joined(f"{module}.residual", f"{module}.ffn", x, made)

    def _joined(self, name: str, part: str, x: str, made: str) -> str:
        """The residual stream with what attention or MLP made, and the norm that is behind them."""
        module, place = name.rpartition(".")[0], self.config.norm_place
        if place == "sum":
            return self._norm(f"{part}_norm", self._residual(name, module, x, made))
        if place != "before":
            made = self._norm(f"{part}_out_norm" if place == "around" else f"{part}_norm", made)
        return self._residual(name, module, x, made)

    def _attention(self, module: str, x: str, layer: int) -> str:
        config = self.config
        parts = self._separate(module, x) if config.latent is None else self._latent(module, x, config.latent)
        attrs: dict[str, Attr] = {"layout": "bshd"}
        if config.causal:
            attrs["causal"] = True
        if config.scales.attention is not None:
            attrs["scale"] = config.scales.attention
        if config.position == "alibi":
            parts.append(_ALIBI)
        if config.attention_dropout:
            attrs |= {"p": config.attention_dropout, "seed": 1000 + layer}
        heads = (self.batch, self.seq, config.num_heads, config.value_size)
        core = self._add(f"{module}.core", "attention", heads, tuple(parts), module, attrs)
        wide = config.num_heads * config.value_size
        flat = self._add(f"{module}.merge", "reshape", (self.batch, self.seq, wide), (core,), module)
        made = self._linear(f"{module}.wo", flat, config.hidden, config.out_bias)
        return self._dropout(f"{module}.dropout", made, 2000 + layer)

    def _separate(self, module: str, x: str) -> list[str]:
        """Queries, keys and values, each by a separate product."""
        config, parts = self.config, []
        wide, narrow = config.num_heads * config.head_size, config.kv_heads * config.head_size
        for name, width, num_heads in (
            ("q", wide, config.num_heads), ("k", narrow, config.kv_heads), ("v", narrow, config.kv_heads)
        ):  # fmt: skip
            flat = self._linear(f"{module}.w{name}", x, width, config.qkv_bias)
            if config.qk_norm == "row" and name != "v":
                flat = self._norm(f"{module}.{name}_row_norm", flat)
            heads = (self.batch, self.seq, num_heads, config.head_size)
            part = self._add(f"{module}.{name}_heads", "reshape", heads, (flat,), module)
            if config.qk_norm.startswith("head") and name != "v":
                part = self._norm(f"{module}.{name}_head_norm", part, bare=config.qk_norm != "head")
            if config.position == "rope" and name != "v":
                part = self._rope(f"{module}.{name}_rope", part)
            parts.append(part)
        return parts

    def _latent(self, module: str, x: str, latent: Latent) -> list[str]:
        """Queries, keys and values of multi-head latent attention; the rotated elements come first in a head.

        The published code makes the latent and the shared key in one product, and a head's key and value in another.
        separate Products are the same rows, and nothing has to be cut apart afterwards.
        """
        config, own = self.config, (self.batch, self.seq, self.config.num_heads)
        if latent.q_rank is None:
            q = self._linear(f"{module}.wq", x, config.num_heads * config.head_size, False)
        else:
            q = self._norm(f"{module}.q_norm", self._linear(f"{module}.wq_a", x, latent.q_rank, False))
            q = self._linear(f"{module}.wq_b", q, config.num_heads * config.head_size, False)
        q = self._heads(f"{module}.q_heads", q, config.num_heads, config.head_size)
        shape = (*own, config.head_size)
        q = self._rope(f"{module}.q_rope", q, latent.rope_dim)

        shared = self._linear(f"{module}.wk_pos", x, latent.rope_dim, False)
        shared = self._heads(f"{module}.k_pos_heads", shared, 1, latent.rope_dim)
        shared = self._rope(f"{module}.k_pos_rope", shared)
        shared = self._add(f"{module}.k_pos", "expand", (*own, latent.rope_dim), (shared,), module)

        narrow = self._norm(f"{module}.kv_norm", self._linear(f"{module}.wkv_a", x, latent.kv_rank, False))
        k = self._linear(f"{module}.wk_b", narrow, config.num_heads * latent.nope_dim, False)
        k = self._heads(f"{module}.k_heads", k, config.num_heads, latent.nope_dim)
        joined: dict[str, Attr] = {"dim": 3, "sizes": (latent.rope_dim, latent.nope_dim)}
        k = self._add(f"{module}.k_joined", "concat", shape, (shared, k), module, joined)
        v = self._linear(f"{module}.wv_b", narrow, config.num_heads * latent.value_dim, False)
        return [q, k, self._heads(f"{module}.v_heads", v, config.num_heads, latent.value_dim)]

    def _heads(self, name: str, flat: str, num_heads: int, size: int) -> str:
        shape = (self.batch, self.seq, num_heads, size)
        return self._add(name, "reshape", shape, (flat,), name.rpartition(".")[0])

    def _rope(self, name: str, x: str, rotary: int | None = None) -> str:
        """x with its pairs turned; of every head the first `rotary` elements where it has more."""
        angles, shape = _ANGLES[self.config.rope.angles], self.tensors[x].shape
        attrs = self._rope_attrs()
        if rotary is not None and rotary < shape[-1]:
            attrs["rotary"] = rotary
        return self._add(name, "rope", shape, (x, *angles), name.rpartition(".")[0], attrs)

    def _rope_attrs(self) -> dict[str, Attr]:
        rope = self.config.rope
        if rope.angles != "base":
            return {"interleaved": True} if rope.interleaved else {}
        attrs: dict[str, Attr] = {"base": rope.base}
        if rope.fraction < 1:
            attrs["rotary"] = self.config.rotary_dim
        if rope.interleaved:
            attrs["interleaved"] = True
        if rope.scaling != "none":
            attrs |= {"scaling": rope.scaling, "factor": rope.factor}
        if rope.scaling == "llama3":
            attrs |= {
                "low_factor": rope.low_factor, "high_factor": rope.high_factor, "original_seq": rope.original_seq
            }  # fmt: skip
        return attrs

    def _mlp(self, block: str, x: str, layer: int) -> str:
        module, config = f"{block}.feed_forward", self.config
        if config.experts is not None and layer >= config.experts.num_dense_layers:
            return self._dropout(f"{module}.dropout", self._experts(module, x, config.experts), 3000 + layer)
        made = self._dense(module, x, config.inner)
        return self._dropout(f"{module}.dropout", made, 3000 + layer)

    def _dense(self, module: str, x: str, width: int) -> str:
        config, shape = self.config, (self.batch, self.seq, width)
        inner = self._linear(f"{module}.w1", x, width, config.mlp_bias)
        inner = self._activation(f"{module}.act", inner, module)
        if config.gated:
            other = self._linear(f"{module}.w3", x, width, config.mlp_bias)
            inner = self._add(f"{module}.mul", "mul", shape, (inner, other), module)
        return self._linear(f"{module}.w2", inner, config.hidden, config.mlp_bias)

    def _experts(self, module: str, x: str, experts: Experts) -> str:
        """Router, tokens to the places of their experts, the experts' MLPs as batched products, and back."""
        config, tokens = self.config, (self.batch, self.seq, self.config.hidden)
        capacity = experts.capacity(self.seq)
        attrs: dict[str, Attr] = {"top_k": experts.top_k, "capacity": capacity}
        logits = self._linear(f"{module}.router", x, experts.num_experts, False)
        rows = (experts.num_experts, self.batch * capacity)
        routed = self._add(f"{module}.dispatch", "dispatch", (*rows, config.hidden), (x, logits), module, attrs)
        inner = self._grouped(f"{module}.experts.w1", routed, experts.ffn)
        wide = (*rows, experts.ffn)
        inner = self._activation(f"{module}.experts.act", inner, module)
        if config.gated:
            other = self._grouped(f"{module}.experts.w3", routed, experts.ffn)
            inner = self._add(f"{module}.experts.mul", "mul", wide, (inner, other), module)
        made = self._grouped(f"{module}.experts.w2", inner, config.hidden)
        weighted = attrs | {"weights": experts.weights}
        y = self._add(f"{module}.combine", "combine", tokens, (made, logits), module, weighted)
        if not experts.num_shared:
            return y
        shared = self._dense(f"{module}.shared", x, experts.num_shared * experts.ffn)
        if experts.shared_gate:
            gate = self._linear(f"{module}.shared_gate", x, 1, False)
            gate = self._add(f"{module}.shared_share", "sigmoid", (self.batch, self.seq, 1), (gate,), module)
            shared = self._add(f"{module}.shared_mul", "mul", tokens, (shared, gate), module)
        return self._add(f"{module}.sum", "add", tokens, (y, shared), module)

    def _grouped(self, module: str, x: str, width: int) -> str:
        """A batched product, one per expert: weights [experts, in, out]."""
        num_experts, rows, features = self.tensors[x].shape
        weight = self._parameter(f"{module}.weight", (num_experts, features, width))
        return self._add(module, "matmul", (num_experts, rows, width), (x, weight))

    # ---------------------------------------------------------------------------------------------------- operators

    def _linear(self, module: str, x: str, width: int, bias: bool) -> str:
        before = self.tensors[x].shape
        weights = [self._parameter(f"{module}.weight", (width, before[-1]))]
        if bias:
            weights.append(self._parameter(f"{module}.bias", (width,)))
        return self._add(module, "linear", (*before[:-1], width), (x, *weights))

    def _norm(self, name: str, x: str, *, bare: bool = False) -> str:
        kind, width = self.config.norm, self.tensors[x].shape[-1:]
        weights = [] if bare or kind == "layer_no_weights" else [self._parameter(f"{name}.weight", width)]
        if kind == "layer" and not bare:
            weights.append(self._parameter(f"{name}.bias", width))
        attrs: dict[str, Attr] = {"eps": self.config.norm_eps}
        if self.config.norm_offset and weights:
            attrs["offset"] = self.config.norm_offset
        made = "rms_norm" if kind == "rms" else "layer_norm"
        return self._add(name, made, self.tensors[x].shape, (x, *weights), name, attrs)

    def _activation(self, name: str, x: str, module: str) -> str:
        return self._add(name, self.config.activation or "", self.tensors[x].shape, (x,), module)

    def _scaled(self, name: str, x: str, number: float) -> str:
        """x times a number, or x itself where that is 1."""
        if number == 1:
            return x
        return self._add(name, "mul", self.tensors[x].shape, (x,), name.rpartition(".")[0], {"number": number})

    def _residual(self, name: str, module: str, x: str, made: str) -> str:
        made = self._scaled(f"{name}_scale", made, self.config.scales.residual)
        return self._add(name, "add", self.tensors[x].shape, (x, made), module)

    def _dropout(self, name: str, x: str, seed: int = 1, *, p: float | None = None) -> str:
        p = self.config.dropout if p is None else p
        if not p:
            return x
        attrs: dict[str, Attr] = {"p": p, "seed": seed}
        return self._add(name, "dropout", self.tensors[x].shape, (x,), name.rpartition(".")[0], attrs)

    def _parameter(self, name: str, shape: tuple[int, ...]) -> str:
        return self._tensor(name, shape, self.config.dtype, "parameter")

    def _tensor(self, name: str, shape: tuple[int, ...], dtype: str, kind: str) -> str:
        self.tensors[name] = Tensor(name=name, shape=shape, dtype=dtype, kind=kind)
        return name

    def _add(
        self,
        name: str,
        kind: str,
        shape: tuple[int, ...],
        inputs: tuple[str, ...],
        module: str = "",
        attrs: dict[str, Attr] | None = None,
        dtype: str = "",
    ) -> str:
        made = self._tensor(
            "loss" if name == "loss" else f"{name}.out", shape, dtype or self.config.dtype, "activation"
        )
        self.operators.append(
            Operator(
                name=name, kind=kind, inputs=inputs, outputs=(made,), attrs=attrs or {}, module=module or name
            )
        )  # fmt: skip
        return made
