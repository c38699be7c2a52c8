"""Models: operator graphs, and the builder of transformer graphs."""
