"""Transformers without torch: configurations, their graphs, and the strategies and recompute sets of given degrees.

* `config`: `TransformerConfig`. `catalogue`: published models by name. `huggingface`: reading a config.json;
  `families`: what its keys are called in each family.
* `builder`: the graph, operator by operator; `model`: `transformer(name | path | config)`.
* `parts`: embedding, blocks and head of a graph.
* `sizes`: those that degrees must divide.
* `strategies`: the layouts for degrees of data, context and tensor parallelism, with or without sequence parallelism.
* `recompute`: which operators are recomputed in the backward.
* `recognise`: the configuration that the graph of a module is of.
"""

from plans.model.transformer.catalogue import model_names, named_config
from plans.model.transformer.config import Experts, Latent, Rope, Scales, TransformerConfig
from plans.model.transformer.huggingface import NotModelled, read_keys
from plans.model.transformer.model import config_remarks, transformer, transformer_config
from plans.model.transformer.parts import Parts, is_transformer, parts_of
from plans.model.transformer.recognise import NO_MODE, Recognised, recognise
from plans.model.transformer.recompute import recompute_set
from plans.model.transformer.sizes import sizes_of
from plans.model.transformer.strategies import block_strategies

__all__ = [
    "NO_MODE",
    "Experts",
    "Latent",
    "NotModelled",
    "Parts",
    "Recognised",
    "Rope",
    "Scales",
    "TransformerConfig",
    "block_strategies",
    "config_remarks",
    "is_transformer",
    "model_names",
    "named_config",
    "parts_of",
    "read_keys",
    "recognise",
    "recompute_set",
    "sizes_of",
    "transformer",
    "transformer_config",
]
