"""Models of other libraries, unmodified and small, for `python -m benchmarks.field.capture`."""
