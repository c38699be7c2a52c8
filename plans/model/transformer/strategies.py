"""Strategies of a transformer's operators for given degrees: the layouts of Megatron-LM, stated operator by operator.

* dp splits the samples of every operator, cp their sequence; keys and values are gathered over cp before the attention.
* tp splits the columns of wq, wk, wv, w1, w3, the heads, and the rows of wo and w2 (Shoeybi et al. 2019, arXiv
  1909.08053, section 3); the table of embeddings, the head and the cross entropy are split over the vocabulary.
* sequence parallel: between those, where every rank of tp would hold the same (norms, dropouts, residual sums), tp
  splits the sequence, so that each all-reduce becomes a reduce-scatter and an all-gather (Korthikanti et al. 2022,
  arXiv 2205.05198, section 4.2.2). What a norm makes is gathered once for all its readers, and kept gathered for the
  gradients of their weights; with the norms recomputed it is gathered again there, as Megatron-LM does.

Latent attention: what makes the latents and the shared key is not split by tp, but between ranks of it by the sequence
where that is; the latents are gathered for the products that make heads of them, which tp splits by heads.

Norms of queries and keys are split by heads where they stand over one head; a norm over all heads of a token is split
as those between, by the sequence alone.

A mixture of experts: the router and the way to the experts and back are split by samples alone; the experts, and what
is routed to them, over ep, which is a part of the data-parallel ranks; an expert's inner size over tp, as in an MLP.

With more ranks of tp than heads of keys and values, tp is two axes: "tp_kv" splits the heads of keys and values,
"tp_q" the query heads that each of them serves; ranks along "tp_q" compute the same keys and values.
"""

from __future__ import annotations

from functools import lru_cache

from plans.degrees.groups import MeshAxes
from plans.errors import TwofoldError
from plans.layout import DimAxes
from plans.model.graph import Graph
from plans.model.transformer.parts import is_transformer
from plans.plan import Strategy

__all__ = ["block_strategies"]


def block_strategies(graph: Graph, axes: MeshAxes, *, sequence_parallel: bool = False) -> dict[str, Strategy]:
    """The strategy of every operator of a graph that `transformer` built, by the operator's name.

    Raises:
        TwofoldError: a graph that `transformer` did not build.

    >>> from plans.degrees.groups import mesh_axes
    >>> from plans.model.transformer import transformer
    >>> found = block_strategies(transformer("llama-2-7b", num_layers=1), mesh_axes(dp=2, tp=4), sequence_parallel=True)
    >>> found["layers.0.attention.wo"].dims, found["layers.0.ffn_norm"].dims
    ({'b0': ('dp',), 'k': ('tp',)}, {'b0': ('dp',), 'b1': ('tp',)})
    """
    if not is_transformer(graph):
        raise TwofoldError(f"graph {graph.name!r} was not built by tf.transformer; use search to find its strategies")
    found = {}
    for operator in graph.operators:
        name = operator.name
        role = name.split(".", 2)[2] if name.startswith("layers.") else name
        strategy = _strategy(role, operator.kind, axes, sequence_parallel)
        if strategy.dims:
            found[name] = strategy
    return found


@lru_cache(maxsize=4096)
def _strategy(role: str, kind: str, axes: MeshAxes, sequence_parallel: bool) -> Strategy:
    """The strategy of an operator by its role in its block."""
    between = (*axes.cp, *axes.tp) if sequence_parallel else axes.cp
    if role.startswith("feed_forward.experts."):
        dims = _expert_dims(role, kind, axes)
    else:
        dims = _dims_by_role(role, axes, between) or _dims_by_kind(role, kind, axes, between)
    # the sum of the table's shards is scattered over the sequence, the layout that all readers want
    scattered = role == "tok_embeddings" and sequence_parallel and axes.tp
    out = (axes.dp, between, ()) if scattered else None
    return Strategy(dims={dim: which for dim, which in dims.items() if which}, out=out)


def _expert_dims(role: str, kind: str, axes: MeshAxes) -> dict[str, DimAxes]:
    """The split dims of an operator inside an expert's MLP."""
    rows = tuple(axis for axis in axes.dp if axis not in axes.ep)
    if kind == "matmul":
        return {"b0": axes.ep, "m": rows, "k" if role.endswith(".w2") else "n": axes.tp}
    return {"d0": axes.ep, "d1": rows, "d2": axes.tp}


def _dims_by_role(role: str, axes: MeshAxes, between: DimAxes) -> dict[str, DimAxes] | None:
    """Dims of an operator that occurs once in a model or a block; None for others.

    `between` are the axes that split the sequence between blocks.
    """
    dp, cp, tp = axes.dp, axes.cp, axes.tp
    whole_role: dict[str, dict[str, DimAxes]] = {
        "tok_embeddings": {"b0": dp, "b1": cp, "v": tp},
        "pos_embeddings.positions": {"d0": between},
        "pos_embeddings": {"b0": between},
        "type_embeddings.ids": {"d0": dp, "d1": between},
        "type_embeddings": {"b0": dp, "b1": between},
        "head.dense": {"b0": dp, "b1": between},
        "head.act": {"d0": dp, "d1": between},
    }
    by_part: dict[str, dict[str, DimAxes]] = {
        "router": {"b0": dp},
        "dispatch": {"b": dp},
        "combine": {"b": dp, "h": tp},  # the sum of the parts of w2 is scattered over the features
        **{key: {"b0": dp, "b1": between} for key in ("wq_a", "wkv_a", "wk_pos", "shared_gate")},
        "k_pos_heads": {"d0": dp, "d1": between},
        "k_pos_rope": {"b0": dp, "s": between},
        **{key: {"d0": dp, "d1": cp, "d2": tp} for key in ("k_pos", "k_joined")},
        "q_head_norm": {"b0": dp, "b1": cp, "b2": tp},
        "k_head_norm": {"b0": dp, "b1": cp, "b2": axes.kv},
    }
    return by_part.get(role.rpartition(".")[2]) or whole_role.get(role)


def _dims_by_kind(role: str, kind: str, axes: MeshAxes, between: DimAxes) -> dict[str, DimAxes]:
    """Dims of all other operators; `between` are the axes that split the sequence between blocks."""
    dp, cp, tp, kv = axes.dp, axes.cp, axes.tp, axes.kv
    part = role.rpartition(".")[2]
    if kind == "linear":
        split = {"wk": kv, "wv": kv}.get(part, tp)
        return {"b0": dp, "b1": cp, "k" if part in ("wo", "w2") else "n": split}
    if kind == "reshape":
        return {"d0": dp, "d1": cp, "d2": kv if part in ("k_heads", "v_heads") else tp}
    if kind == "rope":
        return {"b0": dp, "s": cp, "h": kv if part == "k_rope" else tp}
    if kind == "attention":
        served = tuple(axis for axis in tp if axis not in kv)
        return {"b0": dp, "s": cp, "h": kv} | ({"r": served} if served else {})
    if kind == "cross_entropy":
        return {"b0": dp, "b1": cp, "c": tp}
    if kind == "count_labels":
        return {"b0": dp, "b1": cp}
    if kind in ("rms_norm", "layer_norm"):
        return {"b0": dp, "b1": between}
    if part in ("act", "mul", "cast") or role.startswith("output."):
        return {"d0": dp, "d1": cp, "d2": tp}
    assert kind in ("add", "dropout", "mul", "sigmoid"), (role, kind)
    return {"d0": dp, "d1": between}
