"""Transformers drawn at random are recognised as themselves, and graphs that differ from one are not taken for it."""

from __future__ import annotations

import random
from typing import Any

import pytest
from msgspec import structs

from plans.errors import TwofoldError
from plans.model.graph import Graph, Operator
from plans.model.transformer import TransformerConfig, transformer
from plans.model.transformer.config import Rope, Scales
from plans.model.transformer.recognise import Recognised, recognise

SIZES: dict[str, Any] = {"num_layers": 2, "hidden": 16, "num_heads": 4, "vocab": 48, "seq": 8, "dtype": "float32"}
FIELDS: dict[str, tuple[Any, ...]] = {
    "num_kv_heads": (1, 2, 4), "head_dim": (4, 8, 16), "ffn": (24, 32), "num_layers": (1, 2, 3),
    "gated": (True, False), "activation": ("silu", "gelu", "relu"), "mlp_bias": (False, True),
    "norm": ("rms", "layer", "layer_no_bias", "layer_no_weights"), "norm_eps": (1e-5, 1e-6), "norm_offset": (0.0, 1.0),
    "norm_place": ("before", "after", "around", "sum"), "qk_norm": ("none", "head", "row", "head_no_weights"),
    "embedding_norm": (False, True), "parallel_residual": (False, True), "shared_norm": (False, True),
    "qkv_bias": (False, True), "out_bias": (False, True), "head_bias": (False, True), "tied": (False, True),
    "position": ("rope", "learned", "none"), "first_position": (0, 2), "num_positions": (10, 12),
    "token_types": (0, 2), "segment": (None, 1), "causal": (True, False), "head_transform": (False, True),
    "rope": (
        Rope(fraction=0.5), Rope(interleaved=True), Rope(base=5e5, scaling="llama3", factor=8.0, original_seq=4096),
        Rope(scaling="linear", factor=2.0), Rope(scaling="llama3", low_factor=2.0, high_factor=3.0),
    ),
    "scales": (Scales(embedding=4.0), Scales(attention=0.3), Scales(residual=0.5), Scales(logits=0.25)),
    "dropout": (0.0, 0.1), "attention_dropout": (0.0, 0.2), "embedding_dropout": (None, 0.0, 0.3),
    "ignore_index": (None, -1), "dtype": ("float32", "bfloat16"), "float_loss": (True, False),
}  # fmt: skip


def drawn(draw: random.Random) -> TransformerConfig:
    while True:
        changed = {name: draw.choice(FIELDS[name]) for name in draw.sample(list(FIELDS), draw.randint(2, 9))}
        try:
            return TransformerConfig(**SIZES | changed)
        except TwofoldError:
            continue  # they contradict each other


def test_drawn_transformers_are_recognised_as_themselves() -> None:
    for seed in range(400):
        config = drawn(random.Random(seed))
        graph = transformer(config, batch_size=4)
        try:
            found = recognise(graph)
        except TwofoldError as error:
            raise AssertionError(f"{seed}, {config}: {error}") from error
        assert transformer(found.config, batch_size=4) == graph, (seed, config)
        assert all(name == own for name, own in found.names.items())
        assert sum(tensor.num_elements for tensor in graph.parameters) == found.config.num_parameters


def test_positions_that_no_rule_has_are_refused() -> None:
    for changed in ({"position": "alibi"}, {"scales": Scales(logits_cap=30.0)}):
        with pytest.raises(TwofoldError, match="is not a supported transformer"):
            recognise(transformer(TransformerConfig(**SIZES | changed), batch_size=4))


SIMILAR = {"silu": "gelu", "gelu": "relu", "relu": "silu", "add": "sub", "mul": "div", "rms_norm": "layer_norm"}


def missed(draw: random.Random, graph: Graph) -> Graph | None:
    """The graph with one change of one operator; None where that cannot be."""
    at = draw.randrange(len(graph.operators) - 1)
    operator, ways = graph.operators[at], []
    made_later = {name for each in graph.operators[at:] for name in each.outputs}
    for place, name in enumerate(operator.inputs):
        own = graph.tensors[name]
        others = [
            other for other in graph.tensors.values()
            if (other.shape, other.dtype) == (own.shape, own.dtype) and other is not own
            and other.name not in made_later
        ]  # fmt: skip
        if others:
            inputs = list(operator.inputs)
            inputs[place] = draw.choice(others).name
            ways.append(structs.replace(operator, inputs=tuple(inputs)))
    for key, value in operator.attrs.items():
        if key not in ("seed", "approximate", "num_dims", "padding_id"):
            other: Any = (
                not value if isinstance(value, bool) else value * 2 + 1 if isinstance(value, int | float) else None
            )
            ways += [] if other is None else [structs.replace(operator, attrs=operator.attrs | {key: other})]
    if operator.kind in SIMILAR:
        ways.append(structs.replace(operator, kind=SIMILAR[operator.kind]))
    if len(operator.inputs) == 2:
        ways.append(structs.replace(operator, inputs=operator.inputs[::-1]))
    if not ways:
        return None
    operators = (*graph.operators[:at], draw.choice(ways), *graph.operators[at + 1 :])
    read = {name for each in operators for name in (*each.inputs, *each.outputs)}
    tensors = {name: tensor for name, tensor in graph.tensors.items() if name in read}
    try:
        changed = structs.replace(graph, operators=operators, tensors=tensors)
        return changed if all(changed.spec(each) for each in operators) else None
    except (TwofoldError, ValueError):  # shapes that do not fit
        return None


def settings(operator: Operator) -> dict[str, Any]:
    return {key: value for key, value in operator.attrs.items() if key not in ("seed", "padding_id")}


def is_same_function(found: Recognised, given: Graph, model: Graph) -> bool:
    """Whether the operators correspond one to one, as do the tensors that they read."""
    tensors: dict[str, str] = {}
    if sorted(found.names.values()) != sorted(each.name for each in given.operators):
        return False
    for mine in model.operators:
        own = given.by_name[found.names[mine.name]]
        if (mine.kind, settings(mine), len(mine.inputs)) != (own.kind, settings(own), len(own.inputs)):
            return False
        orders = [own.inputs, own.inputs[::-1]] if own.kind in ("add", "mul") else [own.inputs]
        fit = [
            order for order in orders
            if all(tensors.get(one, other) == other for one, other in zip(mine.inputs, order, strict=True))
        ]  # fmt: skip
        if not fit:
            return False
        for one, other in zip((*mine.inputs, *mine.outputs), (*fit[0], *own.outputs), strict=True):
            tensors[one] = other
            if model.tensors[one].shape != given.tensors[other].shape:
                return False
    return len(set(tensors.values())) == len(tensors)


def test_what_is_recognised_corresponds_to_the_graph_operator_by_operator() -> None:
    """Of graphs with one change: most are refused, some are other transformers or the same function."""
    refused = taken = 0
    for seed in range(600):
        draw = random.Random(seed)
        graph = missed(draw, transformer(drawn(draw), batch_size=4))
        if graph is None:
            continue
        try:
            found = recognise(graph)
        except TwofoldError:
            refused += 1
            continue
        taken += 1
        model = transformer(found.config, batch_size=4)
        assert is_same_function(found, found.graph, model), (seed, found.config)
    assert refused > 200 and taken > 30, (refused, taken)
