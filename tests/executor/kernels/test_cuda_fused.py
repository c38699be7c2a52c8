"""Fused runs as Inductor compiles them, against their steps one by one: on a CPU one run, on a GPU all and steps."""

import dataclasses

import msgspec
import numpy as np
import pytest
import torch

from benchmarks.peers.configs import MODELS
from executor.device import Device, pick_device
from executor.kernels import OpContext, StepCounter, rule_of
from executor.kernels.context import torch_dtype
from executor.kernels.fused import FusedRun, compiled
from executor.step.compiled import CompiledStep
from executor.step.interpreter import Interpreter
from plans.degrees import Degrees
from plans.degrees.plan import plan_of
from plans.lower import lower
from plans.model.transformer import transformer
from plans.optimizer import Optimizer

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
pytestmark = [pytest.mark.needs("compiler"), pytest.mark.filterwarnings("ignore::DeprecationWarning")]
ROUNDING = {torch.float32: 2e-6, torch.bfloat16: 2**-6}
"""Two roundings, relative to the largest element: steps round between them, a kernel where it ends."""


def plan_of_model(name, dtype="bfloat16", **rest):
    config = dataclasses.replace(MODELS[name], dtype=dtype, num_layers=2)
    optimizer = Optimizer(kind="adamw", settings={"lr": 1e-3})
    degrees = Degrees(micro_batch=2, global_batch=4, optimizer=optimizer, **rest)
    return plan_of(degrees, transformer(config, batch_size=4))


def runs(name, dtype):
    """Calls of the steps -> a run, and operands for it."""
    found = {}
    (group,) = lower(plan_of_model(name, dtype)).groups
    for _, line in group.walk():
        if line.call == "fused":
            context = OpContext(rank=0, mesh=group.mesh, counter=StepCounter(step=1), device=DEVICE)
            run = FusedRun(line, group.values, context, rule_of)
            found.setdefault("+".join(step.call for step in line.attrs["steps"]), (run, line, group.values))
    return found


def operands(line, values):
    generator = torch.Generator().manual_seed(0)
    made = []
    for name in line.inputs:
        kind = torch_dtype(values[name].dtype)
        shape = values[name].shape
        drawn = torch.randn(shape, generator=generator) if kind.is_floating_point else torch.ones(shape)
        made.append((drawn.abs() + 0.5 if "kept" in name else drawn).to(DEVICE, kind))
    return made


def close(found, expected):
    """To the rounding of the coarsest dtype: a run does not round what its steps hand on to each other."""
    rounding = max(ROUNDING[one.dtype] for one in expected)
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == other.dtype and one.shape == other.shape
        gap = float((one.double() - other.double()).abs().max())
        assert gap <= rounding * max(1e-30, float(other.double().abs().max()))


RUNS = {
    "tiny": [
        "add.forward+rms_norm.forward", "silu.forward+mul.forward", "rms_norm.grad0+rms_norm.grad1",
        "silu.forward+mul.grad0+mul.grad1+silu.grad0", "sum+rms_norm.grad0+sum+rms_norm.grad1",
    ],
    "tiny-gpt": [
        "add.forward+layer_norm.forward", "layer_norm.grad0+sum+layer_norm.grad1+layer_norm.grad2",
        "sum+layer_norm.grad0+sum+layer_norm.grad1+layer_norm.grad2",
    ],
}  # fmt: skip
ON_CPU = ("tiny", "sum+rms_norm.grad0+sum+rms_norm.grad1", "bfloat16")
CASES = [(model, steps, dtype) for model in RUNS for steps in RUNS[model] for dtype in ("bfloat16", "float32")]


@pytest.mark.parametrize(
    ("model", "steps", "dtype"),
    [pytest.param(*case, marks=() if case == ON_CPU else pytest.mark.needs("GPU")) for case in CASES],
)
def test_a_compiled_run_is_its_steps_to_rounding(model, steps, dtype):
    run, line, values = runs(model, dtype)[steps]
    given = operands(line, values)
    with torch.inference_mode():
        close(compiled(run, given)(*given), run.plainly(*given))
        assert compiled(run, given) is compiled(run, given)
    assert not torch.are_deterministic_algorithms_enabled()


def test_uncompilable_runs_are_executed_step_by_step_with_a_message(monkeypatch):
    run, line, values = runs("tiny", "float32")["silu.forward+mul.forward"]
    given = operands(line, values)

    def fails(*_):
        raise RuntimeError("no compiler\nand more")

    monkeypatch.setattr("executor.kernels.fused.compiled", fails)
    monkeypatch.setattr("executor.kernels.fused._REFUSED", set())
    monkeypatch.setattr("executor.kernels.fused.has_triton", lambda x: True)
    with pytest.warns(
        UserWarning, match=r"silu.forward \+ mul.forward runs as separate kernels: RuntimeError: no comp"
    ):
        found = run(None, line.attrs, *given)
    assert torch.equal(found, torch.nn.functional.silu(given[0]) * given[1])


def test_a_loss_reads_logits_in_half_precision_with_the_same_bits():
    found = runs("tiny", "bfloat16")
    for steps in ("cast.forward+cross_entropy.forward", "cast.forward+cross_entropy.grad0+cast.grad0"):
        run, line, values = found[steps]
        assert [*run.calls] == [each for each in steps.split("+") if "cast" not in each]
        given, known = operands(line, values), {**values, **line.attrs["inner"]}
        env = dict(zip(line.inputs, given, strict=True))
        for step in line.attrs["steps"]:
            first = known[step.outputs[0]]
            context = OpContext(rank=0, mesh=step.mesh, shape=first.shape, dtype=first.dtype, device=DEVICE)
            made = rule_of(step.call)(context, step.attrs, *[env[name] for name in step.inputs])
            env |= dict(zip(step.outputs, made if len(step.outputs) > 1 else (made,), strict=True))
        for name, tensor in zip(line.outputs, run.plainly(*given), strict=True):
            assert torch.equal(env[name], tensor)


# -- steps on a GPU ----------------------------------------------------------------------------------------------------


def losses(plan, *, replayed, steps=6):
    device: Device = pick_device("cuda")
    device.use()
    device.use_own_stream()
    draw = np.random.default_rng(0)
    rank = Interpreter(lower(plan), 0, device)
    rank.set_parameters({
        each.name: (0.1 * draw.standard_normal(each.shape) + each.name.endswith("norm.weight")).astype(np.float32)
        for each in plan.graph.parameters
    })  # fmt: skip
    step = CompiledStep(rank) if replayed else rank
    found = []
    for _ in range(steps):
        batch = {each.name: draw.integers(0, 100, each.shape) for each in plan.graph.inputs}
        found.append(float(step.step(batch)))
    if replayed:
        assert not step.fallback
        step.close()
    return found


@pytest.mark.needs("GPU")
@pytest.mark.filterwarnings("error:.*runs as separate kernels")
@pytest.mark.parametrize("name", ["tiny", "tiny-gpt", "tiny-moe"])
def test_fused_steps_train_as_others_and_replay_with_the_same_bits(name):
    fused = plan_of_model(name, "float32")
    plan = msgspec.structs.replace(fused, fused=False)
    expected, eager, replayed = (
        losses(plan, replayed=False),
        losses(fused, replayed=False),
        losses(fused, replayed=True),
    )
    np.testing.assert_allclose(eager, expected, rtol=1e-5)
    np.testing.assert_allclose(replayed, eager, rtol=1e-6)
