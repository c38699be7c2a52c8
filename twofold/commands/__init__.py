"""The commands, one class each. Its fields are the flags, its `run` does the work."""
