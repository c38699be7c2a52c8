"""Comparison of complete blocks with the sum of their kernels."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from costmodels.fit.points import Point
from executor.calibrate.block import Decoder, Sizes
from executor.calibrate.timing import Timer, sampled
from executor.device import Mark

__all__ = ["block_points"]

BLOCKS = (
    # sizes, batch, sequence
    (Sizes(hidden=4096, heads=32, ffn=11008, vocab=32000, blocks=2), 1, 2048),
    (Sizes(hidden=4096, heads=32, ffn=11008, vocab=32000, blocks=2), 4, 2048),
    (Sizes(hidden=2048, heads=16, ffn=5632, vocab=32000, blocks=4), 4, 1024),
    (Sizes(hidden=1024, heads=16, ffn=2816, vocab=32000, blocks=4), 8, 1024),
)
STEPS = 12


def block_points(timer: Timer, *, small: bool = False) -> Iterator[Point]:
    """Training steps of plain torch decoders of a few blocks, one device: device time from first to last kernel.

    They are for comparison with predictions, never for fitting.
    """
    device = timer.device
    for sizes, batch, sequence in BLOCKS[: 1 if small else None]:
        if small:
            sizes, batch, sequence = Sizes(), 2, 8
        torch.manual_seed(0)
        with torch.device(device.torch_device):
            model = Decoder(sizes, sequence).to(torch.bfloat16)
            ids = torch.randint(sizes.vocab, (batch, sequence + 1))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=device.is_async)
        parts: dict[str, list[float]] = {"step": [], "forward": [], "backward": [], "update": []}
        device.reset_peak_memory()

        def train(
            model: Decoder = model, ids: Tensor = ids, optimizer: torch.optim.Optimizer = optimizer
        ) -> list[Mark]:
            marks = [timer.mark()]
            logits = model(ids[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten())
            del logits
            marks.append(timer.mark())
            loss.backward()
            marks.append(timer.mark())
            optimizer.step()
            optimizer.zero_grad()
            marks.append(timer.mark())
            return marks

        for step in range(STEPS):
            marks = train()
            device.synchronize()
            if step >= STEPS // 3:
                for name, first, last in (("step", 0, 3), ("forward", 0, 1), ("backward", 1, 2), ("update", 2, 3)):
                    parts[name].append(timer.between_s(marks[first], marks[last]))
        sensors = timer.sensors_during(lambda train=train: [train() for _ in range(STEPS)])  # type: ignore[misc]
        peak = float(device.max_memory_allocated())
        options: dict[str, Any] = {
            "hidden": sizes.hidden, "heads": sizes.heads, "ffn": sizes.ffn, "vocab": sizes.vocab,
            "blocks": sizes.blocks, "batch": batch, "sequence": sequence,
        }  # fmt: skip
        for name, times in parts.items():
            figures = {"peak_bytes": peak} if name == "step" else {}
            fields = sampled(times, 1).fields | sensors
            yield Point(
                kind="step", call=f"decoder_{name}", dtype="bfloat16", options=options, figures=figures, **fields
            )
        del model, optimizer, train
        device.release_memory()
