"""Training scripts that nobody here wrote, unchanged, under `memplan estimate`.

`python -m bench.scripts` runs them all, `--only NAME` one; docs/scripts.md is the table.
"""
