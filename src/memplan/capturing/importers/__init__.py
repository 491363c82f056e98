"""Files of other tools as a `Trace`."""
