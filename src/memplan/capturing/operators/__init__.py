"""Operators that PyTorch's shape rules do not answer, or whose kernels take memory besides."""
