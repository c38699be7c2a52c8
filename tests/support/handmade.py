"""Programs written by hand for tests of the simulator: prices stand in the instructions, one group per rank."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from plans.layout import Layout
from plans.program import Block, Body, GroupProgram, Instruction, Kind, Program, Scope, Value
from plans.redistribution import Piece, TransferPieces
from plans.schedules import Action


@dataclass(frozen=True)
class Price:
    dispatch_ps: int = 0
    work_ps: int = 0
    cpu_ps: int = 0


def written_price(instruction: Instruction, group: GroupProgram) -> Price:
    return Price(*instruction.attrs.get("price", ()))


@dataclass
class Script:
    """One rank's instructions, each in a block of its own."""

    rank: int
    blocks: list[Block] = field(default_factory=list)
    values: dict[str, Value] = field(default_factory=dict)

    def add(self, name: str, kind: Kind, call: str, price: Sequence[int] = (), **rest: object) -> None:
        label = f"{self.rank}F0" if kind is Kind.COMPUTE else "meet"
        attrs = {"price": tuple(price)}
        instruction = Instruction(name=name, kind=kind, call=call, part="F", attrs=attrs, **rest)
        self.blocks.append(Block(label=label, micro_batch=0, body=Body(name=name, instructions=(instruction,))))

    def compute(self, name: str, work: int, dispatch: int = 0) -> None:
        self.add(name, Kind.COMPUTE, "linear.forward", (dispatch, work))

    def collective(
        self, name: str, members: Sequence[int], price: Sequence[int], token: str | None = None, channel: str = "c"
    ) -> None:
        mesh = Layout((len(members),), ("axis",), members)
        self.add(
            name, Kind.COLLECTIVE, "all_reduce", price, mesh=mesh, axes=("axis",), channel=channel,
            token=self.token(token),
        )  # fmt: skip

    def send(self, name: str, pairs: Iterable[tuple[int, int]], price: Sequence[int], token: str | None = None) -> None:
        self._transfer(name, Kind.SEND, pairs, price, token)

    def recv(self, name: str, pairs: Iterable[tuple[int, int]], price: Sequence[int], token: str | None = None) -> None:
        self._transfer(name, Kind.RECV, pairs, price, token)

    def wait(self, token: str, price: Sequence[int] = ()) -> None:
        self.add(f"{token}.wait", Kind.WAIT, "wait", price, waits=token)

    def token(self, name: str | None) -> str | None:
        if name is not None:
            self.values[name] = Value(name=name, shape=(), scope=Scope.STEP, role="token")
        return name

    def _transfer(
        self, name: str, kind: Kind, pairs: Iterable[tuple[int, int]], price: Sequence[int], token: str | None
    ) -> None:
        pieces = TransferPieces(Piece(src_rank=src, dst_rank=dst, region=((0, 1),)) for src, dst in pairs)
        self.add(name, kind, "transfer", price, pieces=pieces, channel=f"{name}:channel", token=self.token(token))

    def group(self) -> GroupProgram:
        mesh = Layout((1,), ("one",), (self.rank,))
        return GroupProgram(mesh=mesh, values=self.values, blocks=tuple(self.blocks))


def program_of(scripts: Iterable[Script]) -> Program:
    return Program(groups=tuple(script.group() for script in scripts), num_micro_batches=1)


def pipeline(
    order: Sequence[Sequence[Action]],
    stage_rank: Sequence[int],
    work: Mapping[str, int],
    *,
    transfer: Sequence[int] = (),
    size: int = 4,
    kept_for_weights: int = 0,
) -> Program:
    """One rank per row of a schedule, one COMPUTE per action, a transfer wherever the pipeline needs one.

    Forwards keep an activation of `size` bytes alive until their backward (B or I) has run; `kept_for_weights` bytes
    of it live on from I to W.
    """
    num_stages, groups = len(stage_rank), []
    for rank, actions in enumerate(order):
        blocks: list[Block] = []
        values: dict[str, Value] = {}
        bodies: dict[tuple[int, str], Body] = {}
        for action in actions:
            stage, kind, micro = action.stage, str(action.kind), action.micro_batch
            if (stage, kind) in bodies:
                blocks.append(Block(label=str(action), micro_batch=micro, body=bodies[stage, kind]))
                continue
            lines: list[Instruction] = []
            before = {"F": stage - 1, "B": stage + 1, "I": stage + 1}.get(kind, -1)
            after = {"F": stage + 1, "B": stage - 1, "I": stage - 1}.get(kind, -1)
            way = "F" if kind == "F" else "B"
            if 0 <= before < num_stages:
                lines.append(_border(Kind.RECV, way, before, stage, stage_rank, transfer))
            kept = f"activation{stage}"
            values[kept] = Value(name=kept, shape=(size,), dtype="uint8")
            outputs, frees = ((kept,), ()) if kind == "F" else ((), (kept,) if kind in "BI" else ())
            if kept_for_weights:
                late = f"late{stage}"
                values[kept] = Value(name=kept, shape=(size - kept_for_weights,), dtype="uint8")
                values[late] = Value(name=late, shape=(kept_for_weights,), dtype="uint8")
                outputs = (*outputs, late) if kind == "F" else ()
                frees = (*frees, late) if kind in "BW" else frees
            lines.append(
                Instruction(
                    name="work", kind=Kind.COMPUTE, call="linear.forward", part=kind, outputs=outputs, frees=frees,
                    attrs={"price": (0, work[kind])},
                )
            )  # fmt: skip
            if 0 <= after < num_stages:
                send = _border(Kind.SEND, way, stage, after, stage_rank, transfer)
                values[str(send.token)] = Value(name=str(send.token), shape=(), role="token")
                lines.append(send)
            bodies[stage, kind] = Body(name=f"{stage}{kind}", instructions=tuple(lines))
            blocks.append(Block(label=str(action), micro_batch=micro, body=bodies[stage, kind]))
        mesh = Layout((1,), ("one",), (rank,))
        groups.append(GroupProgram(mesh=mesh, values=values, blocks=tuple(blocks)))
    return Program(groups=tuple(groups), num_micro_batches=1)


def _border(
    kind: Kind, way: str, source: int, target: int, stage_rank: Sequence[int], price: Sequence[int]
) -> Instruction:
    piece = Piece(src_rank=stage_rank[source], dst_rank=stage_rank[target], region=((0, 1),))
    channel = f"x:{source}>{target}"
    return Instruction(
        name=f"{channel}.{kind}", kind=kind, call="transfer", part="C", channel=channel, pieces=TransferPieces([piece]),
        token=f"token:{channel}" if kind is Kind.SEND else None, attrs={"price": tuple(price)},
    )  # fmt: skip
