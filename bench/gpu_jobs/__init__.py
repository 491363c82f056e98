"""What `bench.gpu_estimate` runs on a GPU.

`train` with `models` is the jobs' script, ordinary and unaware; `jobs` lists its command lines;
`measure` runs it for real, `divergence` explains where the estimate's requests differ; `context`
and `scratch` measure what no tensor shows: the CUDA context and kernels' own memory.
"""
