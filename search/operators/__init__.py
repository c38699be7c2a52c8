"""The recursion over the graph: the cheapest strategies for the operators of a stage."""
