"""What each rank of `test_ranks` runs: random redistributions over gloo, its own part checked."""

import json
from collections import Counter
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from executor.device import Device, pick_device
from executor.kernels import OpContext, rule_of
from executor.step.comm import SelfTransfer, SelfTransfers, collective_launch, transfer_launch
from executor.step.groups import Team
from plans.layout import Layout
from plans.lower.emit import channel_of, transfer_pair
from plans.program import Instruction, Kind, Value
from plans.redistribution import Step, StepKind, redistribute
from tests.plans.redistribution.cases import random_layout
from tests.pretend.redistribution import split


class Flows:
    """One tag for all messages: steps run one after the other."""

    def flow(self, channel: str, src_rank: int, dst_rank: int) -> tuple[object, int]:
        return dist.group.WORLD, 1

    def lane(self, group: object) -> None:
        """Receives start at once."""


GROUPS: dict[tuple[int, ...], object] = {}


def team_of(step: Step, rank: int) -> Team:
    mine = None
    for members in step.before.mesh.groups(step.axes):
        ordered = tuple(sorted(members))
        if ordered not in GROUPS:  # every rank makes every group, in the same order
            GROUPS[ordered] = dist.new_group(ordered)
        if rank in members:
            order = tuple(ordered.index(each) for each in members)
            inverse = tuple(members.index(each) for each in ordered)
            mine = Team(members=members, group=GROUPS[ordered], order=order, inverse=inverse)
    assert mine is not None
    return mine


def run(step: Step, part: torch.Tensor, shape: tuple[int, ...], rank: int, device: Device) -> torch.Tensor:
    if step.kind is StepKind.SLICE:
        site = OpContext(rank=rank, mesh=step.before.mesh, shape=step.after.local_shape(shape), dtype="float64")
        return rule_of("slice")(site, {"step": step, "shape": shape}, part)
    if step.kind is StepKind.TRANSFER:
        pair = transfer_pair("move", "old", "new", step.before, step.after, shape, "float64", "channel")
        self_transfers = SelfTransfers(SelfTransfer)
        send, recv = (transfer_launch(each, rank, Flows(), device, self_transfers) for each in pair)
        work = [send(part.contiguous()), recv()]
        return [each.finish() for each in work][1][0]
    output = Value(name="new", shape=step.after.local_shape(shape), dtype="float64")
    instruction = Instruction(
        name="move", kind=Kind.COLLECTIVE, call=str(step.kind), part="C", inputs=("old",), outputs=("new",),
        mesh=step.before.mesh, axes=step.axes, channel=channel_of(step.before.mesh, step.axes), dtype="float64",
        attrs={"step": step, "shape": shape},
    )  # fmt: skip
    return collective_launch(instruction, team_of(step, rank), output)(part.contiguous()).finish()[0]


NUM_EACH = 30
UNEVEN = ((13, 7), (5, 11), (3, 2), (1, 9))


def few_transfers(step: Step, shape: tuple[int, ...], itemsize: int) -> float:
    """A price that lets collectives win over transfers: uneven ones come to their turn."""
    return 100.0 if step.kind is StepKind.TRANSFER else 1.0


def work(rank: int, folder: Path) -> None:
    """Random redistributions, even and uneven: this rank's part of each is checked here."""
    device, rng = pick_device("cpu"), np.random.default_rng(0)
    kinds = {"even": Counter(), "uneven": Counter()}
    for at in range(2 * NUM_EACH):
        matrix, names = [((8,), ("a",)), ((4, 2), ("a", "b")), ((2, 2, 2), ("a", "b", "c"))][at % 3]
        mesh = Layout(matrix, names, [int(each) for each in rng.permutation(8)] if at % 2 else None)
        other = Layout((2, 4), ("x", "y"), mesh.rank_list) if at % 5 == 4 else mesh
        source, target = random_layout(rng, mesh, 2, 0.25), random_layout(rng, other, 2, 0.0)
        shape = (16, 8) if at < NUM_EACH else UNEVEN[at % len(UNEVEN)]
        terms = [rng.integers(-9, 9, shape).astype(float) for _ in range(mesh.size(source.partial))]
        part = torch.from_numpy(split(source, terms)[rank])
        for step in redistribute(source, target, shape, price=None if at % 2 else few_transfers):
            kinds["even" if at < NUM_EACH else "uneven"][str(step.kind)] += 1
            part = run(step, part, shape, rank, device)
        wanted = split(target, [np.sum(terms, axis=0)])[rank]
        np.testing.assert_array_equal(part.numpy(), wanted, err_msg=f"{shape}: {source} -> {target} on rank {rank}")
    (folder / f"{rank}.json").write_text(json.dumps(kinds, sort_keys=True))
