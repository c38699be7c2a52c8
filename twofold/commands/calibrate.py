"""`twofold calibrate`: measure this machine and write its machine file."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from plans.errors import TwofoldError
from twofold.commands.options import FileOutput, NodeOptions
from twofold.commands.values import Above0, AtLeast1, HtmlFile

if TYPE_CHECKING:
    from twofold.console import Console

__all__ = ["Calibrate"]

_OUT = "machine.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibrate:
    """Measure this machine (CPU ranks, or its accelerators), fit its model and write a machine file.

    It takes under 5 minutes, or under one with --quick. On several nodes, or under torchrun, it measures the devices of
    all of them; node 0 writes the machine file. Running it again with the same points resumes; to measure again, delete
    the points or name another file.

    Args:
        devices: number of devices to measure together, of all nodes; by default all accelerators of each node, or 8 CPU
            ranks.
        out: machine file; replaced only on success.
        name: name of the machine.
        device: auto, cpu, cuda or npu.
        points: file to which measured points are appended; by default OUT with the suffix .points.jsonl.
        base: for accelerators: device of the catalogue to start from, if the driver's name is unknown.
        minutes: measuring time.
        quick: measure only the most informative points.
        report: write the calibration report to this HTML file.
        host: measure only how long this host takes to issue torch's layers, in about 20 s, and write a host file (OUT,
            or host.json) for the option --host of predict, validate and plan.
        timeout: time limit of the launch in seconds; by default the measuring time and some minutes.
    """

    devices: AtLeast1 | None = None
    out: str = _OUT
    name: str | None = None
    device: str = "auto"
    points: str | None = None
    base: str | None = None
    minutes: Above0 | None = None
    quick: bool = False
    report: HtmlFile | None = None
    host: bool = False
    timeout: Above0 | None = None
    place: NodeOptions = field(default_factory=NodeOptions)
    output: FileOutput = field(default_factory=FileOutput)

    def run(self, console: Console) -> tuple[dict[str, Any], bool]:
        """Measure, fit and save."""
        if self.host:
            if self.place.nodes > 1:
                raise TwofoldError("--host measures one host; start it on each without --nodes")
            return self._host(console), True
        from plans.units import Seconds
        from twofold.calibration.calibrate import calibrate, write_report

        with console.doing("measuring"):
            result = calibrate(
                self.devices, device=self.device, name=self.name, out=self.out, points=self.points, base=self.base,
                minutes=self.minutes, quick=self.quick, timeout_s=self.timeout, nodes=self.place.stated,
                on_progress=console.print,
            )  # fmt: skip
        if self.place.node:
            console.print("the measurements have ended; node 0 writes the machine file")
            return {"node": self.place.node}, True
        if result is None:  # rank 0 speaks for all
            return {}, True
        for line in result.residuals:
            console.print(line)
        for probe in result.probes:
            console.print(f"{probe.name}: predicted {Seconds(probe.predicted_s)}, measured {Seconds(probe.measured_s)}")
        if self.report is not None:
            console.print(f"saved {write_report(result, self.report)}")
        interval = result.machine.interval
        spread = f"{interval.low - 1:+.0%} to {interval.high - 1:+.0%}"
        console.print(f"saved {Path(self.out)}; 90 % interval of a step time {spread}")
        return {
            "file": self.out,
            "host_scale": result.machine.host_scale,
            "interval_low": interval.low,
            "interval_high": interval.high,
            "residuals": list(result.residuals),
            "probes": [asdict(probe) for probe in result.probes],
            "points": None if result.points is None else str(result.points),
        }, True

    def _host(self, console: Console) -> dict[str, Any]:
        """Measure this host and write its file."""
        from costmodels.price.torch_hosts import save_host
        from executor.calibrate.host import measure_host
        from plans.files import check_writable

        out = "host.json" if self.out == _OUT else self.out
        check_writable(out)
        with console.doing("measuring this host"):
            host = measure_host(self.name or Path(out).stem, device=self.device, say=console.print)
        for kind, (forward, backward) in host.blocks_s.items():
            how = " (scaled)" if kind in host.scaled else ""
            console.print(f"{kind}: {forward * 1e6:.0f} us forward, {backward * 1e6:.0f} us backward{how}")
        console.print(f"saved {save_host(host, out)}")
        return {"file": out, "name": host.name, "source": host.source, "blocks_s": host.blocks_s, "spread": host.spread}
