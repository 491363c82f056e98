"""Training as one graph, on PyTorch's own capture: what is kept, in which order it runs."""
