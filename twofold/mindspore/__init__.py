"""Training scripts in the style of MindSpore: settings, wrappers and `Model.train`, with its names on torch modules."""
