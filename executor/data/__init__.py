"""Training data: sources by name, token files, images and digits; batches and the rows of a rank."""
