"""Contexts that a forward runs in while `torch.export` records its calls."""
