"""Recomputation: values that are freed after the forward and recomputed in the backward.

`recompute(net.relu1)` is MindSpore's `net.relu1.recompute()`, without adding methods to torch modules.
`torch.utils.checkpoint` in a forward does the same for the code that it runs. Capture stores both in `Graph.recompute`.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar
from unittest import mock

from torch import nn
from torch.fx import traceback
from torch.utils import checkpoint

from executor.stages import covers
from plans.errors import TwofoldError
from plans.model.graph import Operator

__all__ = ["checkpointed", "marked", "noting_checkpoints", "recompute", "recomputed"]

ModuleT = TypeVar("ModuleT", bound=nn.Module)

_MARK = "_twofold_recompute"
_CALL = "twofold_checkpoint"
"""Key of the annotation that the calls inside a checkpoint carry: which checkpoint of the forward it is."""


def recompute(module: ModuleT) -> ModuleT:
    """Mark a module to be recomputed in the backward. Returns the module.

    Simulate to see whether this saves memory. Marking only relus saves nothing, because the following linear layer
    keeps their outputs anyway.

    Raises:
        TwofoldError: not a module.

    >>> marked = recompute(nn.ReLU())
    """
    if not isinstance(module, nn.Module):
        raise TwofoldError(f"recompute marks a torch.nn.Module, not {module!r}")
    setattr(module, _MARK, True)
    return module


def marked(module: nn.Module) -> list[str]:
    """The paths of the marked modules in `module`."""
    return [path for path, part in module.named_modules(remove_duplicate=False) if getattr(part, _MARK, False)]


@contextlib.contextmanager
def noting_checkpoints() -> Iterator[None]:
    """Within this context, `torch.utils.checkpoint` runs its function alone and annotates its calls."""
    numbers = itertools.count()

    def run(function: Callable[..., Any], preserve_rng_state: bool, *args: Any) -> Any:
        with traceback.annotate({_CALL: next(numbers)}):
            return function(*args)

    def around(*_: Any, **__: Any) -> Iterator[None]:
        with traceback.annotate({_CALL: next(numbers)}):
            yield

    with (
        mock.patch.object(checkpoint.CheckpointFunction, "apply", run),
        mock.patch.object(checkpoint, "_checkpoint_without_reentrant_generator", around),
        traceback.preserve_node_meta(),
    ):
        yield


def checkpointed(meta: Mapping[str, Any]) -> int | None:
    """The checkpoint of the forward to which a call belongs, by its `meta` or by `torch.fx.traceback.current_meta`.

    >>> checkpointed(traceback.current_meta) is None
    True
    """
    number: int | None = (meta.get("custom") or {}).get(_CALL)
    return number


def recomputed(
    operators: Sequence[Operator], loss: str, places: Mapping[str, int], marks: Sequence[str]
) -> tuple[str, ...]:
    """The operators that a module recomputes, never the loss itself.

    Of a checkpoint, what others read is kept, as torch keeps it. Of a marked module nothing is.

    Args:
        operators: of the graph.
        loss: the tensor that is the loss.
        places: operator -> the checkpoint in which it stands.
        marks: paths of marked modules.

    >>> first = Operator(name="a.relu", kind="relu", inputs=("x",), outputs=("y",), module="a")
    >>> second = Operator(name="a.exp", kind="exp", inputs=("y",), outputs=("z",), module="a")
    >>> last = Operator(name="mean_loss", kind="mean_loss", inputs=("z",), outputs=("loss",))
    >>> recomputed((first, second, last), "loss", {"a.relu": 0, "a.exp": 0}, ())
    ('a.relu',)
    >>> recomputed((first, second, last), "loss", {}, ("a",))
    ('a.relu', 'a.exp')
    """
    outside = {loss}
    makers = {name: operator for operator in operators for name in operator.outputs}
    for operator in operators:
        here = places.get(operator.name)
        outside.update(name for name in operator.inputs if name in makers and places.get(makers[name].name) != here)
    return tuple(
        operator.name
        for operator in operators
        if loss not in operator.outputs
        and (
            (operator.name in places and not outside.intersection(operator.outputs))
            or any(covers(path, operator.module) for path in marks)
        )
    )
