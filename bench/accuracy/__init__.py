"""How near the estimates come to measured jobs: `python -m bench.accuracy`.

The scripts `*_loop.py` and `llm_*.py` are the jobs, as ordinary training scripts; `rows` says which
command replays which measured row, `summary` compares, `table` writes the table of
`docs/accuracy.md`.
"""
