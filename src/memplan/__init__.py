"""memplan: know, before you train, how much GPU memory a PyTorch job needs."""

__version__ = "0.1.0"
