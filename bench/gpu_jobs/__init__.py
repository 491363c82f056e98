"""What `bench.gpu_estimate` runs on a GPU.

`train` with `models` is the jobs' script, ordinary and unaware; `jobs` lists its command lines;
`context` and `scratch` measure what no tensor shows: the CUDA context and kernels' own memory.
`memplan.runtime.measure` runs a job for real, `bench.divergence` compares its requests.
"""
