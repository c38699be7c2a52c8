"""The kernels and messages of a body under a software stack."""

from __future__ import annotations

from dataclasses import dataclass

from costmodels.price.instruction import FusedStep

__all__ = ["Kernel", "Message", "Shape", "Step"]

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """One kernel as `price_compute` takes it.

    Args:
        times: how many times as long as the machine's price it takes, where the stack has a slower kernel.
        causal: of an attention.
        part: as of `Instruction`.
        steps: steps of a run of fused instructions, as `price_fused` takes them.
    """

    call: str
    shapes: tuple[Shape, ...]
    dtype: str
    touched_bytes: int
    times: float = 1.0
    causal: bool = False
    part: str = ""
    steps: tuple[FusedStep, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """A collective, or with `call` "wait" the wait for one.

    Args:
        axes: mesh axes.
        size_bytes: of the larger end.
        item_bytes: of an element.
        token: of the collective in its body; a wait bears that of what it waits for; -1 blocks.
        operator: that needs it, where one does.
        part: as of `Instruction`.
        copies: that every member makes (`plans.redistribution.rows`).
    """

    call: str
    axes: tuple[str, ...] = ()
    size_bytes: int = 0
    item_bytes: int = 0
    token: int = -1
    operator: str = ""
    part: str = "C"
    copies: int = 0

    @property
    def is_exchange(self) -> bool:
        """Whether it sends tokens to experts or back."""
        return self.call == "all_to_all" and "ep" in self.axes


Step = Kernel | Message
