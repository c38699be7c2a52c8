"""The operators of a transformer that are recomputed in the backward."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from plans.degrees.rules import MEMORY_BOUND, RECOMPUTE_MODES
from plans.errors import TwofoldError
from plans.model.graph import Graph, Operator
from plans.model.transformer.parts import parts_of

__all__ = ["recompute_set"]

_KEPT_BY_OPERATOR = (
    "attention.wq", "attention.wv", "attention.wq_a", "attention.wkv_a", "attention.wv_b", "attention.core",
    "feed_forward.w1", "feed_forward.w2",
)  # fmt: skip
"""Outputs that selection by operator keeps: attention, and every second matrix product in the order of the code."""

_NORMS = frozenset({"rms_norm", "layer_norm"})

_ACTIVATIONS = ("act", "mul")
"""Parts of an MLP: its activation function, and the product of a gated one."""

_KEYS_OF_LATENT = ("wk_b", "k_pos", "k_heads", "k_joined", "wv_b", "v_heads")
_QUERIES_OF_LATENT = ("wq_b", "q_heads", "q_rope")
"""Parts of latent attention that make keys, values and queries out of what is far smaller (DeepSeek-AI 2024, arXiv
2412.19437, section 3.2.3; Megatron-core's mla_up_proj)."""


def recompute_set(graph: Graph, mode: str | Sequence[str], layers: Collection[int] | None = None) -> tuple[str, ...]:
    """The operators to recompute, in graph order.

    Args:
        graph: graph of a transformer; with names, any graph.
        mode: "none"; "memory_bound": norms, activation functions and the up-projections of latent attention, which take
            little time to compute again for their memory (with sequence parallelism, what norms make is gathered again
            instead of kept, as Megatron-LM does); "selective":
            the attention core (Korthikanti et al. 2022, arXiv 2205.05198, section 5);
            "selective_op": as torchtitan's selective checkpointing by operator, the attention and every second product
            of a block are kept, all else is recomputed; "full": every operator of a block but the last sum, which is
            the next block's input and is kept; or names of operators, or of modules, of which every operator is
            recomputed.
        layers: numbers of the blocks to which a mode applies; all by default.

    Raises:
        TwofoldError: an unknown mode or name.
    """
    if isinstance(mode, str):
        return _of_mode(graph, mode, layers)
    found: set[str] = set()
    known = {operator.name for operator in graph.operators}
    for name in mode:
        inside = [name] if name in known else [
            operator.name for operator in graph.operators if f"{operator.module}.".startswith(f"{name}.")
        ]  # fmt: skip
        if not inside:
            raise TwofoldError(f"recompute names {name!r}, which is not an operator or module of graph {graph.name!r}")
        found.update(inside)
    return tuple(operator.name for operator in graph.operators if operator.name in found)


def _of_mode(graph: Graph, mode: str, layers: Collection[int] | None) -> tuple[str, ...]:
    if mode not in RECOMPUTE_MODES:
        raise TwofoldError(
            f"recompute {mode!r} is not known; known: {', '.join(RECOMPUTE_MODES)}, or a list of operators"
        )
    if mode == "none":
        return ()
    blocks = [block for number, block in enumerate(parts_of(graph).blocks) if layers is None or number in layers]
    found: list[str] = []
    for block in blocks:
        own = _up_projections(block)
        found += [name for name in block[:-1] if _recomputes(mode, graph.by_name[name], own)]
    return tuple(found)


def _up_projections(block: Sequence[str]) -> frozenset[str]:
    """The operators of a block between the latents of attention and its core."""
    parts = {name.rpartition(".attention.")[2]: name for name in block if ".attention." in name}
    keys = _KEYS_OF_LATENT if "wkv_a" in parts else ()
    queries = _QUERIES_OF_LATENT if "wq_b" in parts else ()
    return frozenset(parts[part] for part in (*keys, *queries) if part in parts)


def _recomputes(mode: str, operator: Operator, up_projections: frozenset[str]) -> bool:
    """Whether a mode computes an operator of a block again, which is not the block's last."""
    if mode == MEMORY_BOUND:
        cheap = operator.kind in _NORMS or operator.name.rpartition(".")[2] in _ACTIVATIONS
        return cheap or operator.name in up_projections
    if mode == "selective":
        return operator.name.endswith(".attention.core")
    return mode == "full" or not operator.name.endswith(_KEPT_BY_OPERATOR)
