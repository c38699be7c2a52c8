"""The sizes of a transformer that degrees must divide."""

from __future__ import annotations

from functools import lru_cache

from plans.degrees.rules import ModelSizes
from plans.model.graph import Graph
from plans.model.transformer.config import TransformerConfig
from plans.model.transformer.parts import parts_of

__all__ = ["sizes_of"]


def sizes_of(model: TransformerConfig | Graph) -> ModelSizes:
    """The sizes of a configuration, or of a graph built by `transformer`.

    Raises:
        TwofoldError: any other graph.

    >>> from plans.model.transformer import transformer, transformer_config
    >>> config = transformer_config("llama-3-8b")
    >>> sizes_of(config) == sizes_of(transformer(config))
    True
    """
    return _of_graph(model) if isinstance(model, Graph) else _of_config(model)


@lru_cache(maxsize=256)
def _of_config(config: TransformerConfig) -> ModelSizes:
    experts = config.experts
    return ModelSizes(
        name=config.name, num_layers=config.num_layers, seq=config.seq, num_heads=config.num_heads,
        kv_heads=config.kv_heads, hidden=config.hidden, vocab=config.vocab, tied=config.tied,
        inner=config.inner if not config.has_experts(0) else 0,
        num_experts=0 if experts is None else experts.num_experts, expert_inner=0 if experts is None else experts.ffn,
    )  # fmt: skip


def _of_graph(graph: Graph) -> ModelSizes:
    layers, tensors = len(parts_of(graph).blocks), graph.tensors
    inner = tensors.get("layers.0.feed_forward.w1.weight")
    router = next((tensor for name, tensor in tensors.items() if name.endswith(".router.weight")), None)
    expert = next((tensor for name, tensor in tensors.items() if name.endswith(".experts.w1.weight")), None)
    table = tensors["tok_embeddings.weight"].shape
    return ModelSizes(
        name=graph.name, num_layers=layers, seq=tensors["tokens"].shape[1],
        num_heads=tensors["layers.0.attention.core.out"].shape[2],
        kv_heads=tensors["layers.0.attention.k_heads.out"].shape[2], hidden=table[1], vocab=table[0],
        tied="output.weight" not in tensors, inner=0 if inner is None else inner.shape[0],
        num_experts=0 if router is None else router.shape[0], expert_inner=0 if expert is None else expert.shape[2],
    )  # fmt: skip
