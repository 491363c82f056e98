"""Which values of a forward pass to drop and recompute: `docs/recompute.md`."""
