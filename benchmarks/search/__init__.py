"""Quality and cost of the search.

`python -m benchmarks.search` runs a suite of models and clusters beside baselines. `exact` and `spaces` compare the
search with oracles that share no code with it, `weaknesses` with a greedy search (`halving`), `calculon` with Calculon;
`times` and `modules` time whole commands.
"""
