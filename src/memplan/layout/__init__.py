"""Addresses for storages whose lifetimes are known: dynamic storage allocation, and the static plan
of a training step."""
