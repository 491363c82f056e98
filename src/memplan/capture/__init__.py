"""An unmodified script on fake CUDA, and files of other tools, as a `Trace`."""
