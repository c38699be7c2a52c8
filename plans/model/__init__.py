"""What is trained: operator graphs, and the builder of transformer graphs."""
