"""Captures in processes of their own: a `CaptureRequest` in, a trace and an `Outcome` out.

`python -m memplan.worker TRACE` reads a request as JSON from stdin, runs the script of the user's
on fake CUDA, writes the trace to the file TRACE and the outcome as JSON to stdout.
"""
