"""Steps that are skipped: loss scaling as torch.amp.GradScaler has it, and the guard against spikes of gradients."""

import itertools
import json

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from executor.device import Device
from executor.kernels import OpContext, StepCounter, optimizers, rule_of
from executor.reference.verification import verify
from executor.step.compiled import CompiledStep
from executor.step.interpreter import Interpreter
from executor.train.checkpoints.files import written_checkpoints
from executor.train.options import Checkpoints, RunOptions
from executor.train.run import run_rank
from executor.train.verdict import Verdict
from plans.errors import TrainingStopped, TwofoldError
from plans.layout import Layout
from plans.lower import lower
from plans.model.graph import Operator, Tensor
from plans.optimizer import Optimizer
from plans.plan import Plan, Stage, plan_from_json, plan_to_json, save_plan
from plans.step_check import Held, LossScale, Reason, Spike, StepCheck
from simulator.engine.check import check_program
from tests import ROOT
from tests.support.layered_training import ADAMW, MOMENTUM, accumulated, batches, graph, parameters, plan
from tests.support.on_ranks import lowered, run_on_ranks
from tests.support.recording_device import RecordingDevice
from twofold.cli import main

STEPS, CUT, NUM_RANKS = 14, 8, 4
MEGATRON = {"gradient_dtype": "float32", "master_dtype": "float32"}
SCALE = LossScale(initial=2.0**21, growth_every=3)
SCALED = StepCheck(loss_scale=SCALE)
SPIKES = StepCheck(spike=Spike(factor=5.0, window=3, then="skip"))
ONE, DP, BOTH = Layout((1,), ("dp",)), Layout((4,), ("dp",)), Layout((2, 2), ("dp", "tp"), (0, 2, 3, 1))


def narrowed():
    """Three layers in float32, with float16 between the first and the others: only there gradients overflow."""
    of = graph()
    tensors, operators = dict(of.tensors), []
    made = tensors["layers.0.gelu.out"]
    for name, dtype in (("narrow", "float16"), ("wide", "float32")):
        tensors[f"{name}.out"] = Tensor(name=f"{name}.out", shape=made.shape, kind="activation", dtype=dtype)
    for operator in of.operators:
        inputs = tuple("wide.out" if each == "layers.0.gelu.out" else each for each in operator.inputs)
        operators.append(replace(operator, inputs=inputs if operator.name == "layers.1.linear" else operator.inputs))
        if operator.name == "layers.0.gelu":
            for name, given in (("narrow", "layers.0.gelu.out"), ("wide", "narrow.out")):
                operators.append(Operator(name=name, kind="cast", inputs=(given,), outputs=(f"{name}.out",)))
    return replace(of, name="narrowed", tensors=tensors, operators=tuple(operators))


HALF, NARROWED = graph(dtype="float16"), narrowed()


def adamw(level=0, **rest):
    return Optimizer(kind="adamw", settings=ADAMW, parallel_level=level, threshold_bytes=40, **rest)


def momentum(level=0, **rest):
    return Optimizer(kind="momentum", settings=MOMENTUM, parallel_level=level, threshold_bytes=40, **rest)


def two_stages(optimizer, **rest):
    """The casts and all but one layer on ranks 0 and 2, the rest with the loss on 1 and 3."""
    whole = plan(Layout((2,), ("dp",)), optimizer, of=NARROWED)
    names = whole.stages[0].operators
    stages = (
        Stage(mesh=Layout((2,), ("dp",), (0, 2)), operators=names[:7]),
        Stage(mesh=Layout((2,), ("dp",), (1, 3)), operators=names[7:]),
    )
    return Plan(
        graph=NARROWED, stages=stages, strategies=whole.strategies, num_micro_batches=4, optimizer=optimizer, **rest
    )


def scaled(mesh, optimizer, *, of=NARROWED, check=SCALED, **rest):
    return plan(mesh, optimizer, of=of, step_check=check, **rest)


ALONE = {
    "adamw": scaled(ONE, adamw(**MEGATRON), of=HALF),
    "adamw, clipped, micro-batches": scaled(ONE, adamw(**MEGATRON, clip_norm=0.05), of=HALF, num_micro_batches=2),
    "adamw, gradients in float16": scaled(ONE, adamw(master_dtype="float32"), of=HALF),
    "momentum, clipped": scaled(ONE, momentum(**MEGATRON, clip_norm=0.05), of=HALF),
    "sgd": scaled(ONE, Optimizer(settings={"lr": 0.1}, **MEGATRON), of=HALF, num_micro_batches=2),
}
ON_RANKS = {
    "level 0": scaled(BOTH, adamw(0), num_micro_batches=2),  # twice the same rows, as in the third and in the spikes
    "level 1, columns too": scaled(BOTH, adamw(1), tp="tp"),
    "level 2, clipped": scaled(BOTH, adamw(2, clip_norm=0.05), num_micro_batches=2),
    "level 3": scaled(DP, adamw(3), num_micro_batches=2),
    "level 3, two stages": two_stages(adamw(3), step_check=SCALED),
    "float16 weights, level 1": scaled(DP, adamw(1, **MEGATRON), of=HALF),  # a rank's rows are a micro-batch
    "spikes": scaled(BOTH, adamw(2), check=SPIKES, num_micro_batches=2),
    "spikes, two stages, momentum, clipped": two_stages(momentum(1, clip_norm=0.05), step_check=SPIKES),
}
NEXT = {
    "level 0": "level 3, two stages",
    "level 3, two stages": "level 1, columns too",
    "level 1, columns too": "level 3",
    "level 3": "level 0",
}
"""Plans that differ in how they are spread only -> the one that goes on with the checkpoint of each; all go on once."""
SPIKE_AT, NAN_AT = 6, 10


def feed_of(each, steps=STEPS):
    """Batches; where spikes are guarded against one is far off, and a row of another is no number."""
    feed = batches(each.graph, steps)
    if each.step_check.spike is not None:
        feed[SPIKE_AT]["y"] = feed[SPIKE_AT]["y"] * 1e3
        feed[NAN_AT]["x"][3, 2] = np.nan
    return feed


def reference(each, num_micro_batches, steps=STEPS):
    """Plain torch on one process: losses, masters, scales before each step, steps without an update.

    Loss scaling is torch's GradScaler; steps that a guard is to skip are named by hand.
    """
    optimizer, feed = each.optimizer, feed_of(each, steps)
    scale = each.step_check.loss_scale
    omitted = () if scale is not None else (SPIKE_AT, NAN_AT)
    dtypes = {tensor.name: getattr(torch, tensor.dtype) for tensor in each.graph.parameters}
    weights = {
        name: torch.tensor(value).to(dtypes[name]).requires_grad_() for name, value in parameters(each.graph).items()
    }
    masters = {name: weight.detach().float().clone().requires_grad_() for name, weight in weights.items()}
    make = torch.optim.AdamW if optimizer.kind == "adamw" else torch.optim.SGD
    update = make(list(masters.values()), **optimizer.settings, foreach=False)
    scaler = torch.amp.GradScaler("cpu", enabled=scale is not None)
    if scale is not None:
        scaler = torch.amp.GradScaler(
            "cpu", init_scale=scale.initial, growth_factor=scale.growth, backoff_factor=scale.backoff,
            growth_interval=scale.growth_every,
        )  # fmt: skip
    losses, scales, skipped = [], [], []

    def between(value):
        return value.half().float() if each.graph.name == "narrowed" else value

    for step, batch in enumerate(feed):
        before = scaler.get_scale()
        scales.append(before)
        total, sums = accumulated(
            each.graph, optimizer, weights, batch, num_micro_batches, scaled=scaler.scale, between=between
        )
        for name, master in masters.items():
            master.grad = sums[name].to(master.dtype)
        losses.append(total)
        scaler.unscale_(update)
        if optimizer.clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(masters.values(), optimizer.clip_norm)
        if step not in omitted:
            scaler.step(update)
        scaler.update()
        skipped.append(step in omitted or scaler.get_scale() < before)
        with torch.no_grad():
            for name, master in masters.items():
                weights[name].copy_(master)
    return losses, {name: master.detach().numpy() for name, master in masters.items()}, scales, skipped


def trained(each, folder, *, first=0, resume=None, save=False, steps=STEPS):
    """The result of a run, and what its check decided at every step."""
    found = []
    asked = Checkpoints(folder=folder, every=CUT if save else 1000, keep=2, resume=resume)
    options = RunOptions(
        checkpoints=asked, record_steps=0, count=save, on_check=lambda step, verdict: found.append((step, verdict))
    )
    feed = iter(feed_of(each, max(steps, STEPS))[first:steps])
    result = run_rank(lowered(each), each, feed, parameters(each.graph), steps - first, device="cpu", options=options)
    assert [step for step, _ in found] == list(range(first, steps))
    assert not save or result.differences == ()
    return result, [verdict for _, verdict in found]


def saved(path, result, verdicts):
    np.savez(
        path, losses=result.losses, scales=[each.loss_scale for each in verdicts],
        skipped=[each.is_skipped for each in verdicts], in_all=[each.skipped for each in verdicts],
        norms=[each.norm for each in verdicts], **(result.weights or {}),
    )  # fmt: skip


@pytest.mark.parametrize("name", ALONE)
def test_one_process_scales_and_skips_as_the_scaler_of_torch(name, tmp_path):
    each = ALONE[name]
    result, verdicts = trained(each, tmp_path)
    losses, masters, scales, skipped = reference(each, each.num_micro_batches)
    assert [verdict.loss_scale for verdict in verdicts] == scales
    assert [verdict.is_skipped for verdict in verdicts] == skipped
    assert 3 < sum(skipped) < 10 and any(later > earlier for earlier, later in itertools.pairwise(scales))
    np.testing.assert_allclose(result.losses, losses, rtol=1e-6)
    for parameter, expected in masters.items():
        np.testing.assert_allclose(result.weights[parameter], expected, rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize("name", ["adamw", "momentum, clipped"])
def test_hundreds_of_steps_are_those_of_torch(name, tmp_path):
    """The scale grows and falls many times; one other decision, and nothing after it would be the same."""
    each = replace(ALONE[name], step_check=StepCheck(loss_scale=LossScale(growth_every=20)))
    result, verdicts = trained(each, tmp_path, steps=300)
    losses, masters, scales, skipped = reference(each, 1, steps=300)
    assert [verdict.loss_scale for verdict in verdicts] == scales and len(scales) == 300
    assert [verdict.is_skipped for verdict in verdicts] == skipped and sum(skipped) > 5
    np.testing.assert_allclose(result.losses, losses, rtol=1e-6)
    for parameter, expected in masters.items():
        np.testing.assert_allclose(result.weights[parameter], expected, rtol=1e-6, atol=1e-6)


def work(rank, folder):
    for name, each in ON_RANKS.items():
        own = folder / name
        own.mkdir(exist_ok=True)
        saved(own / f"whole.{rank}.npz", *trained(each, own / "a", save=True))
        checkpoint, _ = sorted(written_checkpoints(own / "a"))
        saved(own / f"resumed.{rank}.npz", *trained(each, own / "b", first=CUT, resume=checkpoint))
        if (other := NEXT.get(name)) is not None:
            ran = trained(ON_RANKS[other], own / "c", first=CUT, resume=checkpoint)
            saved(own / f"on {other}.{rank}.npz", *ran)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checked")
    run_on_ranks(work, NUM_RANKS, folder)
    return folder


@pytest.mark.ranks
@pytest.mark.parametrize("name", ON_RANKS)
def test_all_ranks_skip_the_same_steps_as_plain_torch(folder, name):
    each = ON_RANKS[name]
    is_half = name.startswith("float16")
    losses, masters, scales, skipped = reference(each, NUM_RANKS if is_half else each.num_micro_batches)
    for rank in range(NUM_RANKS):
        with np.load(folder / name / f"whole.{rank}.npz") as found:
            assert found["scales"].tolist() == scales
            assert found["skipped"].tolist() == skipped
            assert found["in_all"].tolist() == np.cumsum(skipped).tolist()
            np.testing.assert_allclose(found["losses"], losses, rtol=2e-6)
    assert sum(skipped) == 2 if each.step_check.spike is not None else 0 < sum(skipped) < 10
    with np.load(folder / name / "whole.0.npz") as found:
        for parameter, expected in masters.items():
            assert np.linalg.norm(found[parameter] - expected) <= 3e-6 * np.linalg.norm(expected), parameter


@pytest.mark.ranks
@pytest.mark.parametrize("name", ON_RANKS)
def test_a_resumed_run_scales_and_skips_as_the_uninterrupted_one_bit_for_bit(folder, name):
    for rank in range(NUM_RANKS):
        whole = np.load(folder / name / f"whole.{rank}.npz")
        resumed = np.load(folder / name / f"resumed.{rank}.npz")
        for key in ("losses", "scales", "skipped", "in_all", "norms"):
            assert np.array_equal(whole[key][CUT:], resumed[key], equal_nan=True), key
        for weight in resumed.files:
            if weight.startswith("layers."):
                assert np.array_equal(whole[weight], resumed[weight]), weight
    manifest = json.loads((folder / name / "a" / f"step-{CUT:08d}" / "manifest.json").read_text())
    assert manifest["skipped"] == whole["in_all"][CUT - 1] > 0


@pytest.mark.ranks
def test_another_plan_resumes_with_the_scale(folder):
    others = sorted(folder.glob("*/on *.0.npz"))
    assert len(others) == len(NEXT) == len(set(NEXT.values()))
    for path in others:
        whole, resumed = np.load(path.parent / "whole.0.npz"), np.load(path)
        for key in ("scales", "skipped", "in_all"):
            assert np.array_equal(whole[key][CUT:], resumed[key]), (path, key)
        np.testing.assert_allclose(resumed["losses"], whole["losses"][CUT:], rtol=2e-6)


def test_a_spike_stops_training_before_it_is_applied(tmp_path):
    check = StepCheck(spike=Spike(factor=5.0, window=3))
    each = scaled(ONE, adamw(), check=check)
    with pytest.raises(TrainingStopped, match=r"step 7 was not applied: the norm of its gradients is \d+"):
        trained(each, tmp_path)
    late = scaled(ONE, adamw(), check=StepCheck(spike=Spike(factor=5.0, window=12)))
    run = batches(NARROWED, STEPS)
    run[SPIKE_AT]["y"] *= 1e3  # there are not twelve norms yet
    run[NAN_AT]["y"] *= 1e8  # the loss is finite, its gradient is not in float16
    with pytest.raises(TrainingStopped, match=r"step 11 was not applied: .*its gradients are not finite"):
        run_rank(lower(late), late, iter(run), parameters(NARROWED), STEPS, device="cpu")
    assert run_rank(lower(late), late, iter(run), parameters(NARROWED), NAN_AT, device="cpu").losses[-1] < 2


def test_steps_that_are_skipped_for_ever_stop_training(tmp_path):
    each = scaled(ONE, adamw(), check=StepCheck(loss_scale=LossScale(initial=1e36, backoff=0.9)))
    run = iter(batches(NARROWED, 40))
    with pytest.raises(TrainingStopped, match=r"30 steps in a row were skipped, the last one is step 30: .*loss scale"):
        run_rank(lower(each), each, run, parameters(NARROWED), 40, device="cpu")


def held_of(**numbers):
    held = torch.zeros(len(Held))
    held[Held.SCALE] = held[Held.USED] = 1
    for name, value in numbers.items():
        held[Held[name]] = value
    return held


LOSSES = {
    "l1_loss": ((6, 5), ()),
    "mse_loss": ((6, 5), ()),
    "mean_loss": ((6, 5), ()),
    "cross_entropy": ((6, 5), ("sums",)),
    "cross_entropy, some ignored": ((6, 5), ("count", "sums")),
}


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("name", LOSSES)
def test_the_gradient_of_a_scaled_loss_is_multiplied_before_it_is_rounded(name, dtype):
    """Each element is by far too small for float16 without its scale."""
    kind, (shape, more) = name.partition(",")[0], LOSSES[name]
    attrs = {"scale": 0.25, "count": 2**24} | ({"ignore_index": 3} if "count" in more else {})
    random = torch.Generator().manual_seed(1)
    x = torch.randn(shape, generator=random).to(getattr(torch, dtype))
    of = torch.randint(0, 5, shape[:1], generator=random) if kind == "cross_entropy" else torch.zeros_like(x)
    known = {"count": torch.tensor(2.0**24), "sums": torch.logsumexp(x.double(), -1)}
    inputs = [] if kind == "mean_loss" else [x, of, *(known[each] for each in more)]
    held = held_of(SCALE=2.0**22)

    def gradient(wide, *scaled):
        context = OpContext(rank=0, mesh=ONE, shape=shape, dtype=wide)
        given = [each.to(getattr(torch, wide)) if each.dtype == x.dtype else each for each in inputs]
        return rule_of(f"{kind}.grad0")(context, attrs | ({"scaled": True} if scaled else {}), *given, *scaled)

    exact = gradient("float64") * 2.0**22
    made = gradient(dtype, held)
    assert made.dtype == getattr(torch, dtype) and made.shape == shape and (exact.abs() > 1e-3).any()
    torch.testing.assert_close(made.double(), exact, rtol=2 * torch.finfo(made.dtype).eps, atol=1e-6)
    if dtype == "float16":
        assert not gradient(dtype).abs().gt(1e-7).any()


def test_the_scale_is_that_of_torch_for_any_row_of_finite_and_other_steps():
    scale = LossScale(initial=2.0**120, growth=4.0, backoff=0.25, growth_every=3)
    theirs = torch.amp.GradScaler("cpu", 2.0**120, 4.0, 0.25, 3)
    parameter = torch.nn.Parameter(torch.zeros(1))
    update = torch.optim.SGD([parameter], lr=0.0)
    held, rule = held_of(SCALE=2.0**120), rule_of("step_check")
    random, in_a_row = np.random.default_rng(3), 0
    for _ in range(300):
        finite = bool(random.random() < 0.85)
        theirs.scale(torch.zeros(1))
        parameter.grad = torch.tensor([1.0 if finite else np.inf])
        theirs.step(update)
        theirs.update()
        square = torch.tensor(1.0 if finite else float(random.choice([np.inf, np.nan])))
        skips, _, factor = rule(None, {"check": StepCheck(loss_scale=scale), "clip_norm": None}, square, held)
        in_a_row = 0 if finite else in_a_row + 1
        assert held[Held.SCALE] == theirs.get_scale() and bool(skips) is not finite
        assert factor == 1 / held[Held.USED] and held[Held.IN_A_ROW] == in_a_row
    assert held[Held.SCALE] < np.inf and held[Held.SKIPPED] > 20


@pytest.mark.parametrize("kind", ["sgd", "momentum", "adamw"])
@pytest.mark.parametrize("skips", [0.0, 1.0])
def test_what_a_gpu_does_without_looking_is_what_a_cpu_does(kind, skips, monkeypatch):
    """torch's fused kernel with the decision, and putting back what was there: both run on a CPU here."""
    random = torch.Generator().manual_seed(0)
    attrs = {"lr": 0.1, "checked": True} | ({"dampening": 0.3, "nesterov": 0.0} if kind == "momentum" else {})
    count = {"sgd": 0, "momentum": 1, "adamw": 2}[kind]

    def operands(dtype=torch.float32):
        random.manual_seed(0)
        states = [torch.rand(3, 4, generator=random).to(dtype) for _ in range(count)]
        gradient = torch.full((3, 4), torch.nan) if skips else torch.randn(3, 4, generator=random)
        return [torch.randn(3, 4, generator=random), gradient, *states]

    def run(skipped, dtype=torch.float32):
        counter, own = StepCounter(step=6), operands(dtype)
        context = OpContext(rank=0, mesh=ONE, counter=counter)
        counter.begin()
        made = rule_of(f"{kind}.update")(context, attrs, *own, torch.tensor(skips), held_of(SKIPPED=skipped))
        return [each.clone() for each in (made if isinstance(made, tuple) else (made,))]

    for skipped in (2.0, 6.0):  # the fifth update, and the first
        expected = run(skipped)
        before = operands()
        same = all(torch.equal(mine, old) for mine, old in zip(expected, (before[0], *before[2:]), strict=True))
        assert same is bool(skips)
        with monkeypatch.context() as patch:
            patch.setattr(optimizers, "_can_look", lambda tensor: False)
            for mine, other in zip(run(skipped), expected, strict=True):
                assert torch.equal(mine, other)
            if kind == "adamw":
                patch.setattr(optimizers, "is_gpu", lambda tensor: True)
                for mine, other in zip(run(skipped), expected, strict=True):
                    torch.testing.assert_close(mine, other, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("name", ["adamw, clipped, micro-batches", "momentum, clipped", "sgd", "spikes"])
def test_replayed_steps_decide_anew_and_without_the_host(name, monkeypatch):
    """On a stand-in for a device that records: whatever asks for a number on the host is refused while it does."""
    each = ALONE.get(name) or scaled(ONE, adamw(), check=SPIKES)
    monkeypatch.setattr(optimizers, "_can_look", lambda tensor: False)
    device, runs = RecordingDevice(), []
    for where in (device, Device(kind="cpu")):
        rank = Interpreter(lower(each), 0, where)
        rank.set_parameters(parameters(each.graph))
        stepper, losses, scales = CompiledStep(rank) if where is device else rank, [], []
        for batch in feed_of(each):
            losses.append(stepper.step(batch).item())
            scales.append(stepper.held_of_check[1].clone())
        runs.append((losses, scales, rank.kept_tensors))
    assert device.log.count("replay") == STEPS - 2 and device.log.count("capture") == 1
    np.testing.assert_array_equal(runs[0][0], runs[1][0])
    for mine, eager in zip([*runs[0][1], *runs[0][2]], [*runs[1][1], *runs[1][2]], strict=True):
        np.testing.assert_array_equal(mine.numpy(), eager.numpy())
    skipped = reference(each, each.num_micro_batches)[3]
    assert [bool(held[Held.REASON]) for held in runs[0][1]] == skipped and any(skipped[2:])


def test_a_file_keeps_the_check_and_its_program_is_sound():
    for each in (*ALONE.values(), *ON_RANKS.values()):
        assert plan_from_json(plan_to_json(each)) == each
        check_program(lower(each))


@pytest.mark.parametrize(
    ("check", "of", "optimizer", "says"),
    [
        (SCALED, graph(), adamw(), "loss_scale is for float16, but no tensor of the plan is float16"),
        (SCALED, HALF, adamw(), "loss_scale needs weights that are updated in float32, and '.*' is updated in float16"),
        (
            SCALED,
            HALF,
            adamw(master_dtype="bfloat16"),
            "is updated in bfloat16; plan with an optimizer of master_dtype",
        ),
        (StepCheck(loss_scale=LossScale(initial=0.0)), NARROWED, adamw(), "loss_scale.initial must be .* not 0.0"),
        (StepCheck(loss_scale=LossScale(growth=1.0)), NARROWED, adamw(), "loss_scale.growth must be .* not 1.0"),
        (
            StepCheck(loss_scale=LossScale(backoff=1.0)),
            NARROWED,
            adamw(),
            "loss_scale.backoff must be above 0 and below 1, not 1.0",
        ),
        (
            StepCheck(loss_scale=LossScale(growth_every=0)),
            NARROWED,
            adamw(),
            "loss_scale.growth_every must be .* not 0",
        ),
        (StepCheck(spike=Spike(factor=1.0)), NARROWED, adamw(), "spike.factor must be .* not 1.0"),
        (StepCheck(spike=Spike(factor=3.0, window=1)), NARROWED, adamw(), "spike.window must be .* not 1"),
    ],
)
def test_a_check_that_cannot_be_is_refused(check, of, optimizer, says):
    with pytest.raises(TwofoldError, match=says):
        scaled(ONE, optimizer, of=of, check=check)


def test_a_plan_that_skips_steps_is_not_compared_with_training_that_does_not():
    with pytest.raises(TwofoldError, match="verify does not support skipped steps"):
        verify(ALONE["sgd"], model="module:net", steps=3)


def test_texts_of_verdicts():
    spike = Verdict.of(SPIKES, held_of(REASON=Reason.SPIKE, NORM=30.0, USUAL=2.0, SKIPPED=4, IN_A_ROW=1))
    assert str(spike) == "the norm of its gradients is 30, the mean of the updates before 2" and spike.skipped == 4
    spike.stop_where_asked(9)
    scale = Verdict.of(SCALED, held_of(REASON=Reason.NOT_FINITE, SCALE=4, USED=8))
    assert str(scale) == "its gradients are not finite; the loss scale was 8 and is 4 now"


JOB = """
plan = "{folder}/plan.json"
steps = {steps}
out = "{folder}/out"
data = "{data}"
log_dir = "{folder}/logs"
metrics = ["csv"]
"""
CHECKS = """
[checkpoints]
every = 8
[loss_scale]
initial = 2097152
growth_every = 3
"""


def fed():
    return batches(NARROWED, STEPS)


def write_job(folder, steps=STEPS, more=CHECKS):
    path = folder / "job.toml"
    path.write_text(JOB.format(folder=folder, steps=steps, data=f"{__file__}:fed") + more)
    return str(path)


@pytest.mark.ranks
def test_a_job_scales_losses_and_resumes(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    # initial weights are drawn: what is compared are the job's own figures
    save_plan(replace(scaled(Layout((2,), ("dp",)), adamw(1)), step_check=None), tmp_path / "plan.json")
    assert main(["train", write_job(tmp_path, steps=10)]) == 0
    told = capsys.readouterr().out
    assert "step 7 was skipped: its gradients are not finite; the loss scale was 8388608 and is 4194304 now" in told
    assert main(["train", write_job(tmp_path, more="[checkpoints]\nevery = 8\n"), "--resume"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "of its steps were skipped" in line and "keep loss_scale or spike in the job" in line
    assert main(["train", write_job(tmp_path), "--resume"]) == 0
    rows = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    scale, good, skipped = SCALE.initial, 0, 0
    for row in rows:
        assert row["loss_scale"] == scale
        skipped += row["skipped"]
        good = 0 if row["skipped"] else good + 1
        assert row["skipped_steps"] == skipped and (row["gradient_norm"] is None) == row["skipped"]
        scale = scale / 2 if row["skipped"] else scale * 2 if good == 3 else scale
        good %= 3
    assert 0 < skipped < STEPS


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ("[loss_scale]\ninital = 3\n", "unknown key `inital`"),
        ("[loss_scale]\n", "no tensor of the plan is float16"),
        ("[spike]\nwindow = 3\n", "missing key `factor`"),
        ('[spike]\nfactor = 3\nthen = "warn"\n', "then"),
        ("[spike]\nfactor = 0.5\n", "spike.factor must be a finite number above 1, not 0.5"),
    ],
)
def test_a_bad_job_is_refused_in_one_line_before_a_launch(more, says, tmp_path, capsys):
    save_plan(plan(ONE, adamw()), tmp_path / "plan.json")
    assert main(["train", write_job(tmp_path, more=more)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ") and says in line and not (tmp_path / "logs").exists()
