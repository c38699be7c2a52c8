"""Rules that translate recorded calls to the operators of a graph."""
