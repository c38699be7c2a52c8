"""Programs of large models without their length (part of floor 1).

A large model is one block many times over, on many ranks that do the same. Here a block is lowered once, with sizes
that are primes, so that the numbers tell which sizes they are products of (`Symbols`, `Monomials`); what comes out is a
`PieceTemplate`: every instruction of its forward and backward with symbolic shapes and bytes, for any degree of
parallelism and any batch.
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
