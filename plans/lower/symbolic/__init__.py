"""Programs of large models without listing every block and rank (part of floor 1).

A large model repeats one block on many ranks that do the same. Here a block is lowered once with prime sizes, so that
each number reveals the sizes that it is a product of (`Symbols`, `Monomials`). The result is a `PieceTemplate`: every
instruction of the block's forward and backward with symbolic shapes and bytes, for any degrees and any batch.
"""

from plans.lower.symbolic.symbols import Monomials, Symbols
from plans.lower.symbolic.template import (
    KEPT,
    Cell,
    ParameterTemplate,
    PartTemplate,
    PieceTemplate,
    joined_gradients,
    piece_template,
    plain,
)
from plans.lower.symbolic.transformer import ModelTemplate, model_sizes, model_template

__all__ = [
    "KEPT",
    "Cell",
    "ModelTemplate",
    "Monomials",
    "ParameterTemplate",
    "PartTemplate",
    "PieceTemplate",
    "Symbols",
    "joined_gradients",
    "model_sizes",
    "model_template",
    "piece_template",
    "plain",
]
