"""The commands: one class each, whose fields are its flags and whose `run` does the work."""
