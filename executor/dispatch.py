"""A dispatch mode of torch that does not import torch's compiler."""

from __future__ import annotations

from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["EagerMode"]


class EagerMode(TorchDispatchMode):
    """Marks modes under which nothing is compiled. torch keeps its compiler out of every other mode, and imports it for
    that in the first call of the mode: most of a second in every rank.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False
