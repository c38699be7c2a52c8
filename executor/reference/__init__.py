"""The oracle of every plan: the same training in one process."""
