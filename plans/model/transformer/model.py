"""The graph of a transformer by name, by file or by configuration."""

from __future__ import annotations

import math
import os
from dataclasses import replace
from pathlib import Path

from plans.errors import TwofoldError
from plans.model.graph import Graph
from plans.model.transformer.builder import build_graph
from plans.model.transformer.catalogue import named_config
from plans.model.transformer.config import TransformerConfig
from plans.model.transformer.huggingface import read_config

__all__ = ["config_remarks", "transformer", "transformer_config"]

_PRECISIONS = ("bfloat16", "float16", "float32")

DROPLESS = "dropless"
"""The capacity factor with which no token is dropped, however uneven the load is."""

Source = str | os.PathLike[str] | TransformerConfig


def transformer_config(
    source: Source, *, seq: int | None = None, num_layers: int | None = None, tied: bool | None = None,
    precision: str | None = None, capacity_factor: float | str | None = None,
) -> TransformerConfig:  # fmt: skip
    """The configuration of a name, of a Hugging Face config.json (or its folder), or `source` itself.

    Args:
        source: see `transformer`.
        seq: tokens of a sample, instead of the configuration's; a learned table of positions keeps its rows.
        num_layers: blocks, instead of the configuration's.
        tied: whether the head shares its weights with the embedding, instead of what the configuration says.
        precision: dtype of parameters and activations, instead of the configuration's.
        capacity_factor: places at an expert, over an even share of a sample's choices, instead of the configuration's;
            "dropless" for a place for every token.

    Raises:
        TwofoldError: an unknown name or precision, a capacity factor of a model without experts or that is not above 0,
            a file that cannot be read or says what is not modelled.
    """
    if isinstance(source, TransformerConfig):
        config = source
    elif isinstance(source, os.PathLike) or _is_path(source):
        config = read_config(source, seq=seq).config
    else:
        config = named_config(source)
    if num_layers is not None:
        config = replace(config, num_layers=num_layers)
    if tied is not None:
        config = replace(config, tied=tied)
    if precision is not None:
        if precision not in _PRECISIONS:
            raise TwofoldError(
                f"precision {precision!r} is not known; known are {', '.join(_PRECISIONS)} (float8 is a stack, such as "
                "torchtitan-compile-float8)"
            )
        config = replace(config, dtype=precision)
    if capacity_factor is not None:
        config = _with_places(config, capacity_factor)
    if seq is not None and config.position == "learned" and seq > config.seq:
        raise TwofoldError(f"{config.name}: {seq} tokens, but its table of positions has {config.seq} rows")
    if seq is not None and seq != config.seq:
        rows = config.position_rows if config.position == "learned" else None
        config = replace(config, seq=seq, num_positions=rows)
    return config


def _with_places(config: TransformerConfig, factor: float | str) -> TransformerConfig:
    """A model with another number of places at its experts.

    >>> config = _with_places(transformer_config("mixtral-8x7b"), "dropless")
    >>> config.experts.capacity_factor, config.experts.capacity(config.seq) == config.seq
    (4.0, True)
    """
    experts = config.experts
    if experts is None:
        raise TwofoldError(f"{config.name} has no experts, so it takes no capacity factor")
    if factor == DROPLESS:
        factor = experts.num_experts / experts.top_k
    try:
        number = float(factor)
    except ValueError:
        number = 0.0
    if not 0 < number < math.inf:
        raise TwofoldError(f"capacity factor {factor!r} is not a number above 0, such as 1.25, or {DROPLESS}")
    return replace(config, experts=replace(experts, capacity_factor=number))


def config_remarks(
    source: Source, *, seq: int | None = None, capacity_factor: float | str | None = None
) -> tuple[str, ...]:
    """Remarks about a config.json: parts that the planned model leaves out, and keys without effect.

    There are no remarks about a name or a `TransformerConfig`.

    Args:
        source: see `transformer`.
        seq: tokens of a sample; windows of attention that hide none of them are not mentioned.
        capacity_factor: as of `transformer_config`.

    Raises:
        TwofoldError: as `transformer_config`.
    """
    if isinstance(source, TransformerConfig) or not (isinstance(source, os.PathLike) or _is_path(source)):
        return ()
    read = read_config(source, seq=seq)
    if capacity_factor is not None:
        read = replace(read, config=_with_places(read.config, capacity_factor))
    return read.remarks()


def transformer(
    source: Source,
    *,
    batch_size: int = 1,
    seq: int | None = None,
    num_layers: int | None = None,
    tied: bool | None = None,
    capacity_factor: float | str | None = None,
) -> Graph:
    """Build the graph of one training step of a transformer. Does not need torch.

    Args:
        source: a name such as "llama-3-8b", the path of a Hugging Face config.json (or of its folder), or a
            `TransformerConfig`.
        batch_size: samples per step.
        seq: tokens per sample; by default the model's longest.
        num_layers: number of blocks; by default the model's.
        tied, capacity_factor: see `transformer_config`.

    Raises:
        TwofoldError: as `transformer_config`; a batch or a sequence below 1; experts with biases.

    >>> graph = transformer("llama-3-8b", batch_size=2, seq=4096)
    >>> len(graph.operators), sum(tensor.num_elements for tensor in graph.parameters)
    (645, 8030261248)
    """
    config = transformer_config(source, seq=seq, num_layers=num_layers, tied=tied, capacity_factor=capacity_factor)
    length = config.seq if seq is None else seq
    for what, value in (("batch_size", batch_size), ("seq", length)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise TwofoldError(f"{config.name}: {what} must be a whole number of at least 1, not {value!r}")
    if config.experts is not None and config.mlp_bias:
        raise TwofoldError(f"{config.name}: experts have no biases; use mlp_bias=False")
    return build_graph(config, batch_size, length)


def _is_path(source: str) -> bool:
    return source.endswith(".json") or os.sep in source or (Path(source) / "config.json").is_file()
