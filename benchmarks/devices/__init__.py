"""Measurements on devices: what kernels, recordings, hosts and overlap cost. Most need one or several GPUs.

`hybrid_case`, `host_time` and `interleaving` also run on a CPU.
"""
