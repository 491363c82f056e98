"""A job on the planned allocator: the native library, the job's phases, recording and planning."""
