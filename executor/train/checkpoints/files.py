"""Folders of checkpoints, checked before anything is launched. Does not import torch."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from pathlib import Path

import msgspec

from executor.train.settings import RunSettings
from plans.errors import TwofoldError
from plans.plan import Plan
from plans.reading import read_json

__all__ = ["MANIFEST", "Manifest", "check_checkpoint", "checkpoint_name", "read_manifest", "written_checkpoints"]

MANIFEST = "manifest.json"


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The manifest of a checkpoint, a file in its folder.

    Args:
        twofold_checkpoint: version of the format.
        step: steps done when it was written.
        optimizer: kind of the optimizer.
        parameters: shapes of the model's parameters.
        files: size and hash of every file.
        skipped: skipped steps.
        run: name of the run that wrote it.
        settings: settings of the job that wrote it; None without a job.
        share: which of the distinct sets of tensors the folder holds, and how many sets there are: nodes without a
            common disk each write those of their own ranks.
    """

    twofold_checkpoint: int
    step: int
    optimizer: str
    parameters: Mapping[str, tuple[int, ...]]
    files: Mapping[str, tuple[int, str]]
    skipped: int = 0
    run: str = ""
    settings: RunSettings | None = None
    share: tuple[int, int] = (0, 1)


def checkpoint_name(step: int) -> str:
    """The name of the folder of a step.

    >>> checkpoint_name(20)
    'step-00000020'
    """
    return f"step-{step:08d}"


def written_checkpoints(folder: Path) -> list[Path]:
    """The checkpoints that were written to their end, the oldest first."""
    return sorted(path for path in folder.glob("step-*") if re.fullmatch(r"step-\d{8,}", path.name))


def read_manifest(path: Path) -> Manifest:
    """The manifest of a checkpoint.

    Raises:
        TwofoldError: there is none, or it is damaged.
    """
    advice = "delete this checkpoint and resume from another"
    if not (path / MANIFEST).exists():
        raise TwofoldError(f"{path}: the checkpoint has no {MANIFEST}; {advice}")
    return read_json(path / MANIFEST, "the checkpoint", Manifest, advice=advice)


def check_checkpoint(path: Path, plan: Plan) -> Manifest:
    """The manifest of a checkpoint, whose files are as they were written and for the plan's model.

    Raises:
        TwofoldError: no manifest, a file that is missing or was changed, another model or optimizer, steps that were
            skipped where the plan checks none.
    """
    manifest = read_manifest(path)
    wanted = {tensor.name: tensor.shape for tensor in plan.graph.parameters}
    if manifest.optimizer != plan.optimizer.kind or dict(manifest.parameters) != wanted:
        odd = sorted(set(wanted.items()) ^ set(manifest.parameters.items()))
        what = f"parameter {odd[0][0]!r}" if odd else f"optimizer {manifest.optimizer!r}"
        raise TwofoldError(
            f"{path}: a checkpoint of another model or optimizer ({what} differs from the plan's); use those of its "
            "plan.json, or another out to train from the start"
        )
    if manifest.skipped and plan.step_check is None:
        raise TwofoldError(
            f"{path}: {manifest.skipped} of its steps were skipped, which AdamW depends on; keep "
            "loss_scale or spike in the job"
        )
    for name, (size, digest) in manifest.files.items():
        if not _is_as_written(path / name, size, digest):
            raise TwofoldError(
                f"{path / name}: changed after it was written, or missing; delete this checkpoint and "
                "resume from another"
            )
    return manifest


def _is_as_written(path: Path, size: int, digest: str) -> bool:
    try:
        with path.open("rb") as file:
            return path.stat().st_size == size and hashlib.file_digest(file, hashlib.blake2b).hexdigest() == digest
    except OSError:
        return False
