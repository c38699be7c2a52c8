"""File formats of other programs (floor 4, above the search): what they say becomes Degrees, and Degrees become theirs.

Megatron-LM's flags, torchtitan's settings, placements of torch's DTensor, and tables of measurements as people publish
them. It imports `plans`, `costmodels`, `simulator` and `search`.
"""
