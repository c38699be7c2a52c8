"""The commands, one class each: its fields are the options, and its `run` does the work."""
