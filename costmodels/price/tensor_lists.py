"""Kernels that work on a list of tensors at once, as torch's optimizers do, launch by launch.

torch cuts every tensor into chunks of 65,536 elements, a block of threads for each, and starts a kernel whenever it has
320 blocks or as many tensors as fit among its arguments (aten/src/ATen/native/cuda/MultiTensorApply.cuh: kChunkSize,
depth_to_max_blocks, depth_to_max_tensors). A block alone leaves most of the memory's bandwidth idle.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from costmodels.machine.sections import Section

__all__ = ["TENSOR_LISTS", "TensorList", "tensor_list_s"]

CHUNK = 65_536
"""Elements of a block."""

BLOCKS = 320
"""Blocks of a launch at most."""

TENSOR_LISTS: Mapping[str, tuple[tuple[int, int], ...]] = {
    "adamw.fused": ((7, 36),),
    "adamw.foreach": ((2, 110), (3, 64), (2, 110), (3, 48), (2, 64), (2, 96), (2, 110), (4, 48)),
}
"""Call -> its kernels in order, each as (tensors that it reads and writes, most tensors of a launch). The foreach form
of AdamW decays weights, then runs lerp_, mul_, addcmul_, sqrt, div_, add_, addcdiv_ (torch/optim/adam.py, 2.11)."""

_OPERANDS = 7
"""Tensors that AdamW reads and writes: weight and two states both ways, the gradient."""


class TensorList(Section, frozen=True, kw_only=True):
    """The pace of the blocks of such a kernel.

    All cores run `resident` blocks each at a time: a wave of blocks takes the time a of a block alone and b of its
    bytes, joined to (a^p + b^p)^(1/p), and the waves of a launch follow each other.

    Args:
        start_s: of a launch.
        chunk_s: of a block of 65,536 elements alone, in proportion of smaller ones.
        resident: blocks that a core runs at a time.
        sharpness: p above.
    """

    start_s: float
    chunk_s: float
    resident: int = 2
    sharpness: float = 1.0


def tensor_list_s(
    model: TensorList, call: str, cores: int, bytes_per_s: float, touched_bytes: float, elements: int, tensors: int = 1
) -> float:  # fmt: skip
    """Seconds of a call of `TENSOR_LISTS` on equal tensors.

    Args:
        model: pace of its blocks.
        call: such as "adamw.fused".
        cores: of the device.
        bytes_per_s: bandwidth that kernels reach which only stream.
        touched_bytes: of the operands, those that are written counted twice.
        elements: of all tensors together.
        tensors: how many.

    >>> model = TensorList(start_s=3e-6, chunk_s=3e-5)
    >>> one, four = (tensor_list_s(model, "adamw.fused", 132, 4e12, 14 * n, n) for n in (320 * CHUNK, 1280 * CHUNK))
    >>> round(four / one, 6)
    4.0
    """
    if not elements:
        return 0.0
    each = math.ceil(elements / tensors / CHUNK)
    blocks, longest = tensors * each, min(CHUNK, elements / tensors)
    block_bytes, seconds = touched_bytes / blocks, 0.0
    for moved, most in TENSOR_LISTS[call]:
        of_launch = min(BLOCKS, most * each)
        full, rest = divmod(blocks, of_launch)
        for count, times in ((of_launch, full), (rest, 1)):
            if count and times:
                moved_s = moved / _OPERANDS * block_bytes / bytes_per_s
                seconds += times * _launch_s(model, count, cores, model.chunk_s * longest / CHUNK, moved_s)
    return seconds


def _launch_s(model: TensorList, blocks: int, cores: int, alone_s: float, moved_s: float) -> float:
    """A launch of equal blocks, each of which takes `alone_s` on its core and `moved_s` of the memory's time."""
    waves, rest = divmod(blocks, model.resident * cores)
    power = model.sharpness
    seconds = model.start_s
    for count, times in ((model.resident * cores, waves), (rest, 1)):
        if count and times:
            seconds += times * (alone_s**power + (count * moved_s) ** power) ** (1 / power)
    return seconds
