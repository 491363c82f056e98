"""Megatron-LM's functional tests under `memplan estimate`, beside the memory that NVIDIA measured.

`python -m bench.megatron` runs them, `--only CASE` some; docs/megatron.md is the table.
"""
