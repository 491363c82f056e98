"""Which kernels a GPU would run, and what they allocate behind the dispatcher: rules, not traces.

Pure functions of shapes, dtype names, flags and versions; nothing here imports torch.
"""
