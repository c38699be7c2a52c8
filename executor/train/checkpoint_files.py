"""Folders of checkpoints, checked before anything is launched. Does not import torch."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from pathlib import Path

import msgspec

from plans.errors import TwofoldError
from plans.plan import Plan
from plans.reading import read_json

__all__ = ["MANIFEST", "check_checkpoint", "checkpoint_name", "written_checkpoints"]

MANIFEST = "manifest.json"


class _Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    twofold_checkpoint: int
    step: int
    optimizer: str
    parameters: Mapping[str, tuple[int, ...]]
    files: Mapping[str, tuple[int, str]]
    skipped: int = 0  # steps


def checkpoint_name(step: int) -> str:
    """The name of the folder of a step.

    >>> checkpoint_name(20)
    'step-00000020'
    """
    return f"step-{step:08d}"


def written_checkpoints(folder: Path) -> list[Path]:
    """The checkpoints that were written to their end, the oldest first."""
    return sorted(path for path in folder.glob("step-*") if re.fullmatch(r"step-\d{8,}", path.name))


def check_checkpoint(path: Path, plan: Plan) -> int:
    """The steps that were done when a checkpoint was written, which is whole and for the plan's model.

    Raises:
        TwofoldError: no manifest, a file that is missing or was changed, another model or optimizer, steps that were
            skipped where the plan checks none.
    """
    manifest = read_json(path / MANIFEST, "the checkpoint", _Manifest, advice="resume from another checkpoint")
    wanted = {tensor.name: tensor.shape for tensor in plan.graph.parameters}
    if manifest.optimizer != plan.optimizer.kind or dict(manifest.parameters) != wanted:
        odd = sorted(set(wanted.items()) ^ set(manifest.parameters.items()))
        what = f"parameter {odd[0][0]!r}" if odd else f"optimizer {manifest.optimizer!r}"
        raise TwofoldError(f"{path}: a checkpoint of another model or optimizer ({what} differs from the plan's)")
    if manifest.skipped and plan.step_check is None:
        raise TwofoldError(
            f"{path}: {manifest.skipped} of its steps were skipped, which AdamW depends on; keep "
            "loss_scale or spike in the job"
        )
    for name, (size, digest) in manifest.files.items():
        if not _is_as_written(path / name, size, digest):
            raise TwofoldError(
                f"{path / name}: changed after it was written; delete this checkpoint and resume from another"
            )
    return manifest.step


def _is_as_written(path: Path, size: int, digest: str) -> bool:
    try:
        with path.open("rb") as file:
            return path.stat().st_size == size and hashlib.file_digest(file, hashlib.blake2b).hexdigest() == digest
    except OSError:
        return False
