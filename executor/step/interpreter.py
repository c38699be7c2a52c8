"""Runs a rank's program: the same instructions, in the same order, as the simulator.

Before the first step everything is resolved: each value of each micro-batch gets a slot in one list, each instruction
becomes a closure over slots, and the program's memory is added up. A step then only calls the closures in order.

Values live as the program says: made by an instruction, dropped by the one that lists them in `frees`; values that are
not kept between steps are dropped at the end of a step. The first step is checked: every value must have the shape and
dtype of the program, in memory of its own unless it shares, and in place where it was there already, so that the memory
the program adds up (`memory_peak`) is the memory that values take. Buffers inside a communication come on top of that.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from executor.device import Device, Mark, now_ns
from executor.kernels import StepCounter
from executor.kernels.context import torch_dtype
from executor.step.code import Code, RecordedStep
from executor.step.comm import Launch, SelfTransfer, SelfTransfers, Work, collective_launch, transfer_launch
from executor.step.compute import operands_of, prepared
from executor.step.groups import Groups, Team
from executor.step.head_start import behind_weight_gradients, with_head_start
from executor.step.initial_values import initial_values
from executor.step.memory import memory_peak
from executor.step.streams import Streams
from plans.errors import TwofoldError
from plans.layout import TensorLayout
from plans.program import Instruction, Kind, ParameterPlacement, Program, Scope, Value
from plans.step_check import StepCheck
from plans.streams import StreamOrder, stream_order

__all__ = ["Batch", "Interpreter"]

Batch = Mapping[str, Any]
"""Name of an input tensor -> array with the rows of all micro-batches."""

_DONE = Work((), tuple)
_ALL = slice(None)


class Interpreter:
    """One rank's program, ready to run.

    Args:
        program: program of all ranks.
        rank: this process's.
        device: where tensors live.
        groups: the program's process groups; None where the program has one rank.
        memory_limit_bytes: refuse a program that needs more on this rank.

    `place[0]` is the position of the instruction that is being issued; whoever watches the rank may put memory of its
    own there.

    Raises:
        TwofoldError: the memory limit is too small (it names the instruction), an unknown call, a WAIT for nothing.
    """

    def __init__(
        self,
        program: Program,
        rank: int,
        device: Device,
        groups: Groups | None = None,
        *,
        memory_limit_bytes: int | None = None,
    ) -> None:
        self.rank, self.device, self.group = rank, device, program.group_of(rank)
        self.num_micro_batches = program.num_micro_batches
        self.peak = memory_peak(self.group, rank, memory_limit_bytes)
        self.counter = StepCounter()
        self.num_begun = 0
        self.place = memoryview(bytearray(8)).cast("q")
        self._groups = groups
        self._self_transfers: SelfTransfers = defaultdict(SelfTransfer)
        self._slots: dict[tuple[str, int | None], int] = {}
        for value in self.group.values.values():
            if value.scope is Scope.KEPT:
                self._slot(value.name, 0)
        self._num_kept = len(self._slots)
        self._env: list[Any] = [None] * self._num_kept
        self._brings: dict[int, tuple[int, ...]] = {}
        self._fed: dict[str, Tensor] = {}
        self._needed: dict[str, tuple[int, torch.dtype]] = {}
        self._declared: dict[int, Value] = {}
        codes = []
        for block in self.group.blocks:
            instructions = block.body.instructions
            ahead: frozenset[int] = frozenset()
            if device.own.head_start_cycles:
                ahead = behind_weight_gradients(instructions, self.group.values, device.num_processors)
            for number, instruction in enumerate(instructions):
                code_id = f"{block.label}/{instruction.name}"
                codes.append(self._compile(code_id, instruction, block.micro_batch, starts_first=number in ahead))
        self.codes: tuple[Code, ...] = tuple(codes)
        order = stream_order(self.group) if device.has_streams else None
        self._streams = None if order is None else Streams(order, device)
        self._loss = None if self.group.loss is None else self._slot(self.group.loss, 0)

    # -- weights -------------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def set_parameters(self, whole: Mapping[str, Any]) -> None:
        """Take this rank's part of all parameters and constants it keeps; states become zero, the step count 0.

        Args:
            whole: name of a parameter or constant -> array of its full shape; only names that this rank keeps are
                looked up, so a mapping may make each array when it is asked for.

        Raises:
            TwofoldError: a parameter that is missing or has another shape.
        """
        for name, tensor in initial_values(self.group, self.rank, self.device, whole):
            self._env[self._slot(name, 0)] = tensor
        self.resume_at(0)

    def resume_at(self, step: int) -> None:
        """Continue after `step` steps; the next one is checked, as the first step of a process."""
        self.counter.step, self.num_begun = step, 0

    def value(self, name: str) -> Tensor:
        """The tensor of a value that lives between steps."""
        tensor: Tensor = self._env[self._slot(name, 0)]
        return tensor

    def kept(self, placement: ParameterPlacement) -> Tensor:
        """The tensor that a rank keeps of a parameter between steps: its shard, master weight or full local weight."""
        return self.value(placement.kept)

    # -- steps ---------------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def step(self, batch: Batch, learning_rate: float | None = None) -> Tensor | None:
        """One training step.

        Args:
            batch: name of an input -> array with the rows of all micro-batches (this rank's own rows where the plan has
                full_batch=False); inputs that this rank does not load may be missing.
            learning_rate: of this step; None takes that of the plan.

        Returns:
            The mean loss as a scalar tensor on the device, or None if this rank does not have it.

        Raises:
            TwofoldError: an input that is missing or has another shape or dtype. Any other exception carries a note
                that names the instruction and the rank.
        """
        self.begin(self.checked(batch), learning_rate)
        if self.num_begun == 1:
            self._run_checked()
        else:
            self._run()
        return self.end()

    @torch.inference_mode()
    def record(self, batch: Batch, learning_rate: float | None = None) -> tuple[Tensor | None, RecordedStep]:
        """One training step that notes when each instruction begins and ends."""
        start_ns = now_ns()
        self.begin(self.checked(batch), learning_rate)
        recorded = self._run_recorded(start_ns)
        return self.end(), recorded

    # -- the parts of a step -------------------------------------------------------------------------------------------

    def checked(self, batch: Batch) -> dict[str, Tensor]:
        """The inputs that this rank loads, as tensors where they are stored.

        Raises:
            TwofoldError: an input that is missing or has another number of rows or dtype.
        """
        found = {}
        for name, (rows, dtype) in self._needed.items():
            if name not in batch:
                raise TwofoldError(f"the batch lacks the input {name!r}; it has {sorted(batch)}")
            array = batch[name]
            if isinstance(array, np.ndarray):
                array = torch.from_numpy(array if array.flags.writeable else array.copy())
            if array.shape[0] != rows or array.dtype != dtype:
                raise TwofoldError(
                    f"input {name!r} was fed as {tuple(array.shape)} {array.dtype}, "
                    f"the plan takes {rows} rows of {dtype}"
                )
            found[name] = array
        return found

    def begin(self, rows: Mapping[str, Tensor], learning_rate: float | None = None) -> None:
        """Begin a step on these `checked` inputs."""
        self.counter.begin(learning_rate)
        self.num_begun += 1
        self.bind(rows)

    def bind(self, rows: Mapping[str, Tensor]) -> None:
        """Make the instructions that load a batch read these `checked` inputs."""
        self._fed.update(rows)

    def issue(
        self, run: Callable[[Code], None] | None = None, *, one_by_one: bool = False, positions: slice = _ALL
    ) -> None:
        """Issue instructions once; nothing waits for the device.

        Args:
            run: what issues one instruction, where more is to be done than `Code.run` does.
            one_by_one: no two streams at a time (`Streams.issue`).
            positions: which; all of them where there are several streams.
        """
        env, codes, streams, place = self._env, self.codes[positions], self._streams, self.place
        code = codes[0] if codes else None
        try:
            if streams is not None:

                def run_and_free(position: int) -> None:
                    nonlocal code
                    code = codes[position]
                    place[0] = position
                    code.run() if run is None else run(code)
                    for slot in code.frees:
                        env[slot] = None

                streams.issue(run_and_free, one_by_one=one_by_one)
                return
            for position, code in enumerate(codes, positions.start or 0):
                place[0] = position
                code.run() if run is None else run(code)
                for slot in code.frees:
                    env[slot] = None
        except Exception as error:
            if code is not None:
                self._explain(error, code)
            raise

    def end(self) -> Tensor | None:
        """Drop the values that are not kept between steps, and return the loss."""
        loss = None if self._loss is None else self._env[self._loss]
        self._env[self._num_kept :] = [None] * (len(self._slots) - self._num_kept)
        return loss

    def abandon(self, kept: Sequence[Tensor]) -> None:
        """Discard a partly recorded step; `kept` are the tensors that existed before it."""
        self.end()
        self._env[: self._num_kept] = kept
        for transfer in self._self_transfers.values():
            transfer.num_sent = transfer.num_received = 0
            transfer.messages.clear()

    @property
    def stream_order(self) -> StreamOrder | None:
        """The order between the streams that instructions are issued on; None where that is one stream."""
        return None if self._streams is None else self._streams.order

    @property
    def held_of_check(self) -> tuple[StepCheck, Tensor] | None:
        """The state of the check of steps after the last one; None if steps are not checked."""
        check = self.group.step_check
        return None if check is None else (check.check, self.value(check.held))

    @property
    def env(self) -> list[Any]:
        """The content of every slot: a tensor, communication in progress (`Work`), or None."""
        return self._env

    def declared(self, slot: int) -> Value:
        """The program's declaration of the value that an instruction writes into a slot."""
        return self._declared[slot]

    @property
    def kept_tensors(self) -> list[Tensor]:
        """Values that persist between steps: weights, states, constants."""
        return self._env[: self._num_kept]

    def settle(self, kept: Sequence[Tensor]) -> None:
        """Copy values that the step replaced into the tensors where `kept` holds them."""
        for slot, home in enumerate(kept):
            if self._env[slot] is not home:
                home.copy_(self._env[slot])
                self._env[slot] = home

    def _run(self) -> None:
        self.issue()
        self.device.synchronize()

    def _run_checked(self) -> None:
        env, declared = self._env, self._declared

        def run(code: Code) -> None:
            before = [env[slot] for slot in code.writes]
            code.run()
            self._check(code)
            for slot, tensor in zip(code.writes, before, strict=True):
                if tensor is not None and declared[slot].scope is not Scope.KEPT:
                    assert env[slot].data_ptr() == tensor.data_ptr(), f"{code.id} moves {declared[slot].name}"

        self.issue(run, one_by_one=True)
        self.device.synchronize()

    def _run_recorded(self, start_ns: int) -> RecordedStep:
        device = self.device
        host: list[tuple[int, int]] = []
        marks: list[tuple[Mark, Mark]] = []
        base_ns, base = now_ns(), device.mark()

        def run(code: Code) -> None:
            begun = device.mark() if device.is_async else None
            before = now_ns()
            code.run()
            host.append((before, now_ns()))
            if device.is_async:
                marks.append((begun, device.mark()))

        self.issue(run)
        device.synchronize()
        end_ns = now_ns()
        on_device = None
        if device.is_async:
            on_device = [
                (base_ns + device.between_ns(base, first), base_ns + device.between_ns(base, last))
                for first, last in marks
            ]
        return RecordedStep(start_ns=start_ns, end_ns=end_ns, host_ns=host, device_ns=on_device)

    def _explain(self, error: BaseException, code: Code) -> None:
        error.add_note(
            f"in instruction {code.id} ({code.instruction.call}) of step {self.counter.step} on rank {self.rank}"
        )

    def _check(self, code: Code) -> None:
        instruction = code.instruction
        if instruction.token is not None:
            return  # its outputs are not there before the WAIT
        given = {self._env[slot].untyped_storage().data_ptr() for slot in code.reads if self._env[slot] is not None}
        for slot in code.writes:
            value, tensor = self._declared[slot], self._env[slot]
            assert tuple(tensor.shape) == tuple(value.shape) and tensor.dtype == torch_dtype(value.dtype), (
                f"{code.id} made {value.name} as {tuple(tensor.shape)} {tensor.dtype}, the program says {value}"
            )
            alone = tensor.untyped_storage().data_ptr() not in given
            assert alone or value.shares or slot in code.reads or instruction.kind is Kind.WAIT, (
                f"{code.id} made {value.name} in the memory of its input"
            )

    # -- feeding -------------------------------------------------------------------------------------------------------

    def _load(self, instruction: Instruction, micro_batch: int, output: Value) -> Callable[[], Tensor]:
        """Copy this rank's region of the micro-batch's rows of an input."""
        attrs = instruction.attrs
        name, layout, shape = attrs["tensor"], attrs["layout"], tuple(attrs["shape"])
        assert isinstance(layout, TensorLayout)
        number, count = attrs.get("slice", (0, 1))  # of a micro-batch
        if attrs["source"] == "local":  # the feed has this rank's rows only
            rows = output.shape[0]
            box = tuple(slice(0, size) for size in output.shape[1:])
            first = 0
        else:
            rows = shape[0]
            region = layout.region(self.rank, shape)
            first, box = region[0][0], tuple(slice(*ends) for ends in region[1:])
        start = (micro_batch * count + number) * rows + first
        index = (slice(start, start + output.shape[0]), *box)
        needed = (rows * count * self.num_micro_batches, torch_dtype(output.dtype))
        assert self._needed.setdefault(name, needed) == needed, f"{name} is fed in two ways"
        fed, where, dense = self._fed, self.device.torch_device, torch.contiguous_format
        return lambda: fed[name][index].to(where, non_blocking=True, copy=True, memory_format=dense)

    # -- compiling -----------------------------------------------------------------------------------------------------

    def _slot(self, name: str, micro_batch: int) -> int:
        value = self.group.values[name]
        key = (name, micro_batch if value.scope is Scope.MICRO else None)
        return self._slots.setdefault(key, len(self._slots))

    def _compile(self, code_id: str, instruction: Instruction, micro_batch: int, *, starts_first: bool) -> Code:
        micro_batch = instruction.attrs.get("micro_batch", micro_batch) if instruction.waits else micro_batch
        inputs = () if instruction.kind is Kind.WAIT else instruction.inputs  # a WAIT reads nothing but its token
        reads, writes, frees = (
            tuple(self._slot(name, micro_batch) for name in names)
            for names in (inputs, instruction.outputs, instruction.frees)
        )
        self._env.extend([None] * (len(self._slots) - len(self._env)))
        self._declared.update(zip(writes, (self.group.values[name] for name in instruction.outputs), strict=True))
        token, launch = None, None
        if instruction.kind is Kind.COMPUTE:
            run = self._compute(instruction, micro_batch, writes)
        elif instruction.kind is Kind.WAIT:
            assert instruction.waits is not None
            token = self._slot(instruction.waits, micro_batch)
            if token not in self._brings:
                raise TwofoldError(f"{code_id} waits for {instruction.waits!r}, which no earlier instruction issues")
            writes = self._brings[token]
            run = self._wait(token, writes)
        else:
            if instruction.kind is Kind.COLLECTIVE:
                members = self.group.members(instruction, self.rank)
                assert self._groups is not None or len(members) == 1
                team = (
                    Team(members=members) if self._groups is None else self._groups.team(instruction.channel, members)
                )
                launch = collective_launch(instruction, team, self.group.values[instruction.outputs[0]])
            else:
                launch = transfer_launch(instruction, self.rank, self._groups, self.device, self._self_transfers)
            if instruction.token is None:
                run = self._blocking(launch, reads, writes)
            else:
                token = self._slot(instruction.token, micro_batch)
                self._brings[token] = writes
                run = self._launching(launch, reads, token)
                if starts_first:
                    run = with_head_start(run, self._env, token, self.device)
        self._env.extend([None] * (len(self._slots) - len(self._env)))
        return Code(
            id=code_id,
            instruction=instruction,
            run=run,
            reads=reads,
            writes=writes,
            frees=frees,
            token=token,
            launch=launch,
        )

    def _compute(self, instruction: Instruction, micro_batch: int, writes: tuple[int, ...]) -> Callable[[], None]:
        env = self._env
        if instruction.call == "load":
            load = self._load(instruction, micro_batch, self.group.values[instruction.outputs[0]])
            target = writes[0]

            def run_load() -> None:
                env[target] = load()

            return run_load
        attrs = instruction.attrs
        rule, context = prepared(instruction, self.group, self.rank, micro_batch, self.counter, self.device)
        reads = tuple(self._slot(name, micro_batch) for name in operands_of(instruction))
        if len(writes) > 1:

            def run_many() -> None:
                for slot, result in zip(writes, rule(context, attrs, *[env[read] for read in reads]), strict=True):
                    env[slot] = result

            return run_many
        out = writes[0]
        if len(reads) == 1:
            (only,) = reads

            def run_one() -> None:
                env[out] = rule(context, attrs, env[only])

            return run_one
        if len(reads) == 2:
            left, right = reads

            def run_two() -> None:
                env[out] = rule(context, attrs, env[left], env[right])

            return run_two

        def run() -> None:
            env[out] = rule(context, attrs, *[env[read] for read in reads])

        return run

    def _blocking(self, launch: Launch, reads: tuple[int, ...], writes: tuple[int, ...]) -> Callable[[], None]:
        env = self._env

        def run() -> None:
            for slot, result in zip(writes, launch(*[env[read] for read in reads]).finish(), strict=True):
                env[slot] = result

        return run

    def _launching(self, launch: Launch, reads: tuple[int, ...], token: int) -> Callable[[], None]:
        env = self._env

        def run() -> None:
            env[token] = launch(*[env[read] for read in reads])

        return run

    def _wait(self, token: int, writes: tuple[int, ...]) -> Callable[[], None]:
        """The first WAIT for a token stores the outputs; later ones return at once."""
        env = self._env

        def run() -> None:
            for slot, result in zip(writes, env[token].finish(), strict=False):
                env[slot] = result
            env[token] = _DONE

        return run
