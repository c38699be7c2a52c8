"""The memory of a piece of a model under a stack."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Footprint"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """Bytes of activations of one piece for one micro-batch.

    Args:
        kept: alive from the end of its forward until its backward.
        kept_for_weights: alive between the input-gradient and the weight-gradient part, where they are apart.
        forward: the most alive during the forward, `kept` included.
        backward: the most alive above `kept` during the (whole or input-gradient) backward.
        weights: the most alive above `kept_for_weights` during the weight-gradient part.
        released: of `kept`, what the input-gradient part releases, where the parts are apart.
        unreleased: the most alive above `kept` during it if it released nothing.
    """

    kept: int = 0
    kept_for_weights: int = 0
    forward: int = 0
    backward: int = 0
    weights: int = 0
    released: int = 0
    unreleased: int = 0
