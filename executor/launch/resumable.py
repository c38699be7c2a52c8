"""Chooses the checkpoint to resume from among those that the nodes of a job have on their disks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from executor.train.checkpoints.files import check_checkpoint, checkpoint_name, read_manifest, written_checkpoints
from executor.train.settings import RunSettings
from plans.differences import changed_values, plan_differences
from plans.errors import TwofoldError
from plans.plan import Plan, load_plan

__all__ = ["Held", "changes_since", "held_here", "newest_complete"]


class Held(msgspec.Struct, frozen=True, kw_only=True):
    """A checkpoint in the folder of a node; its fields are those of `executor.train.checkpoints.files.Manifest`."""

    step: int
    run: str
    share: tuple[int, int]


def held_here(folder: Path, plan: Plan, *, newest_only: bool) -> dict[Held, Path]:
    """The checkpoints of a folder, the newest first; their files are as they were written.

    Args:
        folder: of checkpoints.
        plan: plan of the job.
        newest_only: whether to look at the newest one only, for jobs on one node.

    Raises:
        TwofoldError: a damaged checkpoint, or one of another model or optimizer.
    """
    held = {}
    for path in reversed(written_checkpoints(folder)):
        found = check_checkpoint(path, plan)
        held[Held(step=found.step, run=found.run, share=found.share)] = path
        if newest_only:
            break
    return held


def changes_since(checkpoint: Path, settings: RunSettings, plan: Plan) -> list[str]:
    """The settings of a job that change its losses, compared with the job that wrote a checkpoint; one text for each.

    Args:
        checkpoint: folder of the checkpoint.
        settings: settings of the job.
        plan: plan of the job.
    """
    manifest = read_manifest(checkpoint)
    changed = plan_differences(load_plan(checkpoint / "plan.json"), plan)
    if settings.learning_rate is not None:
        changed.pop("optimizer.settings.lr", None)
    if (before := manifest.settings) is not None:
        changed |= changed_values(msgspec.to_builtins(before), msgspec.to_builtins(settings))
        if before.rates(manifest.step) == settings.rates(manifest.step):
            changed.pop("steps", None)
    return [f"{path} was {before!r} and is now {after!r}" for path, (before, after) in changed.items()]


def newest_complete(held: Mapping[int, Sequence[Held]]) -> Held | None:
    """The newest checkpoint of which the nodes have all shares together; None if they have no checkpoint at all.

    Args:
        held: checkpoints by node.

    Returns:
        The checkpoint with any of its shares.

    Raises:
        TwofoldError: no checkpoint is complete.

    >>> first, second = (Held(step=20, run="a", share=(number, 2)) for number in (0, 1))
    >>> newest_complete({0: [first], 1: [second]}).step
    20
    """
    every = sorted({each for some in held.values() for each in some}, key=lambda each: (each.step, each.run))
    if not every:
        return None
    shares: dict[tuple[int, str], set[int]] = {}
    for each in every:
        shares.setdefault((each.step, each.run), set()).add(each.share[0])
    for each in reversed(every):
        if len(shares[each.step, each.run]) == each.share[1]:
            return each
    newest = every[-1]
    missing = sorted({*range(newest.share[1])} - shares[newest.step, newest.run])
    raise TwofoldError(
        f"no checkpoint is complete on nodes {', '.join(map(str, sorted(held)))}: {checkpoint_name(newest.step)} lacks "
        f"share {missing[0] + 1} of {newest.share[1]}; start the node that wrote it, or copy its folder to a node that "
        "has none"
    )
