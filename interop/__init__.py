"""File formats of other programs, read into `Degrees` and written from them (floor 4, above the search).

Megatron-LM's flags, torchtitan's settings, DTensor placements, published tables of measurements, and traces of Perfetto
and torch's profiler. The package imports `plans`, `costmodels`, `simulator` and `search`.
"""
