"""timm's training steps of a published table, captured: `python -m bench.timm_table`.

`train` is the job as an ordinary script, `rows` reads the measured table where it lies, `capture`
keeps one trace a row in `build/timm`, where a later run finds it.
"""
