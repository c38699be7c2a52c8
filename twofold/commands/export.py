"""`twofold export`: write trained weights for other programs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from twofold.commands.options import FileOutput

if TYPE_CHECKING:
    from twofold.console import Console

__all__ = ["Export"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Export:
    """Write the weights of a checkpoint as safetensors or as a torch state_dict.

    Args:
        checkpoint: folder of a checkpoint, such as runs/gpt/checkpoints/step-00000100.
        file: what to write: FILE.safetensors; FILE.pt, .pth or .bin for a state_dict; a name without a suffix for a
            folder in the format of transformers.
        config: config.json of transformers; for plans made from a name or config.json, use the parameter names of
            transformers.
    """

    checkpoint: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="CHECKPOINT")]
    file: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="FILE")]
    config: str | None = None
    output: FileOutput = field(default_factory=FileOutput)

    def run(self, console: Console) -> tuple[dict[str, Any], bool]:
        """Write the file."""
        from executor.train.checkpoints.export import write_weights

        with console.doing(f"writing {self.file}"):
            names = write_weights(self.checkpoint, self.file, config=self.config)
        console.print(f"saved {self.file}: {len(names)} tensors")
        return {"file": self.file, "tensors": list(names)}, True
