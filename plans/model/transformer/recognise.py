"""Recognises a transformer in the graph of a module, independent of names.

The features of the graph (sizes, norms, positions, biases) determine a `TransformerConfig`. The graph of that
configuration is then compared with the given one, operator by operator, from the loss back to the inputs: kinds,
settings, shapes and dtypes must be equal, and tensors must correspond one to one. A graph is recognised only if it
passes, so that a plan for the configuration is a plan for the module under other names.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from msgspec import structs

from plans.errors import TwofoldError
from plans.model.graph import Graph, Operator, Tensor
from plans.model.transformer.builder import build_graph
from plans.model.transformer.config import Rope, Scales, TransformerConfig
from plans.model.transformer.recompute import recompute_set
from plans.model.whole import apart
from plans.plan import Plan

__all__ = ["NO_MODE", "Recognised", "recognise"]

_FREE = ("seed", "approximate", "num_dims", "padding_id")
"""Settings that may differ: no layout, no instruction and no price depends on them."""

NO_MODE = "asks to compute other operators again than whole blocks or attention cores"
"""Reason why a transformer whose checkpoints match no recompute mode is not searched over degrees."""

_COMMUTE = ("add", "mul")
_ACTIVATIONS = ("silu", "gelu", "relu")


@dataclass(frozen=True, kw_only=True)
class Recognised:
    """A graph that is that of a transformer.

    Args:
        config: the transformer.
        graph: the given graph, its operators in the order in which `transformer` has them; what it makes in one product
            and `transformer` in several has a product and parts of the weights each (`plans.model.whole.apart`).
        names: operator of the graph of `config` -> operator of the given one.
    """

    config: TransformerConfig
    graph: Graph
    names: Mapping[str, str]

    @cached_property
    def recompute(self) -> str | None:
        """The mode of `recompute_set` that the module asks for by its checkpoints; None where they are of no mode."""
        wanted = set(self.graph.recompute)
        if not wanted:
            return "none"
        model = build_graph(self.config, self.graph.batch_size, self.config.seq)
        for mode in ("full", "selective"):
            if {self.names[name] for name in recompute_set(model, mode)} == wanted:
                return mode
        return None

    def plan(self, plan: Plan) -> Plan:
        """A plan for the graph of `config`, under the names of the given graph.

        >>> from plans.degrees import Degrees
        >>> from plans.degrees.plan import plan_of
        >>> from plans.model.transformer import transformer
        >>> graph = transformer("gpt2", batch_size=4, num_layers=1)
        >>> plan = plan_of(Degrees(dp=4, global_batch=4), graph)
        >>> recognise(graph).plan(plan) == plan
        True
        """
        names = self.names
        return structs.replace(
            plan,
            graph=self.graph.with_batch(plan.graph.batch_size),
            stages=tuple(
                structs.replace(stage, operators=tuple(names[operator] for operator in stage.operators))
                for stage in plan.stages
            ),
            strategies={names[name]: strategy for name, strategy in plan.strategies.items()},
            recompute=tuple(names[name] for name in plan.recompute),
            optimizer=plan.optimizer.for_parts(self.graph),
        )


def recognise(graph: Graph) -> Recognised:
    """Recognise the transformer that a graph computes.

    Raises:
        TwofoldError: it is not a graph that `transformer` builds; with the first difference that was found.

    >>> from plans.model.transformer import transformer, transformer_config
    >>> config = transformer_config("llama-3-8b", num_layers=2)
    >>> recognise(transformer(config, batch_size=2)).config.num_parameters == config.num_parameters
    True
    """
    try:
        return _recognised(graph)
    except TwofoldError:
        separate = apart(graph)
        if separate == graph:
            raise
    return _recognised(separate)


def _recognised(graph: Graph) -> Recognised:
    reasons: list[tuple[int, str]] = []
    for config in _candidates(graph):
        model = build_graph(config, graph.batch_size, config.seq)
        matching = _Matching(model, graph)
        try:
            matched = matching.run()
        except _Different as difference:
            reasons.append((len(matching.operators), str(difference)))
            continue
        own = graph.by_name
        names = {operator.name: matched[operator.outputs[0]].name for operator in model.operators}
        return Recognised(
            config=config, names=names,
            graph=structs.replace(graph, operators=tuple(own[names[operator.name]] for operator in model.operators)),
        )  # fmt: skip
    _, nearest = max(reasons, key=lambda reason: reason[0])
    raise TwofoldError(f"{graph.name} is not a supported transformer: {nearest}")


class _Different(Exception):
    """The first difference between the graph and that of a configuration."""


class _Matching:
    """Pairs the tensors of the graph of a configuration with those of a given graph."""

    def __init__(self, model: Graph, given: Graph) -> None:
        self.model, self.given = model, given
        self.tensors: dict[str, str] = {}
        self.back: dict[str, str] = {}
        self.operators: dict[str, Operator] = {}

    def run(self) -> dict[str, Operator]:
        """Output of the graph of the configuration -> operator of the given graph.

        Raises:
            _Different: the graphs are not equal.
        """
        waiting = [(self.model.loss, self.given.loss)]
        while waiting:
            mine, theirs = waiting.pop()
            if self.tensors.get(mine) == theirs:
                continue
            if mine in self.tensors or theirs in self.back:
                raise _Different(f"{theirs!r} is read where another tensor is expected")
            self.tensors[mine], self.back[theirs] = theirs, mine
            self._check_tensor(self.model.tensors[mine], self.given.tensors[theirs])
            maker, other = self.model.producers().get(mine), self.given.producers().get(theirs)
            if maker is not None and other is not None:
                self.operators[mine] = other
                waiting += zip(maker.inputs, self._inputs(maker, other), strict=True)
        if len(self.operators) != len(self.given.operators):
            found = {operator.name for operator in self.operators.values()}
            more = next(operator for operator in self.given.operators if operator.name not in found)
            raise _Different(f"operator {more.name!r} ({more.kind}) is not part of it")
        return self.operators

    def _check_tensor(self, mine: Tensor, theirs: Tensor) -> None:
        if mine.kind != theirs.kind or mine.shape != theirs.shape:
            raise _Different(
                f"{theirs.name!r} is {theirs.kind} of {theirs.shape} instead of {mine.kind} of {mine.shape}"
            )
        if mine.kind != "constant" and mine.dtype != theirs.dtype:
            raise _Different(f"{theirs.name!r} is in {theirs.dtype} instead of {mine.dtype}")

    def _inputs(self, mine: Operator, theirs: Operator) -> tuple[str, ...]:
        """The inputs of `theirs` in the order of those of `mine`."""
        if mine.kind != theirs.kind or len(mine.inputs) != len(theirs.inputs):
            raise _Different(f"operator {theirs.name!r} ({theirs.kind}) replaces {mine.name} ({mine.kind})")
        if (own := _settings(self.model, mine)) != (other := _settings(self.given, theirs)):
            raise _Different(f"operator {theirs.name!r} ({theirs.kind}) has the settings {other}, not {own}")
        given = theirs.inputs
        if mine.kind in _COMMUTE and len(given) == 2:
            wanted = [self._look(self.model, name, 3) for name in mine.inputs]
            if [self._look(self.given, name, 3) for name in reversed(given)] == wanted:
                return given if [self._look(self.given, name, 3) for name in given] == wanted else given[::-1]
        return given

    def _look(self, graph: Graph, name: str, depth: int) -> Any:
        """The last few operators that produce a tensor."""
        maker = graph.producers().get(name)
        if maker is None or not depth:
            tensor = graph.tensors[name]
            return tensor.kind, tensor.shape
        parts = [self._look(graph, each, depth - 1) for each in maker.inputs]
        return maker.kind, tuple(sorted(parts, key=repr) if maker.kind in _COMMUTE else parts)


def _settings(graph: Graph, operator: Operator) -> dict[str, Any]:
    """The settings of an operator that must be equal."""
    found = {name: value for name, value in operator.attrs.items() if name not in _FREE}
    if operator.kind == "attention":
        size = graph.tensors[operator.inputs[0]].shape[-1]
        if math.isclose(found.get("scale", 0.0), 1 / math.sqrt(size), rel_tol=1e-6):  # type: ignore[arg-type]
            del found["scale"]
        found = {name: value for name, value in found.items() if value is not False}
    return found


# -- what a graph says of itself


def _candidates(graph: Graph) -> Iterator[TransformerConfig]:
    """Configurations that the graph may be of, the likeliest first.

    Raises:
        TwofoldError: it has not the parts of a transformer.
    """
    config = _Features(graph).config()
    yield config
    for place in ("sum", "after", "around"):
        yield replace(config, norm_place=place)
    for shared in (False, True):
        yield replace(config, parallel_residual=True, shared_norm=shared)


class _Features:
    """Features of a graph that determine the configuration of the transformer."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.makers = graph.producers()
        self.kinds: dict[str, list[Operator]] = {}
        for operator in graph.operators:
            self.kinds.setdefault(operator.kind, []).append(operator)
        self._expect("cross_entropy", 1)
        self._expect("attention", None)
        self._expect("embedding", None)

    def _expect(self, kind: str, count: int | None) -> None:
        found = len(self.kinds.get(kind, ()))
        if not found or (count is not None and found != count):
            raise TwofoldError(f"{self.graph.name} is not a supported transformer: it has {found} {kind} operators")

    def _refused(self, reason: str) -> TwofoldError:
        return TwofoldError(f"{self.graph.name} is not a supported transformer: {reason}")

    def config(self) -> TransformerConfig:
        """The most likely configuration of the graph."""
        graph, tensors = self.graph, self.graph.tensors
        loss, attentions = self.makers[graph.loss], self.kinds["attention"]
        head = self._behind(loss.inputs[0], "cast", "mul")
        tables = [operator for operator in self.kinds["embedding"] if tensors[operator.inputs[0]].kind == "input"]
        if head is None or head.kind != "linear" or not tables or len(tensors[loss.inputs[1]].shape) != 2:
            raise self._refused("it does not map tokens [batch, length] to logits and their loss")
        table = next(
            (table for table in tables if tensors[table.inputs[1]].shape == tensors[head.inputs[1]].shape), None
        )
        if table is None:
            raise self._refused("its head does not have the size of a table of embeddings")
        core, weight = attentions[0], tensors[table.inputs[1]]
        if core.attrs.get("layout") != "bshd" or len(tensors[core.inputs[0]].shape) != 4:
            raise self._refused(f"the attention {core.name!r} does not take [batch, length, heads, size]")
        q, k = (tensors[name].shape for name in core.inputs[:2])
        query, out = self._product_before(core.inputs[0]), self._product_after(core)
        return TransformerConfig(
            name=graph.name, num_layers=len(attentions), hidden=weight.shape[1], num_heads=q[2], num_kv_heads=k[2],
            head_dim=q[3], vocab=weight.shape[0], seq=q[1], causal=bool(core.attrs.get("causal", False)),
            qkv_bias=query is not None and len(query.inputs) > 2, out_bias=out is not None and len(out.inputs) > 2,
            head_bias=len(head.inputs) > 2, head_transform=self._is_transformed(head),
            tied=head.inputs[1] == table.inputs[1], dtype=weight.dtype,
            float_loss=tensors[loss.inputs[0]].dtype in ("float32", "float64"),
            attention_dropout=float(core.attrs.get("p", 0.0)),  # type: ignore[arg-type]
            ignore_index=loss.attrs.get("ignore_index"),  # type: ignore[arg-type]
            scales=replace(
                self._scales(core, q[3]), embedding=self._factor(table), logits=self._factor(head),
                residual=1.0 if out is None else self._factor(out),
            ), **self._norms(core), **self._mlp(), **self._positions(q[3]),
        )  # fmt: skip

    def _behind(self, name: str, *kinds: str) -> Operator | None:
        """The operator that produces a tensor, skipping operators of these kinds with one input."""
        maker = self.makers.get(name)
        while maker is not None and maker.kind in kinds and len(maker.inputs) == 1:
            maker = self.makers.get(maker.inputs[0])
        return maker

    def _product_before(self, name: str) -> Operator | None:
        maker = self.makers.get(name)
        while maker is not None and maker.kind in ("rope", "reshape", "rms_norm", "layer_norm"):
            maker = self.makers.get(maker.inputs[0])
        return maker if maker is not None and maker.kind == "linear" else None

    def _product_after(self, core: Operator) -> Operator | None:
        flat = next((operator for operator in self.kinds.get("reshape", ()) if operator.inputs == core.outputs), None)
        return None if flat is None else next(
            (operator for operator in self.kinds.get("linear", ()) if operator.inputs[0] == flat.outputs[0]), None
        )  # fmt: skip

    def _is_transformed(self, head: Operator) -> bool:
        """Whether the head begins with a product, an activation and a norm (BERT)."""
        norm = self.makers.get(head.inputs[0])
        act = self.makers.get(norm.inputs[0]) if norm is not None and norm.inputs else None
        return act is not None and act.kind in _ACTIVATIONS

    def _scales(self, core: Operator, size: int) -> Scales:
        scale = core.attrs.get("scale")
        is_usual = scale is None or math.isclose(scale, 1 / math.sqrt(size), rel_tol=1e-6)  # type: ignore[arg-type]
        return Scales() if is_usual else Scales(attention=float(scale))  # type: ignore[arg-type]

    def _factor(self, made_by: Operator) -> float:
        """The factor that is applied to an operator's output before it is read; 1 if there is none."""
        readers = self.graph.consumers()[made_by.outputs[0]]
        while len(readers) == 1 and readers[0].kind in ("dropout", "rms_norm", "layer_norm"):
            readers = self.graph.consumers()[readers[0].outputs[0]]
        is_scaled = len(readers) == 1 and readers[0].kind == "mul" and len(readers[0].inputs) == 1
        return float(readers[0].attrs["number"]) if is_scaled else 1.0  # type: ignore[arg-type]

    def _norms(self, core: Operator) -> dict[str, Any]:
        wide = [operator for kind in ("rms_norm", "layer_norm") for operator in self.kinds.get(kind, ())]
        if not wide:
            raise self._refused("it has no norms")
        last = wide[-1]
        if last.kind == "rms_norm":
            kind = "rms"
        else:
            kind = {3: "layer", 2: "layer_no_bias", 1: "layer_no_weights"}[len(last.inputs)]
        found: dict[str, Any] = {
            "norm": kind, "norm_eps": last.attrs["eps"], "norm_offset": last.attrs.get("offset", 0.0)
        }  # fmt: skip
        before = self._behind(core.inputs[0], "rope") if self.makers[core.inputs[0]].kind != "rope" else (
            self.makers.get(self.makers[core.inputs[0]].inputs[0])
        )  # fmt: skip
        if before is not None and before.kind in ("rms_norm", "layer_norm"):
            found["qk_norm"] = "head" if len(before.inputs) > 1 else "head_no_weights"
        elif before is not None and before.kind == "reshape":
            flat = self.makers.get(before.inputs[0])
            found["qk_norm"] = "row" if flat is not None and flat.kind in ("rms_norm", "layer_norm") else "none"
        first = self.kinds["embedding"][0].outputs[0]
        after = [
            operator
            for operator in wide
            if self._sums(operator.inputs[0]) and self._comes_from(operator.inputs[0], first)
        ]
        found["embedding_norm"] = bool(after) and self._is_only_norm(after[0])
        return found

    def _sums(self, name: str) -> bool:
        maker = self.makers.get(name)
        return maker is not None and maker.kind in ("add", "embedding", "mul")

    def _comes_from(self, name: str, table: str) -> bool:
        """Whether a tensor is a table's rows times a number, or a sum of them with other tables' rows."""
        while name != table:
            maker = self.makers.get(name)
            if maker is None or maker.kind not in ("add", "mul") or (len(maker.inputs) > 1 and maker.kind == "mul"):
                return False
            others = [self.makers.get(each) for each in maker.inputs[1:]]
            if any(other is None or other.kind != "embedding" for other in others):
                return False
            name = maker.inputs[0]
        return True

    def _is_only_norm(self, norm: Operator) -> bool:
        """Whether all that follows the embedding reads it through this norm."""
        return len(self.graph.consumers()[norm.inputs[0]]) == 1

    def _mlp(self) -> dict[str, Any]:
        acts = [operator for kind in _ACTIVATIONS for operator in self.kinds.get(kind, ())]
        if not acts:
            raise self._refused("its blocks have no silu, gelu or relu")
        act = acts[0]
        product = self.makers.get(act.inputs[0])
        readers = self.graph.consumers()[act.outputs[0]]
        if product is None or product.kind != "linear" or len(readers) != 1:
            raise self._refused(f"{act.name!r} is not between the products of an MLP")
        return {
            "activation": act.kind, "gated": readers[0].kind == "mul", "mlp_bias": len(product.inputs) > 2,
            "ffn": self.graph.tensors[act.inputs[0]].shape[-1],
        }  # fmt: skip

    def _positions(self, size: int) -> dict[str, Any]:
        found: dict[str, Any] = {"position": "none", "dropout": 0.0, "embedding_dropout": 0.0}
        tensors, seen = self.graph.tensors, set[str]()
        for operator in self.graph.operators:
            if operator.kind == "dropout":
                found["dropout" if "attention" in seen else "embedding_dropout"] = operator.attrs["p"]
            seen.add(operator.kind)
        for operator in self.kinds["embedding"]:
            ids = self.makers.get(operator.inputs[0])
            if ids is not None and ids.kind == "arange":
                first: Any = ids.attrs["start"]
                found |= {"position": "learned", "first_position": first}
                rows = tensors[operator.inputs[1]].shape[0]
                if rows > first + tensors[ids.outputs[0]].shape[0]:
                    found["num_positions"] = rows
            elif ids is not None and ids.kind == "fill":
                found |= {"token_types": tensors[operator.inputs[1]].shape[0], "segment": ids.attrs["value"]}
            elif operator is not self.kinds["embedding"][0] and tensors[operator.inputs[0]].kind == "input":
                found["token_types"] = tensors[operator.inputs[1]].shape[0]
        if ropes := self.kinds.get("rope"):
            found |= {"position": "rope", "rope": self._rope(ropes[0], size)}
        return found

    def _rope(self, rope: Operator, size: int) -> Rope:
        attrs, interleaved = rope.attrs, bool(rope.attrs.get("interleaved", False))
        if len(rope.inputs) > 1:
            turned = 2 * self.graph.tensors[rope.inputs[1]].shape[-1]
            angles: Any = "frequencies" if len(rope.inputs) == 2 else "tables"
            return Rope(interleaved=interleaved, angles=angles, fraction=turned / size)
        named = ("base", "scaling", "factor", "low_factor", "high_factor", "original_seq")
        stated: dict[str, Any] = {name: attrs[name] for name in named if name in attrs}
        if "rotary" in attrs:
            rotary: Any = attrs["rotary"]
            stated["fraction"] = rotary / size
        return Rope(interleaved=interleaved, **stated)
