"""Fake tensors of PyTorch's own classes, made without asking for a device."""
