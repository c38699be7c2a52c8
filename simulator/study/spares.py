"""Spare devices: how often a job waits because more devices are in repair than there are spares.

A job of n devices needs all of them. A device that fails goes to repair, a spare takes its place, and the job waits
while none is left. Devices fail while the job runs, each at the rate 1 / M; repairs take R on average. With s spares
the number of devices in repair is that of busy lines in Erlang's loss system with s + 1 lines and the load a = n R / M,
whose share of time with all lines busy is

    B(s + 1, a) = (a^(s+1) / (s+1)!) / sum_k (a^k / k!),  k = 0 ... s + 1,

for any distribution of repair times (A. K. Erlang, "Solution of some problems in the theory of probabilities of
significance in automatic telephone exchanges", 1917).
"""

from __future__ import annotations

from plans.errors import number, whole_number

__all__ = ["waiting_share"]


def waiting_share(num_spares: int, num_devices: int, *, device_mtbf_s: float, repair_s: float) -> float:
    """The share of time in which a job waits for a device to come back from repair.

    Args:
        num_spares: devices next to those that the job runs on.
        num_devices: that the job runs on.
        device_mtbf_s: mean time between failures of one device.
        repair_s: mean time hours from a failure until the device is a spare again.

    Raises:
        TwofoldError: counts or times that cannot be.

    >>> round(waiting_share(0, 1, device_mtbf_s=9.0, repair_s=1.0), 9)  # one device: R / (M + R)
    0.1
    """
    spares, devices = whole_number("spares", num_spares, least=0), whole_number("num_devices", num_devices)
    load = devices * number("repair_s", repair_s, above=0) / number("device_mtbf_s", device_mtbf_s, above=0)
    share = 1.0
    for lines in range(1, spares + 2):  # the usual recursion, stable for any load
        share = load * share / (lines + load * share)
    return share
