"""Templates of transformers: one for every structure, independent of sizes.

The structure is what changes the instructions themselves: the kind of norm, biases, whether tensor parallelism is used,
what is recomputed. The sizes (hidden, heads, sequence, degrees) change only numbers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import msgspec

from plans.degrees.groups import mesh_axes, tensor_axes
from plans.degrees.rules import unpredicted
from plans.errors import TwofoldError
from plans.layout import Layout
from plans.lower.boundaries import find_boundaries
from plans.lower.collectives import collective_ways, ways_at_sizes
from plans.lower.emit import Ways, least_bytes
from plans.lower.stage_bodies import lower_stage
from plans.lower.symbolic.symbols import Monomials, Symbols
from plans.lower.symbolic.template import PieceTemplate, piece_template
from plans.model.transformer import (
    Experts,
    Latent,
    Rope,
    TransformerConfig,
    block_strategies,
    parts_of,
    recompute_set,
    sizes_of,
)
from plans.model.transformer.builder import build_graph
from plans.plan import Plan, Stage

__all__ = ["ModelTemplate", "model_sizes", "model_template"]

_TP, _TP_Q, _CP, _DP = 11, 17, 13, 97
_EP, _EXPERTS, _CAPACITY, _EXPERT_FFN, _SHARED = 61, 59, 41, 67, 71
_Q_RANK, _KV_RANK, _VALUE = 73, 83, 89
_NOPE, _ROPE, _QUERY = 79, 139, 109  # twos of them: a query has 2 x 79 + 2 x 139 = 4 x 109 elements
_BATCH, _SEQ, _HIDDEN, _KV, _GROUP, _HEAD, _FFN, _VOCAB, _ROWS = 43, 47, 53, 19, 23, 29, 31, 37, 10_007


_LARGE = 3
"""Sizes of axes from which on the shorter way to communicate a tensor along several of them is the same, apart from
mixtures of experts (tests/plans/lower/test_symbolic.py)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelTemplate:
    """The pieces of a transformer with symbolic sizes: "embedding", "block" and "head".

    In a mixture of experts whose first blocks have a plain MLP those are "dense_block".
    """

    monomials: Monomials
    pieces: Mapping[str, PieceTemplate]


def model_template(
    config: TransformerConfig,
    *,
    dp: int = 1,
    tp: int = 1,
    cp: int = 1,
    ep: int = 1,
    sequence_parallel: bool = False,
    recompute: str = "none",
    fused: bool = True,
) -> ModelTemplate:
    """The template of a configuration's structure; equal structures give the same object.

    Args:
        config: of a transformer.
        dp, tp, cp, ep: degrees.
        sequence_parallel: see `plans.model.transformer.block_strategies`.
        recompute: one of `plans.degrees.RECOMPUTE_MODES`.
        fused: see `plans.plan.Plan`.

    Raises:
        TwofoldError: sequence parallelism with more ranks than key-value heads.
    """
    if sentence := unpredicted(sizes_of(config), tp, sequence_parallel):
        raise TwofoldError(sentence)
    grouping = _grouping(config, tp)
    sp = sequence_parallel and tp > 1
    # what the rows of all samples add up to, gradients of positions, is summed over them in every backward
    copies = dp > ep and config.position == "learned"
    # which way is shorter depends on sizes where a tensor could be communicated along several axes
    real: tuple[tuple[str, int], ...] = ()
    if grouping == "spread":
        real = ("tp_kv", config.kv_heads), ("tp_q", tp // config.kv_heads)
    if copies:
        real = *(real or (("tp", tp),)), ("dp", dp // ep), ("cp", cp)
    if config.experts is None:
        real = tuple((axis, min(size, _LARGE)) for axis, size in real)
    made = _structure(_without_sizes(config), grouping, real, tp > 1, cp > 1, sp, ep > 1, copies)
    return made.template(recompute, fused)


@lru_cache(maxsize=64)
def _without_sizes(config: TransformerConfig) -> TransformerConfig:
    """The structure of a configuration."""
    experts = config.experts
    return replace(
        config,
        name="structure", num_layers=1, hidden=1, num_heads=1, num_kv_heads=1, ffn=1, vocab=1, seq=1,
        num_positions=None,
        head_dim=2 if config.latent is None else 3,
        latent=config.latent and Latent(
            kv_rank=1, q_rank=config.latent.q_rank and 1, nope_dim=1, rope_dim=2, value_dim=1
        ),
        dropout=0.1 if config.dropout else 0.0, attention_dropout=0.1 if config.attention_dropout else 0.0,
        norm_eps=1e-5, tied=False, source="", rope=Rope(angles=config.rope.angles),
        ignore_index=None if config.ignore_index is None else 0,
        experts=experts and Experts(
            num_experts=1, top_k=1, ffn=1, num_shared=min(1, experts.num_shared),
            num_dense_layers=min(1, experts.num_dense_layers), shared_gate=experts.shared_gate,
        ),
    )  # fmt: skip


def model_sizes(config: TransformerConfig, *, micro_batch: int, tp: int, cp: int, ep: int = 1) -> dict[str, int]:
    """The sizes of a template's symbols; `plans.degrees.check` says which degrees divide them.

    Args:
        config: see `model_template`.
        micro_batch: samples of one micro-batch on one rank of the data-parallel group.
        tp, cp, ep: degrees.
    """
    sizes = {
        "rows": config.position_rows, "seq": config.seq, "batch": micro_batch, "hidden": config.hidden,
        "kv_heads": config.kv_heads, "group": config.num_heads // config.kv_heads, "head_dim": config.head_size,
        "ffn": config.inner, "vocab": config.vocab, "cp": cp,
    }  # fmt: skip
    if (latent := config.latent) is not None:
        sizes |= {
            "q_rank": latent.q_rank or 1, "kv_rank": latent.kv_rank, "nope_dim": latent.nope_dim,
            "rope_dim": latent.rope_dim, "value_dim": latent.value_dim,
        }  # fmt: skip
    if (experts := config.experts) is not None:
        sizes |= {
            "experts": experts.num_experts, "expert_ffn": experts.ffn, "ep": ep,
            "capacity": experts.capacity(config.seq), "shared": max(1, experts.num_shared),
        }  # fmt: skip
    return sizes | dict(tensor_axes(tp, config.kv_heads))


def _grouping(config: TransformerConfig, tp: int) -> str:
    """How key-value heads are shared and split, which decides which sizes are independent."""
    if config.kv_heads == 1 and config.num_heads > 1:
        return "single"
    if tp > config.kv_heads:
        return "spread"
    return "each" if config.kv_heads == config.num_heads else "grouped"


class _Structure:
    """The parts that the templates of all recompute modes share."""

    def __init__(self, plan: Plan, names: Sequence[str], symbols: Symbols, ways: Ways) -> None:
        self._plan = plan
        self._names = names
        self._monomials = Monomials(symbols)
        self._ways = ways
        self._borders = find_boundaries(plan, plan.graph)
        self._pieces: dict[tuple[str, str, bool], PieceTemplate] = {}
        self._templates: dict[tuple[str, bool], ModelTemplate] = {}

    def template(self, recompute: str, fused: bool) -> ModelTemplate:
        """The template of a recompute mode; only blocks differ between modes."""
        if (recompute, fused) not in self._templates:
            self._templates[recompute, fused] = self._template(recompute, fused)
        return self._templates[recompute, fused]

    def _template(self, recompute: str, fused: bool) -> ModelTemplate:
        plan, pieces = None, {}
        for number, name in enumerate(self._names):
            mode = recompute if name.endswith("block") else "none"
            if (name, mode, fused) not in self._pieces:
                if plan is None:
                    chosen = recompute_set(self._plan.graph, recompute)
                    plan = msgspec.structs.replace(self._plan, recompute=chosen, fused=fused)
                bodies = lower_stage(plan, number, self._ways, self._borders)
                self._pieces[name, mode, fused] = piece_template(bodies, self._monomials)
            pieces[name] = self._pieces[name, mode, fused]
        return ModelTemplate(monomials=self._monomials, pieces=pieces)


@lru_cache(maxsize=256)
def _structure(
    structure: TransformerConfig, grouping: str, real: tuple[tuple[str, int], ...], tp: bool, cp: bool, sp: bool,
    ep: bool, copies: bool,
) -> _Structure:  # fmt: skip
    tensor = (_TP * _TP_Q if grouping == "spread" else _TP) if tp else 1
    context = _CP if cp else 1
    kv = {"single": 1, "spread": _TP}.get(grouping, tensor * _KV)
    group = {"each": 1, "single": tensor * _GROUP, "spread": _TP_Q * _GROUP}.get(grouping, _GROUP)
    seq = tensor * context * _SEQ
    hidden, experts, ways = _HIDDEN, structure.experts, _EP if ep else 1
    num_layers = 1 if experts is None else 1 + experts.num_dense_layers
    if experts is not None:  # what comes back from them is split by features
        hidden *= tensor
        count, factor = ways * _EXPERTS, (_CAPACITY - 0.5) * ways * _EXPERTS / seq
        experts = replace(
            experts,
            num_experts=count,
            ffn=tensor * _EXPERT_FFN,
            num_shared=_SHARED * experts.num_shared,
            capacity_factor=factor,
        )
    latent, head = structure.latent, (2 * _HEAD, _HEAD)
    if latent is not None:
        latent = Latent(
            kv_rank=_KV_RANK, q_rank=latent.q_rank and _Q_RANK, nope_dim=2 * _NOPE, rope_dim=2 * _ROPE, value_dim=_VALUE
        )
        head = 4 * _QUERY, _QUERY
    config = replace(
        structure, experts=experts, num_layers=num_layers, latent=latent,
        hidden=hidden, num_heads=kv * group, num_kv_heads=kv, head_dim=head[0], ffn=tensor * _FFN,
        vocab=tensor * _VOCAB, seq=_ROWS - structure.first_position if structure.position == "learned" else seq,
    )  # fmt: skip
    sizes = {
        "rows": (_ROWS, _ROWS), "seq": (seq, _SEQ), "ffn": (config.inner, _FFN), "vocab": (config.vocab, _VOCAB),
        "kv_heads": (kv, _KV), "group": (group, _GROUP), "head_dim": head, "batch": (_BATCH, _BATCH),
        "hidden": (hidden, _HIDDEN), "cp": (_CP, _CP),
    }  # fmt: skip
    if latent is not None:
        sizes |= {
            "q_rank": (_Q_RANK, _Q_RANK), "kv_rank": (_KV_RANK, _KV_RANK), "nope_dim": (2 * _NOPE, _NOPE),
            "rope_dim": (2 * _ROPE, _ROPE), "value_dim": (_VALUE, _VALUE),
        }  # fmt: skip
    if experts is not None:
        sizes |= {
            "experts": (ways * _EXPERTS, _EXPERTS), "expert_ffn": (tensor * _EXPERT_FFN, _EXPERT_FFN), "ep": (_EP, _EP),
            "capacity": (_CAPACITY, _CAPACITY), "shared": (_SHARED, _SHARED),
        }  # fmt: skip
    if grouping in ("single", "spread"):
        del sizes["kv_heads"]
    if grouping == "each":
        del sizes["group"]
    sizes |= {"tp_kv": (_TP, _TP), "tp_q": (_TP_Q, _TP_Q)} if grouping == "spread" else {"tp": (_TP, _TP)}
    symbols = Symbols(
        sizes={symbol: size for symbol, (size, _) in sizes.items()},
        marks={symbol: mark for symbol, (_, mark) in sizes.items()},
    )
    first = experts is not None and experts.num_dense_layers
    names = ("embedding", "dense_block", "block", "head") if first else ("embedding", "block", "head")
    plan = _plan(config, seq, tensor, context, sp, (_DP if copies else 1) * ways, ways)
    return _Structure(plan, names, symbols, _ways(real, by_collectives=ep and tp))


def _ways(real: tuple[tuple[str, int], ...], *, by_collectives: bool) -> Ways:
    ways: Ways = collective_ways() if by_collectives else least_bytes
    return ways_at_sizes(ways, dict(real)) if real else ways


def _plan(config: TransformerConfig, seq: int, tp: int, cp: int, sp: bool, dp: int, ep: int) -> Plan:
    """Every piece on ranks of its own, one micro-batch."""
    graph = build_graph(config, _BATCH * dp, seq)
    axes = mesh_axes(dp=dp, cp=cp, tp=tp, num_kv_heads=config.kv_heads, ep=ep)
    parts = parts_of(graph)
    width = math.prod(axes.sizes)
    stages = tuple(
        Stage(
            mesh=Layout(axes.sizes, axes.names, list(range(number * width, (number + 1) * width))), operators=operators
        )
        for number, operators in enumerate((parts.embedding, *parts.blocks, parts.head))
    )
    return Plan(graph=graph, stages=stages, strategies=block_strategies(graph, axes, sequence_parallel=sp))
