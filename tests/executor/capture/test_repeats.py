"""Stacks of equal blocks are captured from three blocks, where the graph is that of the whole module."""

import pytest
import torch
from torch import nn

import executor.capture.capture as room
from executor.capture.capture import capture

WIDTH, DEPTH = 6, 5


class Block(nn.Module):
    def __init__(self, scale=None, dropout=0.1):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 8), nn.Linear(8, WIDTH)
        self.dropout, self.scale = nn.Dropout(dropout), scale
        self.register_buffer("shift", torch.ones(WIDTH))

    def forward(self, x, *more, cache=None):
        if cache is not None:
            x = torch.cat([cache, x])
        for each in more:
            x = x + each
        made = self.dropout(self.down(torch.relu(self.up(self.norm(x + self.shift)))))
        return x + (made if self.scale is None else made * self.scale)


class Stacked(nn.Module):
    """Blocks between an embedding and a loss, called as `way` says."""

    def __init__(self, way, blocks):
        super().__init__()
        self.way, self.before, self.drop = way, nn.Linear(WIDTH, WIDTH), nn.Dropout(0.2)
        self.layers = nn.Sequential(*blocks) if way == "sequential" else nn.ModuleList(blocks)
        self.others = nn.ModuleList([Block(scale=2.0) for _ in range(4)])

    def forward(self, x, y):
        x = start = self.drop(self.before(x))
        seen = []
        for index, layer in enumerate([self.layers] if self.way == "sequential" else self.layers[:DEPTH]):
            match self.way:
                case "depth":
                    x = layer(x) / len(self.layers)
                case "skip":
                    x = layer(x, *seen[-2:-1])
                case "index":
                    x = layer(x if index != 3 else torch.relu(x))
                case "start":
                    x = layer(x, start)
                case "cache":  # as blocks of transformers do, each with an empty cache of its own
                    x = layer(x, cache=torch.tensor([]))
                case _:
                    x = layer(x)
            seen.append(x)
        if self.way == "all":
            x = sum(seen)
        for layer in self.others:
            x = layer(x)
        return ((self.drop(x) - y) ** 2).mean()


def equal(**settings):
    return [Block(**settings) for _ in range(DEPTH)]


CASES = {
    "plain": (True, lambda: Stacked("plain", equal())),
    "sequential": (True, lambda: Stacked("sequential", equal())),
    "the start read by every block": (True, lambda: Stacked("start", equal())),
    "an empty cache in every block": (True, lambda: Stacked("cache", equal())),
    "a scale of its own": (False, lambda: Stacked("plain", [Block(scale=1.0 + each) for each in range(DEPTH)])),
    "one without dropout": (False, lambda: Stacked("plain", [*equal()[:3], Block(dropout=0.0), Block()])),
    "divided by the depth": (False, lambda: Stacked("depth", equal())),
    "a skip over blocks": (False, lambda: Stacked("skip", equal())),
    "one index is special": (False, lambda: Stacked("index", equal())),
    "all outputs are read": (False, lambda: Stacked("all", equal())),
    "one block called again and again": (False, lambda: Stacked("plain", [Block()] * DEPTH)),
}


@pytest.mark.parametrize("name", CASES)
def test_the_graph_is_that_of_the_whole_module(name, monkeypatch):
    is_shortened, made = CASES[name]
    module, examples = made(), (torch.zeros(4, WIDTH), torch.zeros(4, WIDTH))
    exported, export = [], torch.export.export
    monkeypatch.setattr(torch.export, "export", lambda module, *given, **named: (
        exported.append(len(module.layers)), export(module, *given, **named))[1])  # fmt: skip
    graph = capture(module, examples)
    assert (exported == [3, 3]) == is_shortened
    assert len(module.layers) == DEPTH and len(module.others) == 4
    monkeypatch.setattr(room, "stacks_of_equal_blocks", lambda *_: ())
    whole = capture(module, examples)
    assert graph == whole and list(graph.tensors) == list(whole.tensors)
