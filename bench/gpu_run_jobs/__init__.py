"""The jobs of `make gpu SUITE=run`."""
