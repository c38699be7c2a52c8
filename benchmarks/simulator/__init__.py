"""How exact and how fast the simulator is.

`python -m benchmarks.simulator` measures both. `one_world` compares forecasts, lowered programs and the event engine
over random configurations, `slow_ranks` those with stragglers; `checks` asks questions that once had wrong answers,
`study_points` times a study.
"""
