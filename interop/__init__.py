"""File formats of other programs: Megatron-LM, torchtitan, DTensor placements, tables of measurements."""
