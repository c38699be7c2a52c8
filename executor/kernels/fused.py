"""Runs of fused instructions (`plans.lower.fuse`): one kernel if the chip supports it, otherwise their steps one by
one.

The rules of the steps, applied in order, form one function of the run's operands. On a GPU this function is traced once
for each combination of shapes and dtypes, and Inductor compiles it to kernels that keep intermediate values in
registers: computed in single precision, and rounded only where a value leaves the run. Compilation takes place in the
first step, which is neither recorded nor replayed. If compilation fails, the steps run separately and a message gives
the reason.

Losses have separate kernels that read logits in any dtype and compute in at least single precision. A cast next to a
loss is therefore omitted on every device, with the same result.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from executor.kernels.chips import has_triton
from executor.kernels.context import OpContext, Rule
from plans.program import Instruction, Value

__all__ = ["FusedRun", "compiled"]

Function = Callable[..., tuple[Tensor, ...]]

_LOSS = "cross_entropy."


@dataclass(slots=True, eq=False)
class _Step:
    """A rule with its context, and the places of its inputs, outputs and kept values."""

    call: str
    rule: Rule
    context: OpContext
    attrs: Mapping[str, Any]
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    frees: tuple[int, ...] = ()


class FusedRun:
    """A fused instruction of one rank, ready to run: (context, attrs, *inputs) -> its outputs, as any rule.

    Args:
        instruction: with the call "fused".
        values: values of the rank's group.
        context: of the instruction.
        rule_of: the rule of a call.

    Attributes:
        calls: of its steps.
        form: key that distinguishes runs with different computations; runs of one form share compiled code.
    """

    def __init__(
        self, instruction: Instruction, values: Mapping[str, Value], context: OpContext, rule_of: Callable[[str], Rule]
    ) -> None:
        known = {**values, **instruction.attrs["inner"]}
        lines = _without_casts(instruction, known)
        places = {name: place for place, name in enumerate(instruction.inputs)}
        for line in lines:
            for name in line.outputs:
                places.setdefault(name, len(places))
        self._steps = _freeing([
            _Step(
                call=line.call, rule=rule_of(line.call),
                context=replace(
                    context, mesh=line.mesh or context.mesh, shape=known[line.outputs[0]].shape,
                    dtype=known[line.outputs[0]].dtype, shares=False,
                ),
                attrs=line.attrs, reads=tuple(places[name] for name in line.inputs),
                writes=tuple(places[name] for name in line.outputs),
            )
            for line in lines
        ], keep := tuple(places[name] for name in instruction.outputs))  # fmt: skip
        self.calls = tuple(line.call for line in lines)
        self._results = keep
        self._num_places = len(places)
        self._is_single = len(keep) == 1
        self._compiles = len(lines) > 1 and not any(call.startswith(_LOSS) for call in self.calls)
        self._function: Function | None = None
        self.form = (
            len(instruction.inputs), keep,
            tuple((step.call, repr(sorted(step.attrs.items())), step.reads, step.writes, step.context.shape,
                   step.context.dtype) for step in self._steps),
        )  # fmt: skip

    def __call__(self, context: OpContext, attrs: Mapping[str, Any], *inputs: Tensor) -> Any:
        """Run it; a tuple of tensors unless there is one output."""
        if self._function is None:
            self._function = self._made_for(inputs)
        made = self._function(*inputs)
        return made[0] if self._is_single else made

    def plainly(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """The steps as separate kernels."""
        env: list[Any] = [*inputs, *[None] * (self._num_places - len(inputs))]
        for step in self._steps:
            made = step.rule(step.context, step.attrs, *[env[place] for place in step.reads])
            if len(step.writes) == 1:
                env[step.writes[0]] = made
            else:
                for place, tensor in zip(step.writes, made, strict=True):
                    env[place] = tensor
            for place in step.frees:
                env[place] = None
        return tuple([env[place] for place in self._results])

    def _made_for(self, inputs: Sequence[Tensor]) -> Function:
        if not self._compiles or self.form in _REFUSED or not has_triton(inputs[0]):
            return self.plainly
        try:
            return compiled(self, inputs)
        except Exception as error:  # whatever a compiler may raise: training continues without it
            _REFUSED.add(self.form)
            first = str(error).strip().partition("\n")[0]
            warnings.warn(
                f"{' + '.join(self.calls)} runs as separate kernels: {type(error).__name__}: "
                f"{first}", stacklevel=2,
            )  # fmt: skip
            return self.plainly


_COMPILED: dict[object, Function] = {}
_REFUSED: set[object] = set()


def compiled(run: FusedRun, inputs: Sequence[Tensor]) -> Function:
    """The compiled function of a run for operands like `inputs`, shared by all runs of the same form.

    Raises:
        Exception: what torch's compiler raises.
    """
    key = run.form, tuple((tensor.shape, tensor.stride(), tensor.dtype, tensor.device) for tensor in inputs)
    if key not in _COMPILED:
        from torch._inductor import compile as compile_graph  # the entry for graphs that Dynamo did not trace
        from torch._subclasses import FakeTensorMode
        from torch.fx.experimental.proxy_tensor import make_fx

        with _deterministic(), torch.inference_mode(False), torch.no_grad(), FakeTensorMode():  # no memory, no values
            like: list[Any] = [
                torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
                for tensor in inputs
            ]
            made = compile_graph(make_fx(run.plainly)(*like), like)
        _COMPILED[key] = lambda *given: tuple(made(*given))
    return _COMPILED[key]


@contextlib.contextmanager
def _deterministic() -> Iterator[None]:
    """Make every compilation split sums in the same way, because ranks that compute the same must get the same bits."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


def _freeing(steps: Sequence[_Step], keep: Sequence[int]) -> list[_Step]:
    """Steps that release values that no later step reads."""
    wanted = set(keep)
    found = []
    for step in reversed(steps):
        last = dict.fromkeys(place for place in (*step.reads, *step.writes) if place not in wanted)
        wanted.update(step.reads)
        step.frees = tuple(last)
        found.append(step)
    return found[::-1]


def _without_casts(instruction: Instruction, values: Mapping[str, Value]) -> list[Instruction]:
    """The steps without the casts of logits that only a loss reads, and those of its gradient back."""
    lines: list[Instruction] = list(instruction.attrs["steps"])
    makers = {name: line for line in lines for name in line.outputs}
    names: dict[str, str] = {}
    for at, line in enumerate(lines):
        if not line.call.startswith(_LOSS):
            continue
        cast = makers.get(line.inputs[0])
        if cast is None or cast.call != "cast.forward" or values[cast.inputs[0]].dtype not in ("bfloat16", "float16"):
            continue
        if values[line.inputs[0]].dtype != "float32":
            continue
        lines[at] = replace(line, inputs=(cast.inputs[0], *line.inputs[1:]))
        if line.call.endswith("grad0"):
            (made,) = line.outputs
            back = [line for line in lines if line.call == "cast.grad0" and line.inputs == (made,)]
            if len(back) == 1 and made not in instruction.outputs:
                names[made] = back[0].outputs[0]
    kept = [line for line in lines if line.call != "cast.grad0" or line.inputs[0] not in names]
    kept = [replace(line, outputs=tuple(names.get(name, name) for name in line.outputs)) for line in kept]
    read = {name for line in kept for name in line.inputs} | set(instruction.outputs)
    return [line for line in kept if line.call != "cast.forward" or read & set(line.outputs)]
