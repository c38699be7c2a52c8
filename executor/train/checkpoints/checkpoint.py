"""Checkpoints of a run, written by torch.distributed.checkpoint while training continues.

A checkpoint is a folder `step-00000020`: the files of torch.distributed.checkpoint, each distinct part of weights (or
masters) and optimizer states written by one of the ranks that keep it, in turn; `plan.json`; and `manifest.json` with
the step and the size and hash of every file. It is written under another name, brought to the disk (fsync) and renamed,
and renamed again before it is removed, so that a folder of this name is whole. A part's key contains its place in the
full tensor: on the plan that wrote it every rank reads back the parts that it keeps; on another plan it reads the parts
that its own ones overlap.

Nodes that share no disk each write the parts that their own ranks keep, as a checkpoint of torch of its own. All of
them are on disk before the first one is renamed, and all are renamed before an older one is removed.

The state of a run has nothing else but the state of a step check (the loss scale, skipped steps, norms of gradients):
dropout follows from seed and step, data from the step.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
import threading
import time
import uuid
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save

from executor.step.interpreter import Interpreter
from executor.train.checkpoints.files import MANIFEST, checkpoint_name, written_checkpoints
from executor.train.checkpoints.nodes import NodesStore
from executor.train.checkpoints.parts import CheckpointFolder, SavedParts, Store
from executor.train.checkpoints.writing import HashedFiles
from executor.train.options import Checkpoints
from executor.weights.parts import STEP_CHECK, WEIGHT, Place, holders, kept
from plans.errors import TrainingStopped
from plans.files import write_atomically
from plans.plan import Plan, plan_to_json
from plans.program import Program
from plans.step_check import Held

__all__ = ["Saver", "restore"]

_WAITED, _WAITED_S = 0.03, 1.0
"""Of the time from one checkpoint to the next, and the seconds, above which a line says so."""


class Saver:
    """Writes checkpoints of one rank; all ranks of the program have one.

    Args:
        program: program of all ranks.
        plan: it comes from; saved next to the tensors.
        interpreter: of this rank.
        asked: folder and frequency of the checkpoints, and which ranks share the folder.
        last: total number of steps, after which the last checkpoint is written.
    """

    def __init__(self, program: Program, plan: Plan, interpreter: Interpreter, asked: Checkpoints, last: int) -> None:
        self._plan, self._interpreter, self._folder = plan, interpreter, asked.folder
        self._asked, self._last, rank = asked, last, interpreter.rank
        folders = asked.folders or (tuple(range(program.num_ranks)),)
        self._here = next(ranks for ranks in folders if rank in ranks)
        self._num_folders, self._is_first = len(folders), rank == self._here[0]
        # separate groups, on CPUs: their messages go next to those of the steps
        self._everyone = None if program.num_ranks == 1 else dist.new_group(backend="gloo")
        self._group = self._everyone if len(folders) == 1 else _own_group(folders, rank)
        copies = {place: _inside(ranks, self._here) for place, ranks in holders(program).items()}
        writers = {place: ranks[number % len(ranks)] for number, (place, ranks) in enumerate(copies.items()) if ranks}
        self._mine = [
            (part, value)
            for _, part, value in kept(interpreter)
            # the first rank of a folder writes the manifest, with what the check of steps holds
            if (copies[part.place][0] if part.role == STEP_CHECK else writers[part.place]) == rank
        ]
        for left in self._folder.glob(".step-*") if self._is_first else ():  # of a run that was killed
            shutil.rmtree(left)
        self._run, self._share = self._run_name(), _share(holders(program), folders, self._here)
        self._held = next((part.key for part, value in self._mine if value == _held(interpreter)), None)
        # pinned where there is a device, for copies at the full rate; one checkpoint after the other writes from it
        self._copies = {
            part.key: interpreter.device.host_buffer(
                tuple(interpreter.value(value).shape), interpreter.value(value).dtype
            )
            for part, value in self._mine
        }
        self._thread: threading.Thread | None = None
        self._removing: threading.Thread | None = None
        self._failed: BaseException | None = None
        self._begun_s: float | None = None  # when the checkpoint before began to be written
        self._advises = rank == program.num_ranks - 1  # the rank whose lines the user sees

    def after(self, done: int) -> None:
        """If a checkpoint is due after `done` steps, copy its values and write them in a thread.

        Raises:
            TrainingStopped: the one before could not be written.
        """
        if not self._asked.is_due(done, self._last):
            return
        due_s = time.monotonic()
        self._wait()
        self._advise(done, due_s)
        with torch.inference_mode():
            for part, value in self._mine:
                self._copies[part.key].copy_(self._interpreter.value(value), non_blocking=True)
        self._interpreter.device.synchronize()
        self._begun_s = time.monotonic()
        self._thread = threading.Thread(target=self._try, args=(done, self._copies), name="checkpoint", daemon=True)
        self._thread.start()

    def _advise(self, done: int, due_s: float) -> None:
        """Once, if training has just waited for the checkpoint before: say with which interval it would not."""
        if not self._advises or self._begun_s is None or done % self._asked.every:
            return
        trained_s, waited_s = due_s - self._begun_s, time.monotonic() - due_s
        if waited_s > max(_WAITED_S, _WAITED * trained_s):
            self._advises = False
            enough = math.ceil(self._asked.every * (trained_s + waited_s) / trained_s)
            print(
                f"the checkpoint of step {done} waited {waited_s:.1f} s until the one before was written; with one "
                f"every {enough} steps it would not",
                flush=True,
            )

    def finish(self) -> None:
        """Wait for the checkpoint that is being written, and for those that are being removed.

        Raises:
            TrainingStopped: it could not be written.
        """
        self._wait()
        if self._removing is not None:
            self._removing.join()

    def _wait(self) -> None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._failed is not None:
            raise TrainingStopped(
                f"a checkpoint in {str(self._folder)!r} cannot be written: {_in_one_line(self._failed)}; earlier ones "
                "are "
                f"complete: free disk space, or name another folder, and use --resume"
            ) from self._failed

    def _try(self, step: int, state: dict[str, Tensor]) -> None:
        try:
            self._interpreter.device.use()  # a new thread begins on the first device
            self._write(step, state)
        except BaseException as error:
            self._failed = error

    def _write(self, step: int, state: dict[str, Tensor]) -> None:
        name = checkpoint_name(step)
        writing, written = self._folder / f".{name}.writing", self._folder / name
        if self._is_first:
            writing.mkdir(parents=True)
        self._meet()
        writer = FileSystemWriter(writing, sync_files=False)  # our files do it themselves
        writer.fs = files = HashedFiles()
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # one rank
            save(
                state, storage_writer=writer, planner=DefaultSavePlanner(enable_plan_caching=True),
                process_group=self._group, no_dist=self._group is None,
            )  # fmt: skip
        mine = {name: entry for name, entry in sorted(files.written.items()) if name.startswith("__")}
        everybody: list[dict[str, Any]] = [mine]
        if self._group is not None:
            everybody = [{} for _ in range(self._group.size())]
            dist.all_gather_object(everybody, mine, group=self._group)
        if self._is_first:
            self._write_manifest(
                writing, step, state, {key: entry for each in everybody for key, entry in each.items()}
            )
        if self._num_folders > 1:
            self._meet()
        if self._is_first:
            if written.exists():
                shutil.rmtree(_hidden(written))
            os.replace(writing, written)
            _sync(self._folder)
        if self._num_folders > 1:
            self._meet()
        if self._interpreter.rank == 0:
            print(f"checkpoint {written}", flush=True)
        if self._is_first:
            self._remove_older()
        self._meet()

    def _remove_older(self) -> None:
        """Remove what is not kept beside the next checkpoint: many gigabytes take seconds."""
        if self._removing is not None:
            self._removing.join()
        hidden = [_hidden(old) for old in written_checkpoints(self._folder)[: -self._asked.keep]]
        self._removing = threading.Thread(target=self._remove, args=(hidden,), name="removal")
        self._removing.start()

    def _remove(self, folders: Sequence[Path]) -> None:
        for folder in folders:
            shutil.rmtree(folder)

    def _write_manifest(self, folder: Path, step: int, state: dict[str, Tensor], files: dict[str, Any]) -> None:
        """Write the plan and the manifest, and bring the whole folder to the disk."""
        write_atomically(folder / "plan.json", plan_to_json(self._plan))
        files |= {name: _size_and_hash(folder / name) for name in (".metadata", "plan.json")}
        parameters = {tensor.name: list(tensor.shape) for tensor in self._plan.graph.parameters}
        manifest = {
            "twofold_checkpoint": 1, "step": step, "run": self._run, "share": self._share,
            "optimizer": self._plan.optimizer.kind, "parameters": parameters, "files": files,
            "settings": msgspec.to_builtins(self._asked.settings),
        }  # fmt: skip
        if self._held is not None and (skipped := int(state[self._held][Held.SKIPPED])):
            manifest["skipped"] = skipped
        write_atomically(folder / MANIFEST, json.dumps(manifest, indent=1).encode())
        for path in folder.iterdir():
            _sync(path)
        _sync(folder)

    def _run_name(self) -> str:
        """A name that all ranks of this run have, and no other run."""
        name = [uuid.uuid4().hex]
        if self._everyone is not None:
            dist.broadcast_object_list(name, group=self._everyone)
        return name[0]

    def _meet(self) -> None:
        if self._everyone is not None:
            dist.barrier(group=self._everyone)


def restore(interpreter: Interpreter, asked: Checkpoints) -> int:
    """Read this rank's weights and states from a checkpoint, of this plan or another one; returns the steps done.

    Every rank must call it: parts that the files of a rank's node do not have come from the other nodes.

    Raises:
        TwofoldError: a part that the checkpoint does not have.
    """
    own = None if asked.resume is None else CheckpointFolder(asked.resume)
    store: Store
    if own is not None and len(asked.folders) <= 1:
        store = own
    else:
        store = NodesStore(own, asked.folders)
    saved = SavedParts(store)
    # a check that the run before did not have, or of another window, begins with this run
    mine = [each for each in kept(interpreter) if each[1].role != STEP_CHECK or each[1] in saved]
    found = saved.read(part for _, part, _ in mine)
    with torch.inference_mode():
        for (placement, part, value), read in zip(mine, found, strict=True):
            home = interpreter.value(value)
            home.copy_(read.view(home.shape))
            if part.role == WEIGHT and placement.master is not None:
                interpreter.value(placement.weight).copy_(home)
    interpreter.resume_at(store.step)
    return store.step


def _own_group(folders: Sequence[tuple[int, ...]], rank: int) -> dist.ProcessGroup | None:
    """The group of the ranks that share this rank's folder; None where it is the only one. Every rank must call it."""
    groups = [dist.new_group(list(ranks), backend="gloo") if len(ranks) > 1 else None for ranks in folders]
    return next(group for group, ranks in zip(groups, folders, strict=True) if rank in ranks)


def _inside(ranks: Sequence[int], here: Sequence[int]) -> tuple[int, ...]:
    return tuple(rank for rank in ranks if rank in here)


def _share(
    copies: Mapping[Place, Sequence[int]], folders: Sequence[tuple[int, ...]], here: tuple[int, ...]
) -> tuple[int, int]:
    """Which of the distinct sets of parts a folder holds, and how many sets there are."""
    held = {ranks: frozenset(place for place, of in copies.items() if set(of) & set(ranks)) for ranks in folders}
    distinct = [*dict.fromkeys(held.values())]
    return distinct.index(held[here]), len(distinct)


def _held(interpreter: Interpreter) -> str | None:
    check = interpreter.group.step_check
    return None if check is None else check.held


def _size_and_hash(path: Path) -> list[Any]:
    with path.open("rb") as file:
        return [path.stat().st_size, hashlib.file_digest(file, hashlib.blake2b).hexdigest()]


def _hidden(checkpoint: Path) -> Path:
    """Rename a checkpoint that is to be removed: a process may be killed before all of its files are gone."""
    hidden = checkpoint.with_name(f".{checkpoint.name}.removed")
    os.replace(checkpoint, hidden)
    return hidden


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _in_one_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[-1] if lines else type(error).__name__
