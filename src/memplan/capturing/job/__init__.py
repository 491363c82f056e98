"""The user's program: how it is run, its errors and its other processes."""
