"""Benchmarks: `python -m bench` measures, `python -m bench.check` checks the goals."""
