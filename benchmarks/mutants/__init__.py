"""Small changes of the core that tests must find: `python -m benchmarks.mutants`."""
