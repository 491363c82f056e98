"""A training step as one graph, run in the order that needs the least memory."""
