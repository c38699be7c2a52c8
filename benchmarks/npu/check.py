"""Run every instruction of every rank of plans on meta tensors with the kernels of an NPU, and write what was called.

    LD_LIBRARY_PATH=FOLDER/stub TORCH_DEVICE_BACKEND_AUTOLOAD=0 FOLDER/venv/bin/python -m benchmarks.npu.check \
        FOLDER/plans --out benchmarks/results/npu_operators.json

runs in the environment that `environment.sh` makes. Every instruction gets tensors of the shapes and dtypes that its
program states, and must make what the program states. It is called as in the step before a recording, and then as in
the recording, which is counted: fused operators, and those of torch for which torch-npu has no kernel. It computes
those on the host, which a recording refuses, so there may be none (exit code 1).
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._python_dispatch import _disable_current_modes as _uncounted

from executor.device import Device
from executor.kernels import StepCounter
from executor.kernels.context import torch_dtype
from executor.step.compute import operands_of, prepared
from plans.lower import lower
from plans.plan import load_plan
from plans.program import GroupProgram, Instruction, Kind, Program, Value

__all__ = ["checked", "load_torch_npu", "main"]


@dataclass(frozen=True, slots=True, kw_only=True)
class MetaNpu(Device):
    """An NPU whose tensors have no memory."""

    kind: str = "npu"

    @property
    def torch_device(self) -> torch.device:
        """That of meta tensors."""
        return torch.device("meta")


NPU = MetaNpu()


def load_torch_npu() -> Any:
    """torch-npu with the stand-ins for CANN; what they lack is looked for when it is called."""
    sys.setdlopenflags(os.RTLD_LAZY | os.RTLD_GLOBAL)
    import torch_npu
    import torch_npu.op_plugin.meta._meta_registrations as registrations

    registrations._npu_fusion_attention_warning_printed = True  # its warning asks a device for its version
    return torch_npu


class Calls(TorchDispatchMode):
    """Counts fused operators, and notes those of torch that torch-npu has no kernel for."""

    def __init__(self) -> None:
        super().__init__()
        self.fused: Counter[str] = Counter()
        self.on_host: Counter[str] = Counter()
        self.num_calls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.num_calls += 1
        name = func.name()
        if func.namespace == "npu" or name in _FUSED:
            self.fused[name] += 1
        if not _has_kernel(name):
            self.on_host[name] += 1
        return func(*args, **(kwargs or {}))


_FUSED = ("aten::_fused_adamw_", "aten::native_layer_norm", "aten::native_layer_norm_backward")
"""Operators of torch that `executor.kernels.npu` takes for a fused kernel of torch-npu's own."""


def _has_kernel(name: str) -> bool:
    """Whether an operator runs on an NPU: by a separate kernel or of its form with `out=`, or made of others."""
    keys = "PrivateUse1", "CompositeExplicitAutograd", "CompositeImplicitAutograd"
    if any(torch._C._dispatch_has_kernel_for_dispatch_key(name, key) for key in keys):
        return True
    made_of_out = torch._C._dispatch_has_kernel_for_dispatch_key(name, "CompositeExplicitAutogradNonFunctional")
    base = name.partition(".")[0]
    return made_of_out and torch._C._dispatch_has_kernel_for_dispatch_key(f"{base.rstrip('_')}.out", "PrivateUse1")


def checked(program: Program) -> dict[str, Any]:
    """Run the instructions of all ranks.

    Raises:
        AssertionError: an instruction makes another shape or dtype than the program states.
    """
    calls, num_instructions = Calls(), Counter[str]()
    with torch.inference_mode():
        for group in program.groups:
            for rank in group.ranks:
                counter = StepCounter(step=2)
                for block, instruction in group.walk():
                    num_instructions[str(instruction.kind)] += 1
                    if instruction.kind is not Kind.COMPUTE or instruction.call == "load":
                        continue
                    counter.is_recording = False
                    _run(group, rank, block.micro_batch, instruction, counter)
                    counter.is_recording = True
                    with calls:
                        _run(group, rank, block.micro_batch, instruction, counter)
    return {
        "ranks": program.num_ranks, "instructions": dict(sorted(num_instructions.items())),
        "operator_calls": calls.num_calls, "fused_operators": dict(sorted(calls.fused.items())),
        "on_the_host": dict(sorted(calls.on_host.items())),
    }  # fmt: skip


def _run(group: GroupProgram, rank: int, micro_batch: int, instruction: Instruction, counter: StepCounter) -> None:
    """One instruction, as `executor.step.interpreter` calls it."""
    rule, context = prepared(instruction, group, rank, micro_batch, counter, NPU)
    writes = [group.values[name] for name in instruction.outputs]
    with _uncounted():
        given = [_like(group.values[name]) for name in operands_of(instruction)]
    made = rule(context, instruction.attrs, *given)
    for value, tensor in zip(writes, made if len(writes) > 1 else [made], strict=True):
        assert _fits(tensor, value), (
            f"{instruction.name} ({instruction.call}) made {tuple(tensor.shape)} {tensor.dtype} on {tensor.device}, "
            f"the program says {value}"
        )


def _like(value: Value) -> torch.Tensor:
    return torch.empty(value.shape, dtype=torch_dtype(value.dtype), device=NPU.torch_device)


def _fits(tensor: torch.Tensor, value: Value) -> bool:
    return tuple(tensor.shape) == tuple(value.shape) and tensor.dtype == torch_dtype(value.dtype) and tensor.is_meta


_DEVICE = (
    "NPUGraph.capture_begin", "NPUGraph.capture_end", "NPUGraph.replay", "NPUGraph.reset", "NPUGraph.pool",
    "get_device_name", "get_device_properties", "mem_get_info",
)  # fmt: skip
"""What `executor.device` and `executor.kinds` call of torch's module of the device."""

_SENT = ("allreduce_", "_allgather_base_", "_reduce_scatter_base_", "alltoall_base_", "send", "recv_")
"""Operators of torch.distributed that `executor.step.comm` and `executor.step.groups` issue."""


def _lacking() -> list[str]:
    """What there is not: names of the device's module, and kernels of HCCL."""
    missing = [
        name for name in _SENT if not torch._C._dispatch_has_kernel_for_dispatch_key(f"c10d::{name}", "PrivateUse1")
    ]
    for name in _DEVICE:
        place: Any = NPU.own.module
        for part in name.split("."):
            place = getattr(place, part, None)
        if place is None:
            missing.append(name)
    return missing


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.npu.check", description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="of plan files")
    parser.add_argument("--out", type=Path, required=True, help="the JSON file to write")
    options = parser.parse_args()
    torch_npu = load_torch_npu()
    cases = {}
    for path in sorted(options.folder.glob("*.json")):
        cases[path.stem] = found = checked(lower(load_plan(path)))
        print(f"{path.stem}: {found['operator_calls']} operators called, {found['fused_operators']}", flush=True)
    record = {
        "command": "make check-npu", "date": datetime.date.today().isoformat(), "device": "none: meta tensors",
        "torch": torch.__version__, "torch_npu": torch_npu.__version__, "lacking": _lacking(),
        "fused_calls": sum(sum(case["fused_operators"].values()) for case in cases.values()), "cases": cases,
    }  # fmt: skip
    options.out.write_text(json.dumps(record, indent=2) + "\n")
    on_the_host = sorted({name for case in cases.values() for name in case["on_the_host"]})
    if record["lacking"] or on_the_host:
        print(f"torch-npu lacks {record['lacking']} and computes {on_the_host} on the host", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
