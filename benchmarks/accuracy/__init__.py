"""How far predictions are from measurements.

`python -m benchmarks.accuracy TABLE.csv ...` scores tables of measurements; `choices`, `intervals`, `leave_one_out` and
`residuals` say what single choices, widths and devices are worth in these scores. `step_truth` and `stack_steps` are
about complete steps of the executor and of torch, `calibration` about fits of measured points, `network` about
published bandwidths, `plausible` about laws that need no measurement, `validate_rows` about the time of large tables.
"""
