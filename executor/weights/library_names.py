"""Weight names of Hugging Face transformers for a model that was planned from its configuration.

The graph of such a model has its own names. Combined tensors of the library are split into parts (`plans.model.part`),
so that the library's files can be read and weights can be written under the library's names.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from executor.weights.files import read_weights
from plans.errors import TwofoldError
from plans.model.graph import Graph, Tensor
from plans.model.part import Part
from plans.model.transformer import transformer
from plans.model.transformer.parts import is_transformer
from plans.reading import read_json

__all__ = ["KNOWN_TYPES", "library_parts", "with_names_of_files"]

_LLAMA = {
    "tok_embeddings": "model.embed_tokens", "norm": "model.norm", "output": "lm_head", "layers": "model.layers",
    "attention_norm": "input_layernorm", "attention.wq": "self_attn.q_proj", "attention.wk": "self_attn.k_proj",
    "attention.wv": "self_attn.v_proj", "attention.wo": "self_attn.o_proj",
    "attention.q_head_norm": "self_attn.q_norm", "attention.k_head_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm", "feed_forward.w1": "mlp.gate_proj", "feed_forward.w3": "mlp.up_proj",
    "feed_forward.w2": "mlp.down_proj",
}  # fmt: skip
_PHI3 = _LLAMA | {
    "attention.wq": "self_attn.qkv_proj", "attention.wk": "self_attn.qkv_proj", "attention.wv": "self_attn.qkv_proj",
    "feed_forward.w1": "mlp.gate_up_proj", "feed_forward.w3": "mlp.gate_up_proj",
}  # fmt: skip
_OLMO2 = _LLAMA | {
    "attention.q_row_norm": "self_attn.q_norm", "attention.k_row_norm": "self_attn.k_norm",
    "attention_norm": "post_attention_layernorm", "ffn_norm": "post_feedforward_layernorm",
}  # fmt: skip
_NEOX = {
    "tok_embeddings": "gpt_neox.embed_in", "norm": "gpt_neox.final_layer_norm", "output": "embed_out",
    "layers": "gpt_neox.layers", "attention_norm": "input_layernorm", "attention.wq": "attention.query_key_value",
    "attention.wk": "attention.query_key_value", "attention.wv": "attention.query_key_value",
    "attention.wo": "attention.dense", "ffn_norm": "post_attention_layernorm", "feed_forward.w1": "mlp.dense_h_to_4h",
    "feed_forward.w2": "mlp.dense_4h_to_h",
}  # fmt: skip
_NAMES = {
    "gpt_neox": _NEOX, "granite": _LLAMA, "llama": _LLAMA, "mistral": _LLAMA, "olmo": _LLAMA, "olmo2": _OLMO2,
    "phi3": _PHI3, "qwen2": _LLAMA, "qwen3": _LLAMA,
}  # fmt: skip

_BY_HEADS = ("gpt_neox",)
"""Model types that keep queries, keys and values of one head next to each other, then those of the next."""

KNOWN_TYPES = tuple(sorted(_NAMES))
"""The model types of the library whose names are known."""

_SAME = ("attention", "layer_norm", "mul", "rms_norm", "rope")
"""Operators whose settings tell models with equal weights apart."""


def library_parts(graph: Graph, config: str | os.PathLike[str]) -> dict[str, Part]:
    """For every parameter of a graph the library's parameter of which it is a part; those of one tensor are adjacent.

    Args:
        graph: graph of a transformer by its name or configuration, maybe with fewer blocks than the configuration says.
        config: config.json of the library.

    Raises:
        TwofoldError: another graph, a model type whose names are not known, a configuration of another model.
    """
    config = Path(config)
    keys = read_json(config, "the config.json", dict[str, Any])
    model_type = keys.get("model_type")
    if model_type not in _NAMES:
        raise TwofoldError(
            f"{str(config)!r}: the names of model_type {str(model_type)[:80]!r} are not known; known: "
            f"{', '.join(KNOWN_TYPES)}; plan the module itself, and its weights keep their names"
        )
    if not is_transformer(graph):
        raise TwofoldError(f"{str(config)!r}: the plan is of another module, whose weights have its own names")
    _check_same_model(graph, config)
    parameters = {tensor.name: tensor for tensor in graph.parameters}
    of_library = {name: _name(name, _NAMES[model_type]) for name in parameters}
    heads = keys["num_attention_heads"] if model_type in _BY_HEADS else 1
    beside: dict[str, list[Tensor]] = {}
    for name in sorted(parameters, key=_place):
        beside.setdefault(of_library[name], []).append(parameters[name])
    return {tensor.name: part for name, tensors in beside.items() for tensor, part in _cut(name, tensors, heads)}


def with_names_of_files(graph: Graph, weights: str, config: str = "") -> Graph:
    """The graph that reads weights by the library's names; unchanged if they have its own names.

    Args:
        graph: of a plan.
        weights: file or folder of weights (`executor.weights.files`).
        config: config.json of the library; "": that of the folder, or of the folder of the file, if there is one.

    Raises:
        TwofoldError: see `library_parts` and `read_weights`; a config for a graph that is not of a transformer by name.
    """
    place = Path(weights)
    path = Path(config) if config else (place if place.is_dir() else place.parent) / "config.json"
    if not config and (graph.parts or not is_transformer(graph) or not path.is_file()):
        return graph
    found = read_weights(weights)
    if all(tensor.name in found for tensor in graph.parameters):
        return graph
    return msgspec.structs.replace(graph, parts=library_parts(graph, path))


def _name(name: str, known: Mapping[str, str]) -> str:
    module, _, kind = name.rpartition(".")
    found = re.fullmatch(r"layers\.(\d+)\.(.+)", module)
    theirs = known.get(module if found is None else found[2])
    if theirs is None:
        raise TwofoldError(f"the plan has the weight {name!r}, which the library's model does not have")
    return f"{theirs}.{kind}" if found is None else f"{known['layers']}.{found[1]}.{theirs}.{kind}"


_ORDER = ("wq", "wk", "wv", "w1", "w3")


def _place(name: str) -> int:
    """The order in which tensors are adjacent."""
    last = name.rpartition(".")[0].rpartition(".")[2]
    return _ORDER.index(last) if last in _ORDER else len(_ORDER)


def _cut(name: str, tensors: list[Tensor], heads: int) -> list[tuple[Tensor, Part]]:
    """Tensors as parts of one: rows after rows, or, for several, some rows of each for every head."""
    rows, rest = sum(tensor.shape[0] for tensor in tensors), tensors[0].shape[1:]
    shape, first, found = (rows, *rest), 0, list[tuple[Tensor, Part]]()
    heads = heads if len(tensors) > 1 else 1
    view = shape if heads == 1 else (heads, rows // heads, *rest)
    outer = () if heads == 1 else ((0, heads),)
    for tensor in tensors:
        last = first + tensor.shape[0] // heads
        region = (*outer, (first, last), *((0, size) for size in rest))
        found.append((tensor, Part(name=name, shape=shape, view=view, region=region)))
        first = last
    return found


def _check_same_model(graph: Graph, config: Path) -> None:
    """Refuse a configuration under which equal weights are another model."""
    rows = next(tensor.shape for tensor in graph.inputs if len(tensor.shape) == 2)
    theirs = transformer(config, batch_size=1, seq=rows[1])
    mine, theirs_settings = _settings(graph), _settings(theirs)
    if odd := sorted(mine ^ theirs_settings):
        kind = odd[0][0]
        here, there = ([text for each, text in found if each == kind] for found in (mine, theirs_settings))
        raise TwofoldError(
            f"{str(config)!r} is of another model than the plan: {kind} with {', '.join(sorted(there)) or 'nothing'} "
            f"there, {', '.join(sorted(here)) or 'nothing'} in the plan; plan this config.json"
        )


def _settings(graph: Graph) -> set[tuple[str, str]]:
    return {
        (operator.kind, str({key: value for key, value in sorted(operator.attrs.items()) if key not in ("seed", "p")}))
        for operator in graph.operators
        if operator.kind in _SAME
    }
