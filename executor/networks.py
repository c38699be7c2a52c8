"""The networks of the examples, as a user would write them. Each function returns the module and the shapes of a batch.

Use them as `--model executor.networks:multiple_mix`.
"""

from __future__ import annotations

import torch
from torch import nn

from executor import ops
from executor.recompute import recompute
from executor.sharding import shard
from executor.train.losscell import MAELoss, WithLossCell
from executor.weights.initial import initializer, no_init_parameters
from plans.layout import Layout

__all__ = [
    "DenseNetwork",
    "Example",
    "OperatorNetwork",
    "SequentialNetwork",
    "advanced_operator_parallel",
    "multiple_copy",
    "multiple_mix",
]

Example = tuple[tuple[int, ...], str]
"""Shape and dtype of one input."""


class DenseNetwork(nn.Module):
    """Flatten, then three dense layers with relus between: 784-512-512-`num_outputs`."""

    def __init__(self, num_outputs: int = 1) -> None:
        super().__init__()
        self.flatten = nn.Flatten()
        self.layer1 = nn.Linear(28 * 28, 512)
        self.relu1 = nn.ReLU()
        self.layer2 = nn.Linear(512, 512)
        self.relu2 = nn.ReLU()
        self.layer3 = nn.Linear(512, num_outputs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Logits of a batch of images [N, 1, 28, 28]."""
        x = self.relu1(self.layer1(self.flatten(x)))
        x = self.relu2(self.layer2(x))
        return self.layer3(x)


def multiple_mix(batch_size: int = 32) -> tuple[nn.Module, tuple[Example, ...]]:
    """The hybrid-parallel case: mean absolute error on the digit itself, relus recomputed, nothing initialised yet."""
    with no_init_parameters():
        net = DenseNetwork()
    recompute(net.relu1)
    recompute(net.relu2)
    return WithLossCell(net, MAELoss()), (((batch_size, 1, 28, 28), "float32"), ((batch_size,), "int64"))


class OperatorNetwork(nn.Module):
    """The dense network written with operators that are called by name: 784-512-512-10, without biases."""

    def __init__(self) -> None:
        super().__init__()
        self.flatten = ops.Flatten()
        self.fc1_weight = initializer("normal", [28 * 28, 512])
        self.fc2_weight = initializer("normal", [512, 512])
        self.fc3_weight = initializer("normal", [512, 10])
        self.matmul1 = ops.MatMul()
        self.relu1 = ops.ReLU()
        self.matmul2 = ops.MatMul()
        self.relu2 = ops.ReLU()
        self.matmul3 = ops.MatMul()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Logits of a batch of images [N, 1, 28, 28]."""
        x = self.flatten(x)
        x = self.relu1(self.matmul1(x, self.fc1_weight))
        x = self.relu2(self.matmul2(x, self.fc2_weight))
        return self.matmul3(x, self.fc3_weight)


def advanced_operator_parallel(batch_size: int = 32) -> tuple[nn.Module, tuple[Example, ...]]:
    """The case of advanced operator parallelism, on 8 ranks: cross-entropy, four operators split by hand.

    matmul1 has its batch on one axis and its sum on two, the second of which is the slower; matmul2 sums over all 8
    ranks of another mesh. The operators between and after them are searched.
    """
    with no_init_parameters():
        net = OperatorNetwork()
    layout = Layout((2, 2, 2), ("dp", "sp", "mp"))
    net.matmul1.shard((layout("mp", ("sp", "dp")), layout(("sp", "dp"), "None")))
    net.relu1.shard(((4, 1),))
    layout2 = Layout((8,), ("tp",))
    net.matmul2.shard((layout2("None", "tp"), layout2("tp", "None")))
    net.relu2.shard(((8, 1),))
    return WithLossCell(net, nn.CrossEntropyLoss()), (((batch_size, 1, 28, 28), "float32"), ((batch_size,), "int64"))


class SequentialNetwork(nn.Module):
    """The dense network as a sequence, 784-512-512-10: normal weights, biases of zero."""

    def __init__(self) -> None:
        super().__init__()
        self.flatten = nn.Flatten()
        self.dense_relu_sequential = nn.Sequential(
            _dense(28 * 28, 512), nn.ReLU(), _dense(512, 512), nn.ReLU(), _dense(512, 10)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Logits of a batch of images [N, 1, 28, 28]."""
        return self.dense_relu_sequential(self.flatten(x))


def _dense(num_inputs: int, num_outputs: int) -> nn.Linear:
    layer = nn.Linear(num_inputs, num_outputs)
    layer.weight = initializer("normal", [num_outputs, num_inputs])
    layer.bias = initializer("zeros", [num_outputs])
    return layer


def multiple_copy(batch_size: int = 32) -> tuple[nn.Module, tuple[Example, ...]]:
    """The multi-copy case, on 8 ranks: cross-entropy, and model parallelism whose communication is to be hidden.

    The first layer is split by its outputs, the second by its inputs, so that its sum is what the ranks communicate.
    """
    with no_init_parameters():
        net = SequentialNetwork()
    shard(net.dense_relu_sequential[0], ((1, 1), (8, 1)))
    shard(net.dense_relu_sequential[1], ((1, 8),))
    shard(net.dense_relu_sequential[2], ((1, 8), (1, 8)))
    return WithLossCell(net, nn.CrossEntropyLoss()), (((batch_size, 1, 28, 28), "float32"), ((batch_size,), "int64"))
