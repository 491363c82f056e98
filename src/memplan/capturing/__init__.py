"""An unmodified script on fake CUDA, and files of other tools, as a `Trace`.

| module or room | what it holds |
| --- | --- |
| `script`, `module`, `trial` | what is captured: a script, one step of a module, a small test |
| `session` | everything that is in place while a job runs |
| `mode` | the dispatch mode: which operators are fake and which are real |
| `options`, `enough` | what a caller asks for; how a script is ended |
| `recording` | events of the trace, and where in the job they happened |
| `fake`, `tensors` | fake tensors, and what a job does with them outside of operators |
| `known_values` | contents of fake tensors that are known, and answers where they are not |
| `operators`, `kernels` | operators with rules of their own; what kernels take besides |
| `parity` | what a dispatch mode changes about PyTorch, put right |
| `cuda`, `host` | the fake device; the job's memory on the host |
| `distributed`, `compiled` | process groups; `torch.compile` |
| `standins` | packages that only the GPU machine has, and rules for their kernels |
| `job`, `training` | the script's run, errors and processes; its steps and its end |
| `sandbox`, `patches` | files, network and children of the job; replaced attributes, hooks |
| `importers` | traces from files of other tools |
"""
