"""File formats of other programs (floor 4, above the search), read into `Degrees` and written from them.

Megatron-LM's flags, torchtitan's settings, placements of torch's DTensor, and tables of measurements as people publish
them. It imports `plans`, `costmodels`, `simulator` and `search`.
"""
