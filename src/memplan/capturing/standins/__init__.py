"""Packages that expect a GPU: stand-ins for them, and rules for what their kernels take."""
