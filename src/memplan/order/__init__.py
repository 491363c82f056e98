"""Finds an order of a training step's operators that needs the least memory."""
