"""The graph recursion: the cheapest strategies of the operators of a stage."""
