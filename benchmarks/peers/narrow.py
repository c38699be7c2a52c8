"""Float8 products by torchao in the linears of blocks; embedding and head keep their dtype, as in torchtitan."""

from __future__ import annotations

from benchmarks.peers.model import Decoder

__all__ = ["convert"]

_RECIPES = {"float8": "tensorwise", "float8-rowwise": "rowwise"}
"""Name in `simulator.stacks.products.RECIPES` -> torchao's name (torchao/float8/config.py)."""


def convert(model: Decoder, products: str) -> None:
    """Replace the linears of all blocks, in place.

    Args:
        model: with its weights.
        products: a key of `_RECIPES`.

    Raises:
        ImportError: torchao is not installed.
    """
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    config = Float8LinearConfig.from_recipe_name(_RECIPES[products])
    for block in model.layers.values():
        convert_to_float8_training(block, config=config)
