"""Training with a program: data, initial values, batches, results."""
