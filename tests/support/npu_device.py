"""An Ascend NPU of the tests: a CPU that records, with the rules of `executor.kernels.npu` (fixture `torch_npu`)."""

from dataclasses import dataclass

from executor.kinds import KINDS
from tests import ROOT
from tests.support.recording_device import RecordingDevice

STANDINS = ROOT / "tests" / "standins"


@dataclass(frozen=True, slots=True, kw_only=True)
class NpuDevice(RecordingDevice):
    """A CPU that records, with the kernels of an NPU."""

    @property
    def own(self):
        return KINDS["npu"]

    @property
    def name(self):
        return "stand-in for an NPU"
