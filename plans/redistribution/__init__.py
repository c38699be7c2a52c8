"""Redistribution: the cheapest steps from one layout of a tensor to another.

* `step`: one step (slice, collective or transfer) between two layouts.
* `pieces`: who sends which box of the tensor to whom; `traffic`: the bytes a step brings to each rank.
* `search`: the cheapest sequence of steps, by bytes or by a `price` in seconds. On one mesh `astar` searches the states
  of `space`, starting from the sequences of `greedy`; `fastest` searches arrays of all steps (`table`) for prices that
  state their parts. `cuts` and `overlaps` have the regions of all ranks as arrays.
* `rows`: whether a collective along an inner dim copies its parts.
* `atomic`: the common refinement of two meshes; `reshape`: layouts through reshape and transpose.
"""

from plans.redistribution.pieces import Piece, TransferPieces, pieces
from plans.redistribution.reshape import Reshaped, reshape_layout, transpose_layout
from plans.redistribution.search import StepPrice, redistribute
from plans.redistribution.step import Step, StepKind
from plans.redistribution.traffic import max_received_bytes, received_bytes

__all__ = [
    "Piece",
    "Reshaped",
    "Step",
    "StepKind",
    "StepPrice",
    "TransferPieces",
    "max_received_bytes",
    "pieces",
    "received_bytes",
    "redistribute",
    "reshape_layout",
    "transpose_layout",
]
