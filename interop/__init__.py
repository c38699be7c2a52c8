"""File formats of other programs (floor 4, above the search), read into `Degrees` and written from them.

Megatron-LM's flags, torchtitan's settings, placements of torch's DTensor, tables of measurements as people publish
them, traces of Perfetto and of torch's profiler. It imports `plans`, `costmodels`, `simulator` and `search`.
"""
