"""Transformers without torch: configurations, their graphs, and the strategies and recompute sets of given degrees.

* `config`: `TransformerConfig`. `catalogue`: published models by name. `huggingface`: reading a config.json.
* `builder`: the graph, operator by operator; `model`: `transformer(name | path | config)`.
* `parts`: embedding, blocks and head of a graph.
* `strategies`: the layouts for degrees of data, context and tensor parallelism, with or without sequence parallelism.
* `recompute`: which operators are made again in the backward.
"""

from plans.model.transformer.catalogue import model_names, named_config
from plans.model.transformer.config import Experts, Latent, Rope, TransformerConfig
from plans.model.transformer.model import transformer, transformer_config
from plans.model.transformer.parts import Parts, is_transformer, parts_of
from plans.model.transformer.recompute import RECOMPUTE_MODES, recompute_set
from plans.model.transformer.strategies import MeshAxes, block_strategies, check_degrees, mesh_axes

__all__ = [
    "RECOMPUTE_MODES",
    "Experts",
    "Latent",
    "MeshAxes",
    "Parts",
    "Rope",
    "TransformerConfig",
    "block_strategies",
    "check_degrees",
    "is_transformer",
    "mesh_axes",
    "model_names",
    "named_config",
    "parts_of",
    "recompute_set",
    "transformer",
    "transformer_config",
]
