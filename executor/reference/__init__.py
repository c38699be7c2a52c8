"""Single-process training, with which every run of a plan is compared."""
