"""The location of a call of an exported module in the user's code, for names and error messages."""

from __future__ import annotations

import re
import warnings

import torch
from torch import fx, nn

from plans.errors import TwofoldError

__all__ = ["NotAsTorchError", "Places"]


class NotAsTorchError(TwofoldError):
    """A call that torch's own operator does not compute as a plan needs it, either: its samples meet, or it changes
    state."""


class Places:
    """The places of calls in a module.

    Args:
        module: that was exported.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self._aliases: dict[int, list[str]] = {}
        for path, submodule in module.named_modules(remove_duplicate=False):
            self._aliases.setdefault(id(submodule), []).append(path)

    def path(self, node: fx.Node) -> str:
        """The path of the user's module that makes the call; of a module with several names, the one by which it was
        called.
        """
        parent = ""
        for path, _ in (node.meta.get("nn_module_stack") or {}).values():
            path = re.sub(r"@\d+", "", path)
            if path and parent and not path.startswith(f"{parent}."):
                try:
                    names = self._aliases[id(self.module.get_submodule(path))]
                except (AttributeError, KeyError):
                    names = []
                path = next((name for name in names if name.startswith(f"{parent}.")), path)
            parent = path
        return parent

    def where(self, node: fx.Node) -> str:
        """The location of a call in the model, for an error."""
        path = self.path(node)
        lines = [line.strip() for line in (node.meta.get("stack_trace") or "").splitlines() if line.strip()]
        source = f" ({' | '.join(lines[-2:])})" if lines else ""
        return f"in module {path!r} of {type(self.module).__name__}{source}" if path else f"in forward{source}"

    def refused(self, node: fx.Node, reason: str) -> TwofoldError:
        """The error for a call that is known but not in this form."""
        return TwofoldError(f"{node.target} {self.where(node)} cannot be planned: {reason}")

    def samples_meet(self, node: fx.Node) -> TwofoldError:
        """The error for a call that reads a value of all samples where it may not."""
        return self.refused(
            node,
            "it reads a value made of all samples of a batch, which micro-batches would change; the loss may be a sum "
            "of means over the samples, each times a number or over a mean of data, and nothing else may be made of "
            "them",
        )

    def warn_of_micro_batches(self, node: fx.Node) -> None:
        """Warn of a call whose result depends on the number of micro-batches."""
        warnings.warn(
            f"{node.target} {self.where(node)} reads a value made of all samples: it is computed of each micro-batch "
            f"as a whole, so that the loss depends on the number of micro-batches",
            stacklevel=2,
        )

    def unknown(self, node: fx.Node) -> TwofoldError:
        """The error for a call that no operator can represent."""
        if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
            reason = (
                "it draws random numbers in a way that depends on the layout; draw with torch.rand, torch.randn, "
                "torch.randint or dropout"
            )
        else:
            reason = (
                "it is not one of torch's own functions; write it with those, or as a torch.autograd.Function of them"
            )
        return self.refused(node, reason)
