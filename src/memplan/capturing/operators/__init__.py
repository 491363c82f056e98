"""Operators that PyTorch's shape rules do not answer, or whose kernels need memory of their own."""
