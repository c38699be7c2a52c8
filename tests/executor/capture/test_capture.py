"""Capture: the graph computes what the module computes, under the module's own names, or says why it cannot."""

import contextlib
import dataclasses
import math
import os
import random
import sys
import warnings
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from costmodels import Machine
from executor.capture.capture import capture
from executor.recompute import recompute
from executor.reference.reference import train_reference
from executor.stages import assign_stages
from executor.train.losscell import MAELoss, WithLossCell
from executor.weights.initial import initialised_copy
from plans.errors import TwofoldError
from plans.lower import lower
from plans.optimizer import Optimizer
from search import search
from tests.support.on_ranks import run_on_ranks


class Network(nn.Module):
    """The network of the seed, smaller."""

    def __init__(self, inplace=False):
        super().__init__()
        self.flatten = nn.Flatten()
        self.layer1 = nn.Linear(2 * 3, 8)
        self.relu1 = nn.ReLU(inplace=inplace)
        self.layer2 = nn.Linear(8, 8)
        self.relu2 = nn.ReLU(inplace=inplace)
        self.layer3 = nn.Linear(8, 1)

    def forward(self, x):
        x = self.relu1(self.layer1(self.flatten(x)))
        x = self.relu2(self.layer2(x))
        return self.layer3(x)


class Ends(nn.Module):
    """A module made of a function of (parts, x, label), for one-line models."""

    def __init__(self, function, **parts):
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, part)
        self.function = function

    def forward(self, x, label):
        return self.function(self, x, label)


def mean_to(label_of):
    """A one-line model whose loss is the mean squared error of what `label_of` makes."""
    return lambda parts, x, label: functional.mse_loss(label_of(parts, x), label)


# -- an interpreter of graphs in numpy: the independent oracle ---------------------------------------------------------


def erf(x):
    return np.vectorize(math.erf)(x)


def softmax_nll(x, labels):
    shifted = x - x.max(-1, keepdims=True)
    log_probability = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    return -log_probability[np.arange(len(labels)), labels].mean()


KINDS = {
    "linear": lambda tensors, op: tensors[0] @ tensors[1].T + (tensors[2] if len(tensors) == 3 else 0),
    "relu": lambda tensors, op: np.maximum(tensors[0], 0),
    "silu": lambda tensors, op: tensors[0] / (1 + np.exp(-tensors[0])),
    "abs": lambda tensors, op: np.abs(tensors[0]),
    "gelu": lambda tensors, op: (
        0.5 * tensors[0] * (1 + erf(tensors[0] / np.sqrt(2)))
        if op.attrs["approximate"] == "none"
        else 0.5 * tensors[0] * (1 + np.tanh(np.sqrt(2 / np.pi) * (tensors[0] + 0.044715 * tensors[0] ** 3)))
    ),
    "add": lambda tensors, op: tensors[0] + tensors[1],
    "sub": lambda tensors, op: tensors[0] - tensors[1],
    "mul": lambda tensors, op: tensors[0] * tensors[1],
    "l1_loss": lambda tensors, op: np.abs(tensors[0] - tensors[1]).mean(),
    "mse_loss": lambda tensors, op: ((tensors[0] - tensors[1]) ** 2).mean(),
    "cross_entropy": lambda tensors, op: softmax_nll(*tensors),
}


def interpreted_loss(graph, module, batch):
    """The loss of a batch, operator by operator in numpy, checking every shape and dtype on the way."""
    inputs = [tensor.name for tensor in graph.tensors.values() if tensor.kind == "input"]
    values = {name: part.numpy() for name, part in zip(inputs, batch, strict=True)}
    values |= {tensor.name: module.get_parameter(tensor.name).detach().numpy() for tensor in graph.parameters}
    for operator in graph.operators:
        (output,) = operator.outputs
        made = graph.tensors[output]
        tensors = [values[name] for name in operator.inputs]
        if operator.kind == "reshape":
            values[output] = tensors[0].reshape(made.shape)
        elif operator.kind == "cast":
            values[output] = tensors[0].astype(made.dtype)
        else:
            assert {str(tensor.dtype) for tensor in tensors} <= {made.dtype, "int64"}
            values[output] = np.asarray(KINDS[operator.kind](tensors, operator)).astype(made.dtype)
        assert np.shape(values[output]) == made.shape, operator.name
    return float(values[graph.loss])


def check(module, *batch):
    """Capture `module`, compare the graph with it on real values, and return the graph."""
    graph = capture(module, batch)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = float(module(*batch))
    assert interpreted_loss(graph, module, batch) == pytest.approx(expected, rel=2e-6)
    return graph


def images(batch=4):
    generator = torch.Generator().manual_seed(3)
    return torch.randn(batch, 2, 3, generator=generator), torch.randint(0, 10, (batch,), generator=generator)


def vectors(features=6, batch=4):
    generator = torch.Generator().manual_seed(4)
    return torch.randn(batch, features, generator=generator), torch.randn(batch, features, generator=generator)


# -- the seed's network ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("inplace", [False, True])
def test_the_network_of_the_seed(inplace):
    module = WithLossCell(Network(inplace), MAELoss())
    graph = check(module, *images())
    assert [operator.name for operator in graph.operators] == [
        "_backbone.flatten.reshape",
        "_backbone.layer1.linear",
        "_backbone.relu1.relu",
        "_backbone.layer2.linear",
        "_backbone.relu2.relu",
        "_backbone.layer3.linear",
        "_loss_fn.reshape",
        "_loss_fn.cast",
        "_loss_fn.l1_loss",
    ]
    assert [operator.module for operator in graph.operators][1:3] == ["_backbone.layer1", "_backbone.relu1"]
    assert {tensor.name: tensor.shape for tensor in graph.parameters} == {
        name: tuple(parameter.shape) for name, parameter in module.named_parameters()
    }
    assert [tensor.name for tensor in graph.inputs] == ["data", "label"]
    assert (graph.name, graph.batch_size) == ("Network", 4)


def test_meta_modules_and_shapes_give_the_same_graph_and_leave_the_module_alone():
    real = WithLossCell(Network(), MAELoss())
    before = dict(real.named_parameters())
    graph = capture(real, images())
    assert all(before[name] is parameter and not parameter.is_meta for name, parameter in real.named_parameters())
    with torch.device("meta"):
        meta = WithLossCell(Network(), MAELoss())
    for examples in (((4, 2, 3), ((4,), "int64")), {"data": (4, 2, 3), "label": torch.empty(4, dtype=torch.int64)}):
        assert capture(meta, examples) == graph


def test_micro_batches_have_the_shapes_of_a_capture_of_their_size():
    module = WithLossCell(Network(), MAELoss())
    assert capture(module, images(8)).with_batch(2) == capture(module, images(2))


def test_the_module_is_restored_when_capture_fails():
    module = WithLossCell(nn.Softmax(dim=1), MAELoss())
    module.extra = nn.Linear(2, 2)
    weight = module.extra.weight
    with pytest.raises(TwofoldError):
        capture(module, (vectors()[0], vectors()[1]))
    assert module.extra.weight is weight


# -- operators ---------------------------------------------------------------------------------------------------------


def linear(features=6, **settings):
    return {"fc": nn.Linear(features, features, **settings)}


def weights(**shapes):
    return {name: nn.Parameter(torch.randn(shape)) for name, shape in shapes.items()}


def reads_after_change(m, x):
    y = m.fc(x)
    z = y + y
    view = y.view(-1, 2, 3)
    y.relu_()
    return z + view.flatten(1)


def keeps(m, x):
    """The same as one linear, but for the bits that leave no operator."""
    y = m.fc(nn.Identity()(x.detach().clone())).contiguous().float()
    return nn.Dropout(0.5).eval()(nn.Dropout(0.0)(y))


MODELS = {
    "silu, gelu, abs": (mean_to(lambda m, x: functional.gelu(m.fc(functional.silu(x))).abs()), linear()),
    "gelu tanh": (mean_to(lambda m, x: functional.gelu(m.fc(x), approximate="tanh")), linear()),
    "without bias": (mean_to(lambda m, x: m.fc(x)), linear(bias=False)),
    "x @ w.t()": (mean_to(lambda m, x: x @ m.w.t()), weights(w=(6, 6))),
    "x @ w.T + b": (mean_to(lambda m, x: x @ m.w.T + m.b), weights(w=(6, 6), b=6)),
    "mm of a transpose": (mean_to(lambda m, x: x.mm(m.w.transpose(-1, -2))), weights(w=(6, 6))),
    "addmm": (mean_to(lambda m, x: torch.addmm(m.fc.bias, x, m.fc.weight.t())), linear()),
    "residual and broadcast": (mean_to(lambda m, x: x + m.fc(x) * m.w - m.w), linear() | weights(w=6)),
    "reshapes": (mean_to(lambda m, x: m.fc(x.view(len(x), 2, 3)).unsqueeze(1).flatten(1).squeeze()), linear(3)),
    "what changes nothing": (mean_to(keeps), linear()),
    "double precision inside": (mean_to(lambda m, x: m.fc(x.double()).float()), linear(dtype=torch.float64)),
    "mixed operands are cast": (lambda m, x, label: functional.l1_loss(m.fc(x), label.double()), linear()),
    "prediction second": (lambda m, x, label: functional.mse_loss(label, m.fc(x)), linear()),
    "in place": (mean_to(lambda m, x: m.fc(x).relu_().add_(m.w)), linear() | weights(w=6)),
    "in place without its result": (mean_to(lambda m, x: changed(m.fc(x))), linear()),
    "in place, read again by a view": (mean_to(reads_after_change), linear()),
}


def changed(x):
    x.relu_()
    return x


@pytest.mark.parametrize("model", MODELS)
def test_the_graph_computes_what_the_module_computes(model):
    function, parts = MODELS[model]
    check(Ends(function, **parts), *vectors())


def test_cross_entropy():
    module = WithLossCell(nn.Linear(6, 10), nn.CrossEntropyLoss())
    graph = check(module, vectors()[0], torch.tensor([3, 1, 9, 0]))
    assert graph.operators[-1].kind == "cross_entropy"


def test_transposed_weights_and_addmm_are_linear():
    for model, inputs in (("x @ w.t()", 2), ("mm of a transpose", 2), ("addmm", 3)):
        function, parts = MODELS[model]
        first = capture(Ends(function, **parts), vectors()).operators[0]
        assert (first.kind, len(first.inputs)) == ("linear", inputs)


# -- names, ties, repeated modules -------------------------------------------------------------------------------------


def test_nested_modules_keep_their_paths_and_functions_the_path_of_their_caller():
    block = nn.Sequential(nn.Linear(6, 6), nn.ReLU())
    graph = check(WithLossCell(nn.Sequential(block, Network().layer1), nn.MSELoss()), vectors()[0], torch.randn(4, 8))
    assert [operator.name for operator in graph.operators] == [
        "_backbone.0.0.linear", "_backbone.0.1.relu", "_backbone.1.linear", "_loss_fn.mse_loss",
    ]  # fmt: skip


def test_a_tied_parameter_is_one_tensor_with_two_readers():
    first, second = nn.Linear(6, 6), nn.Linear(6, 6)
    second.weight = first.weight
    module = WithLossCell(nn.Sequential(first, nn.ReLU(), second), nn.MSELoss())
    graph = check(module, *vectors())
    assert [tensor.name for tensor in graph.parameters] == [
        "_backbone.0.weight", "_backbone.0.bias", "_backbone.2.bias",
    ]  # fmt: skip
    assert len(graph.consumers()["_backbone.0.weight"]) == 2


def test_a_module_used_twice_gives_two_operators_of_the_same_module():
    layer = nn.Linear(6, 6)
    module = Ends(mean_to(lambda m, x: m.layer(functional.relu(m.layer(x)))), layer=layer)
    graph = check(module, *vectors())
    assert [operator.name for operator in graph.operators] == ["layer.linear", "relu", "layer.linear_1", "mse_loss"]
    assert [operator.module for operator in graph.operators] == ["layer", "", "layer", ""]
    assert len(graph.consumers()["layer.weight"]) == 2


def test_a_module_shared_by_two_blocks_is_named_by_the_calling_block():
    relu = nn.ReLU()
    blocks = nn.Sequential(nn.Sequential(nn.Linear(6, 6), relu), nn.Sequential(nn.Linear(6, 6), relu))
    module = WithLossCell(blocks, nn.MSELoss())
    graph = check(module, *vectors())
    assert [operator.module for operator in graph.operators][:4] == [
        "_backbone.0.0", "_backbone.0.1", "_backbone.1.0", "_backbone.1.1",
    ]  # fmt: skip


def test_inputs_keep_the_order_of_the_arguments_also_when_not_read():
    module = Ends(lambda m, x, label: functional.mse_loss(m.fc(label), label), fc=nn.Linear(6, 6))
    graph = capture(module, vectors())
    assert [tensor.name for tensor in graph.tensors.values() if tensor.kind == "input"] == ["x", "label"]


def test_unread_parameters_are_reported_and_unread_operators_removed():
    def function(m, x, label):
        m.unused(x)
        return functional.mse_loss(m.fc(x), label)

    with pytest.warns(UserWarning, match=r"does not depend on unused\.weight, unused\.bias"):
        graph = capture(Ends(function, fc=nn.Linear(6, 6), unused=nn.Linear(6, 2)), vectors())
    assert [operator.kind for operator in graph.operators] == ["linear", "mse_loss"]


# -- refusals ----------------------------------------------------------------------------------------------------------


def sets_a_buffer(m, x):
    m.norm.running_mean = x.mean() * 0.9
    return m.fc(x)


def reads_a_changed_mask(m, x):
    mask = torch.zeros(6)
    mask[0] += x.sum()
    return m.fc(x) if (mask == 0).all() else x


def keeps_samples(m, x):
    m.norm.running_mean.copy_(x[0])
    return m.fc(x)


OWN = torch.ones(6)


class Unit(torch.autograd.Function):
    """The gradient of all samples has the length 1."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        return g / g.norm()


class Noisy(torch.autograd.Function):
    """The backward draws random numbers."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        return g + torch.randn_like(g)


class Signs(torch.autograd.Function):
    """The gradients of two results together are not the sum of those of each."""

    @staticmethod
    def forward(ctx, x):
        return x.clone(), -x

    @staticmethod
    def backward(ctx, g, h):
        return (g - h).sign()


def warms_up(m, x):
    m.step = getattr(m, "step", 0) + 1
    return m.fc(x) * min(1.0, m.step / 100)


def remembers(m, x):
    m.steps.append(len(m.steps))
    return m.fc(x) * len(m.steps)


def hooks_its_gradient(m, x):
    y = m.fc(x)
    y.register_hook(lambda g: 2 * g)
    return y


def within(context):
    def function(m, x):
        with context():
            y = m.frozen(x) + m.fc(x)
        return m.fc(y.clone())

    return mean_to(function)


def goes_on(m, x):
    """The state of the step before, as truncated backpropagation through time has it."""
    last = getattr(m, "last", None)
    made = m.fc(x) if last is None else m.fc(x) + last
    m.last = made.detach()
    return made


def chosen_by_number(m, x, label, than):
    """A loss that depends on how many rows a mask selects."""
    losses = (m.fc(x) - label).square()[x[:, 0] > 0]
    return losses.mean() if len(losses) > than else 2 * losses.mean()


def registers(m, x):
    """A mean of the step before in a buffer that the forward registers."""
    made = m.fc(x)
    last = getattr(m.fc, "last", None)
    m.fc.register_buffer("last", made.detach().mean(0))
    return made if last is None else made + last


def sometimes(m, x):
    return m.fc(x) if random.random() < 1e-3 else x + m.fc.bias


def prints(m, x):
    print(f"mean {x.mean():.3f}")
    return m.fc(x)


REFUSED = {
    **{
        f"more than {than} rows": (
            partial(chosen_by_number, than=than), rf"something else where a mask selects {few}, at or before .*\.py"
        )
        for than, few in ((1, "one row"), (9, "one row"), (20_000, "1,000,000 rows"))
    },
    "scaled by the number of rows": (
        lambda m, x, label: (m.fc(x) - label).square()[x[:, 0] > 0].mean() * (1 + len(x[x[:, 0] > 0]) % 2),
        "where a mask selects 1,000,000 rows",
    ),
    "tensors of the step before in a new buffer": (mean_to(registers), r"keeps tensors in self\.fc\.last, and its"),
    "a branch of small probability": (mean_to(sometimes), "draws from random, and .* draw with torch.rand"),
    "a message with values": (mean_to(prints), "leave messages that read values out of the forward"),
    "classes of unknown number": (
        mean_to(lambda m, x: m.fc(x) * functional.one_hot((x > 0).long()).sum(-1)), "give one_hot its number of classes"
    ),
    "training begins in the forward": (
        mean_to(lambda m, x: m.fc(x) * m.frozen.requires_grad_()(x)), "starts to train 'frozen.weight', which is frozen"
    ),
    "median": (lambda m, x, label: (m.fc(x) - label).square().mean(1).median(), r"aten\.median.*must be a mean over"),
    "gradients of all samples": (mean_to(lambda m, x: Unit.apply(m.fc(x))), r"samples .* meet in the backward of Unit"),
    "random gradients": (mean_to(lambda m, x: Noisy.apply(m.fc(x))), r"backward of Noisy .*draws random numbers"
    ),
    "gradients of two results": (mean_to(lambda m, x: m.fc(sum(Signs.apply(m.fc(x))))), "Signs .* are not sums"),
    "counted steps": (mean_to(warms_up), r"counts in self\.step, and its next step computes something else"),
    "gradient by frequency": (
        mean_to(lambda m, x: m.fc(functional.embedding((x > 0).long(), m.fc.weight, scale_grad_by_freq=True).sum(1))),
        "how often the whole batch has an id",
    ),
    "statistics of an instance norm": (
        mean_to(lambda m, x: m.fc(functional.instance_norm(
            x[:, :, None].expand(-1, -1, 4), m.norm.running_mean, m.norm.running_var
        ).mean(2))), "running statistics, .* track_running_stats=False",
    ),
    "number of a tensor": (mean_to(lambda m, x: m.fc(x) * m.fc.bias[0].item()), "takes a number out of a tensor"),
    "nothing is trained": (torch.no_grad()(mean_to(lambda m, x: m.fc(x))), "no parameter that is trained; is it under"),
    "numpy": (mean_to(lambda m, x: m.fc(x) + torch.from_numpy(x.numpy())), "compute with torch instead of numpy"),
    "another dtype": (
        mean_to(lambda m, x: m.fc.bfloat16()(x.bfloat16()).float()),
        r"converts 'weight' of Linear from float32 to bfloat16.*weight\.to\(torch\.bfloat16\)"
    ),
    "error of its own": (mean_to(lambda m, x: m.fc(x) + m.missing), "no attribute 'missing'.*check that the forward"),
    "list of steps": (mean_to(remembers), r"counts in self\.steps, and its next step computes something else"),
    "random numbers of Python": (
        mean_to(lambda m, x: m.fc(x) * random.random()), "draws from random, and .* draw with torch.rand"
    ),
    "random numbers of numpy": (
        mean_to(lambda m, x: m.fc(x) * np.random.rand()), r"draws from numpy\.random, and"  # noqa: NPY002
    ),
    "hook on a gradient": (mean_to(hooks_its_gradient), r"registers a hook on the gradient of a tensor \(4, 6\)"),
    "inference mode": (within(torch.inference_mode), "uses torch.inference_mode.*requires_grad_"),
    "mean of the batch": (mean_to(lambda m, x: m.fc(x) - m.fc(x).mean()), "a value made of all samples of a batch"),
    "norm of the batch": (
        mean_to(lambda m, x: m.fc(x) / x.norm()), r"\(aten\.linalg_vector_norm.* in forward .* makes one \(\) out of"
    ),
    "similarities of a batch": (
        lambda m, x, label: functional.cross_entropy((m.fc(x) @ m.fc(x).t()).fill_diagonal_(-9), x[:, 0].long()),
        "contrastive one, needs what each is compared with",
    ),
    "unknown": (
        mean_to(lambda m, x: m.fc(x) + torch.multinomial(x.exp(), 6)),
        r"aten\.multinomial\.default.*test_capture.*draw with torch\.rand, torch\.randn",
    ),
    "unknown in a module": (
        mean_to(lambda m, x: m.noise(m.fc(x))), r"aten\.rrelu\.default in module 'noise'.*draws random numbers"
    ),
    "two activations": (mean_to(lambda m, x: m.fc(x) @ x.t() @ x), "mixes the batch"),
    "softmax over the batch": (mean_to(lambda m, x: m.fc(x).softmax(0)), r"\(softmax\) in forward \(.*\) works along"),
    "unknown over the batch": (mean_to(lambda m, x: m.fc(x).cumsum(0)), "cumsum.*it combines samples of a batch"),
    "distances of samples": (lambda m, x, y: torch.cdist(m.fc(x), m.fc(x)).mean(), "cdist.*such as negatives of"),
    "data-dependent branch": (
        mean_to(lambda m, x: m.fc(x) if x.sum() > 0 else x),
        r"cannot capture Ends.* \(in forward, .*test_capture.py, line \d+: .*else x.*choose by torch\.where or a mask",
    ),
    "data-dependent shape": (
        mean_to(lambda m, x: m.fc(x[:, x[0] > 0].mean(1, keepdim=True))), "instead of an if or a boolean index"
    ),
    "largest row of a mask": (
        mean_to(lambda m, x: m.fc(x) * m.fc(x)[x > 0].max()), r"aten\.max.*test_capture.*\(losses \* mask\)\.sum\(\) /"
    ),
    "softmax over the rows of a mask": (
        lambda m, x, label: (m.fc(x)[x[:, 0] > 0].softmax(0) * label[x[:, 0] > 0]).mean(), "works along dim 0 of"
    ),
    "number of the rows of a mask": (
        lambda m, x, label: m.fc(x)[x[:, 0] > 0].square().mean() * (len(x[x[:, 0] > 0]) / 4), "changes with the number"
    ),
    "batch norm of the rows of a mask": (
        lambda m, x, label: functional.batch_norm(m.fc(x)[x[:, 0] > 0], None, None, training=True).exp().mean(),
        r"aten\.batch_norm.*reads rows that a mask selects",
    ),
    "softmax over rows without the batch": (
        mean_to(lambda m, x: m.fc(x) * m.fc.weight[m.fc.bias > 0].softmax(0).square().mean()),
        r"aten\.softmax.*reads rows that a mask selects",
    ),
    "buffer as a mask": (
        mean_to(lambda m, x: m.fc(x[:, m.mask].mean(1, keepdim=True))), r"the buffer 'mask' selects.*'mask_places'"
    ),
    "rows of two masks": (
        mean_to(lambda m, x: m.fc(x) * (x[x[:, 0] > 0] @ x[x[:, 0] < 0].t()).sum()), "reads rows that a mask selects"
    ),
    "tensors of the step before": (mean_to(goes_on), r"keeps tensors in self\.last, and its next step computes"),
    "queue behind a pointer": (
        mean_to(lambda m, x: keeps_samples(m, x) + m.norm.num_batches_tracked), "combines samples|values of single"
    ),
    "sum by a fixed number": (lambda m, x, label: (m.fc(x) - label).square().sum() / 24, "must be a mean"),
    "complex inputs of a norm": (mean_to(lambda m, x: m.norm(torch.fft.fft(m.fc(x), dim=0).real)), "combines samples"),
    "backward in the forward": (mean_to(lambda m, x: (m.fc(x).sum().backward(), m.fc(x))[1]), "runs a backward, but"),
    "derivative of all samples": (
        mean_to(lambda m, x: m.fc(x) @ torch.autograd.grad(m.fc(x).sum(), m.fc.weight, create_graph=True)[0]),
        "reads a value made of all samples",
    ),
    "derivative of nothing": (
        mean_to(lambda m, x: m.fc(x) + torch.autograd.grad(x.sum(), m.fc.bias)[0]), "does not depend on the input"
    ),
    "torch.func": (mean_to(lambda m, x: m.fc(x) + torch.func.grad(lambda y: m.fc(y).sum())(x)), "uses torch.func or"),
    "number out of a changed mask": (mean_to(reads_a_changed_mask), "control flow depends on values of tensors"),
    "fixed sizes": (mean_to(lambda m, x: m.fc(x.view(4, 12))), "works with batches of these shapes, of any size"),
    "buffer changed under vmap": (
        mean_to(lambda m, x: torch.vmap(lambda y: m.fc(y) * m.norm.running_mean.add_(1))(x)), "changed in place under"
    ),
    "random numbers under vmap": (
        mean_to(lambda m, x: torch.vmap(lambda y: m.fc(y) * torch.rand(()), randomness="different")(x)),
        "draws random numbers under torch.vmap",
    ),
    "fixed batch": (mean_to(lambda m, x: m.fc(x.view(4, 6))), "batch of 8"),
    "batch against batch": (mean_to(lambda m, x: m.fc(x) + m.fc(x).view(-1, 1, 6)), "mixes the batch|repeats"),
    "batch moved": (mean_to(lambda m, x: m.fc(x.view(2, -1, 6)).view(-1, 6)), "mixes the batch"),
    "random numbers of another kind": (mean_to(lambda m, x: m.fc(x).cauchy_()), "draw with torch.rand, torch.randn"),
    "buffer of samples": (mean_to(keeps_samples), r"combines samples|values of single samples in the buffer"),
    "buffer of another shape": (mean_to(sets_a_buffer), r"'norm' replaces its buffer 'running_mean' \(6,\) by one"),
    "changing parameter": (
        mean_to(lambda m, x: m.fc(x) * torch.no_grad()(m.fc.bias.mul_)(0.9)), r"changes the parameter 'fc\.bias', which"
    ),
    "tensor of its own": (mean_to(lambda m, x: m.fc(x) * OWN), r"must be a parameter, a buffer"),
    "tensor made in the forward": (
        mean_to(lambda m, x: m.fc(x) * torch.tensor([*range(65), 0.5])[:6]), r"self\.register_"
    ),
    "sine of a mean": (lambda m, x, label: functional.mse_loss(m.fc(x), label).sin(), "each times a number"),
    "samples chosen by the data": (
        mean_to(lambda m, x: m.fc(x)[(x[:, 0] > 0).long()]), "it combines samples of a batch"
    ),
    "halves of a batch": (
        lambda m, x, label: functional.mse_loss(m.fc(x)[::2], m.fc(x)[1::2]) + functional.mse_loss(m.fc(x), label),
        "without elements, .* separate inputs",
    ),
    "rows of a packed sequence": (
        mean_to(lambda m, x: nn.utils.rnn.pack_padded_sequence(x, [1], True).data), "unpack it with pad_packed_sequence"
    ),
    "unpacked to the longest": (
        mean_to(lambda m, x: nn.utils.rnn.pad_packed_sequence(
            nn.utils.rnn.pack_padded_sequence(m.fc(x).unsqueeze(1), x[:, 0].long(), True)
        )[0]), "give it total_length=1"
    ),
    "sum and mean": (lambda m, x, label: m.fc(x).sum() + m.fc(x).mean(), "adds a sum over the samples"),
    "sum": (lambda m, x, label: functional.mse_loss(m.fc(x), label, reduction="sum"), "must be a mean"),
    "no loss": (lambda m, x, label: m.fc(x), "must return the scalar loss"),
    "two results": (lambda m, x, label: (m.fc(x), label), "returns 2 values"),
    "nothing to train": (lambda m, x, label: functional.mse_loss(x, label), "depends on no parameter"),
    "broadcast loss": (
        lambda m, x, label: functional.l1_loss(m.fc(x).unsqueeze(1), label),
        r"\(4, 1, 6\) with \(4, 6\) would be another function",
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", ["parameter", "slice", "buffer"])
def test_trained_parameters_in_shared_memory_are_refused(kind):
    shared = nn.Linear(6, 6)
    other = {
        "parameter": nn.Parameter(shared.weight.data), "slice": nn.Parameter(shared.weight.data[2:]),
        "buffer": nn.Buffer(shared.weight.data.t()),
    }  # fmt: skip
    module = Ends(mean_to(lambda m, x: m.fc(x)), fc=shared, other=other[kind])
    with pytest.raises(TwofoldError, match=r"'(fc\.weight|other)' and '(fc\.weight|other)' share memory.*clone"):
        capture(module, vectors())


@pytest.mark.parametrize("model", REFUSED)
@pytest.mark.filterwarnings("ignore:the loss does not depend", "ignore:.*every rank computes all of it")
def test_unsupported_modules_are_refused(model, capsys):
    function, message = REFUSED[model]
    frozen = nn.Linear(6, 6).requires_grad_(False)
    module = Ends(function, fc=nn.Linear(6, 6), noise=nn.RReLU(), norm=nn.BatchNorm1d(6), frozen=frozen, steps=[])
    module.register_buffer("mask", torch.arange(6) > 2)
    with pytest.raises(TwofoldError, match=message) as caught:
        capture(module, vectors())
    assert "\n" not in str(caught.value)
    assert not capsys.readouterr().err


def as_dataclass(results):
    return dataclasses.make_dataclass("Output", ("loss", "logits"))(*results)


@pytest.mark.parametrize(
    "form", [tuple, lambda results: [results[1], results[0], None], as_dataclass, lambda results: {"loss": results[0]}]
)
def test_the_loss_may_be_one_of_several_results(form):
    """As nanoGPT (a tuple), transformers (a dataclass) and detection models (a dict) return it."""
    module = Ends(lambda m, x, label: form((functional.mse_loss(m.fc(x), label), m.fc(x))), fc=nn.Linear(6, 6))
    assert [operator.kind for operator in capture(module, vectors()).operators] == ["linear", "mse_loss"]
    batch = [torch.ones(4, 6), torch.zeros(4, 6)]
    (loss,) = train_reference(module, [batch], optimizer=Optimizer(), num_steps=1).losses
    assert loss == pytest.approx(functional.mse_loss(module.fc(batch[0]), batch[1]).item(), rel=1e-6)


@pytest.mark.filterwarnings("ignore:the loss does not depend on norm")
def test_a_buffer_that_is_moved_to_where_it_is_is_not_changed():
    def moved(module, x):
        module.norm.running_mean = module.norm.running_mean.to(x.device)
        module.scale = module.scale.to(x.device)
        return module.fc(x) * module.scale + module.norm.running_mean

    module = Ends(mean_to(moved), fc=nn.Linear(6, 6), norm=nn.BatchNorm1d(6))
    module.register_buffer("scale", torch.ones(6))
    constants = [each.name for each in capture(module, vectors()).tensors.values() if each.kind == "constant"]
    assert constants == ["scale", "norm.running_mean"]


def test_devices_that_a_forward_names_do_not_matter():
    """As in code that was written for one GPU."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

    def named(module, x):
        module.fc.to(device)
        x = x.to("cuda:0", torch.float32).cuda(non_blocking=True).type(torch.FloatTensor)
        with torch.device("cpu"):
            ones = torch.ones(6)
        return module.fc(x.to(device)).cpu() * torch.arange(6, device="cuda") + ones.new_zeros(6, device=device) + ones

    def plain(module, x):
        ones = torch.ones(6)
        return module.fc(x) * torch.arange(6) + ones.new_zeros(6) + ones

    graphs = [capture(Ends(mean_to(function), fc=nn.Linear(6, 6)), vectors()) for function in (named, plain)]
    assert [each.kind for each in graphs[0].operators] == [each.kind for each in graphs[1].operators]
    assert graphs[0].tensors.keys() == graphs[1].tensors.keys()


@pytest.mark.parametrize("what", ["register_hook", "register_post_accumulate_grad_hook"])
def test_hooks_on_gradients_are_refused(what):
    module = Ends(mean_to(lambda m, x: m.fc(x)), fc=nn.Linear(6, 6))
    getattr(module.fc.weight, what)(lambda g: None)
    with pytest.raises(TwofoldError, match=r"'fc\.weight' has hooks on its gradient"):
        capture(module, vectors())
    module = Ends(mean_to(lambda m, x: m.fc(x)), fc=nn.Linear(6, 6))
    module.fc.register_full_backward_hook(lambda *_: None)
    with pytest.raises(TwofoldError, match="Linear 'fc' has backward hooks"):
        capture(module, vectors())


@pytest.mark.parametrize(
    ("examples", "message"),
    [
        ((4, 6), "is one shape"),
        (((4, 6),), "do not fit Ends.forward"),
        (((4, 6), (3, 6)), r"every input needs the batch.*x \(4, 6\), label \(3, 6\)"),
        (((4, 6), ()), "every input needs the batch"),
        (((4, 6), ((4, 6), "int33")), "int33"),
        ((torch.zeros(4, 6), "label"), "the example of 'label'"),
        (7, "example_inputs must be a tuple"),
    ],
)
def test_example_inputs_that_are_no_batch_are_refused(examples, message):
    with pytest.raises(TwofoldError, match=message):
        capture(Ends(mean_to(lambda m, x: m.fc(x)), fc=nn.Linear(6, 6)), examples)


def capture_quietly(rank, folder):
    """In a process that has captured nothing yet: what is said once would be said here."""
    with (folder / "said").open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    net = WithLossCell(nn.Sequential(nn.Linear(4, 2), nn.ReLU(inplace=True), nn.Linear(2, 1)), MAELoss())
    assert len(capture(net, ((8, 4), (8,))).operators) == 5
    for refused in (nn.RReLU(), nn.Linear(3, 2)):
        with contextlib.suppress(ValueError):
            capture(WithLossCell(refused, nn.MSELoss()), ((8, 4), (8, 2)))
    sys.stdout.flush()


def test_capture_writes_nothing_to_the_terminal(tmp_path):
    run_on_ranks(capture_quietly, 1, tmp_path, joined=False)
    assert (tmp_path / "said").read_text() == ""


# -- loss cell ---------------------------------------------------------------------------------------------------------


def test_mae_equalises_shapes_and_dtypes():
    logits, labels = torch.tensor([[1.0], [5.0], [2.0]]), torch.tensor([2, 2, 2])
    assert MAELoss()(logits, labels).item() == pytest.approx(4 / 3)
    assert MAELoss()(logits.bfloat16(), labels).dtype == torch.bfloat16


@pytest.mark.parametrize("labels", [(3, 3), (2,), (1, 3)])
def test_mae_never_broadcasts(labels):
    with pytest.raises(TwofoldError, match="MAELoss compares"):
        MAELoss()(torch.zeros(3, 1), torch.zeros(labels))


def test_the_loss_of_a_batch_is_the_mean_over_its_micro_batches():
    cell, (x, y) = WithLossCell(Network(), MAELoss()), images(8)
    parts = [cell(x[start : start + 2], y[start : start + 2]).item() for start in range(0, 8, 2)]
    assert cell(x, y).item() == pytest.approx(np.mean(parts), rel=1e-6)


# -- stages and recompute by module ------------------------------------------------------------------------------------

SEED_STAGES = {
    "_backbone.layer1": 0, "_backbone.relu1": 0, "_backbone.layer2": 1, "_backbone.relu2": 1, "_backbone.layer3": 1,
}  # fmt: skip


@pytest.fixture(scope="module")
def cell():
    return WithLossCell(Network(), MAELoss())


@pytest.fixture(scope="module")
def graph(cell):
    return capture(cell, images())


def test_stages_by_config_take_flatten_and_loss_along(cell, graph):
    first, second = assign_stages(graph, cell, SEED_STAGES, 2)
    assert first == ("_backbone.flatten.reshape", "_backbone.layer1.linear", "_backbone.relu1.relu")
    assert second[-3:] == ("_loss_fn.reshape", "_loss_fn.cast", "_loss_fn.l1_loss")
    assert sorted(first + second) == sorted(operator.name for operator in graph.operators)


def test_stages_by_attribute_are_the_same_and_config_wins(graph):
    cell = WithLossCell(Network(), MAELoss())
    for path, stage in SEED_STAGES.items():
        cell.get_submodule(path).pipeline_stage = stage
    assert assign_stages(graph, cell, None, 2) == assign_stages(graph, cell, SEED_STAGES, 2)
    (*_, last) = assign_stages(graph, cell, {"_backbone.layer2": 0, "_backbone.relu2": 0}, 2)
    assert last[0] == "_backbone.layer3.linear"


def test_the_closest_configured_module_decides(cell, graph):
    first, _second = assign_stages(graph, cell, {"_backbone": 0, "_backbone.layer3": 1}, 2)
    assert first[-1] == "_backbone.relu2.relu"


def test_one_stage_needs_no_names(cell, graph):
    assert assign_stages(graph, cell, None, 1) == (tuple(operator.name for operator in graph.operators),)


@pytest.mark.parametrize(
    ("config", "num_stages", "message"),
    [
        ({"_backbone.layer9": 0}, 2, r"'_backbone\.layer9'.*not a submodule.*_backbone\.layer1.*_loss_fn"),
        ({"_backbone.layer1": 1, "_backbone.layer2": 0, "_backbone.layer3": 1}, 2, "stages run backwards"),
        ({"_backbone.layer1": 0, "_backbone.layer2": 2}, 2, "there are 2: 0 to 1"),
        ({"_backbone.layer1": 0, "_backbone.layer2": 2}, 3, "no operator of Network is in stage 1 of 3"),
        ({"_backbone.layer1": "0"}, 2, "must be an int"),
        ({"_backbone.layer1": -1}, 2, "must be an int"),
        ({}, 2, "2 stages need stage_config"),
        ({}, 0, "number of stages is 0"),
    ],
)
def test_stages_that_cannot_be_are_refused(cell, graph, config, num_stages, message):
    with pytest.raises(TwofoldError, match=message):
        assign_stages(graph, cell, config, num_stages)


def test_recompute_marks_the_operators_of_a_module_and_its_parts():
    cell = WithLossCell(Network(), MAELoss())
    assert capture(cell, images()).recompute == ()
    assert recompute(cell._backbone.relu1) is cell._backbone.relu1
    assert capture(cell, images()).recompute == ("_backbone.relu1.relu",)
    recompute(cell)
    graph = capture(cell, images())
    assert graph.recompute == tuple(operator.name for operator in graph.operators[:-1])
    with pytest.raises(TwofoldError, match="recompute marks"):
        recompute("relu1")


class NearestCode(nn.Module):
    """A vector-quantised autoencoder: one product reads the codes for an argmin only, which trains nothing."""

    def __init__(self):
        super().__init__()
        self.encoder, self.decoder, self.codes = nn.Linear(6, 4), nn.Linear(4, 6), nn.Embedding(8, 4)

    def forward(self, x):
        code = self.encoder(x)
        distance = (self.codes.weight**2).sum(1) - 2 * code @ self.codes.weight.t()
        nearest = self.codes(distance.argmin(1))
        straight = code + (nearest - code).detach()
        return ((nearest - code.detach()) ** 2).mean() + ((self.decoder(straight) - x) ** 2).mean()


def test_a_parameter_that_one_of_its_readers_does_not_train_is_searched():
    graph, machine = capture(NearestCode(), (((8, 6), "float32"),)), Machine.load("h200-x2")
    names = [operator.name for operator in graph.operators]
    assert lower(search(graph, machine, num_micro_batches=2).best).num_ranks in (1, 2)
    cut = names.index("codes.embedding")
    with pytest.raises(TwofoldError, match=r"'codes.weight' is read by stages on different ranks"):
        search(graph, machine, num_stages=2, num_micro_batches=2, stages=[names[:cut], names[cut:]])


def test_attributes_of_a_module_are_what_they_were():
    """A forward keeps an attention map, which later steps do not read, and fills a dict."""

    class Keeps(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc, self.seen, self.last = nn.Linear(6, 6), {}, None

        def forward(self, x, label):
            self.last = self.seen["made"] = self.fc(x)
            return functional.mse_loss(self.last, label)

    module = Keeps()
    capture(module, vectors())
    assert module.last is None and module.seen == {}
    module(*(torch.zeros(8, 6) for _ in range(2)))
    assert isinstance(initialised_copy(module).last, torch.Tensor)  # torch does not copy what has a gradient


def test_inputs_in_a_dict_are_named_in_the_error():
    module = Ends(lambda m, x, label: m.fc(x["image"]).mean(), fc=nn.Linear(6, 6))
    with pytest.raises(TwofoldError, match=r"several tensors .image, size.; .* forward takes image, size"):
        capture(module, ({"image": torch.zeros(8, 6), "size": torch.zeros(8)}, (8,)))
