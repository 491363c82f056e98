"""Recomputation measured: ours beside checkpointing as users write it and PyTorch's budget.

Nothing here shares code with memplan's prediction.
"""
