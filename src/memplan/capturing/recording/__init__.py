"""What goes into a trace: the events of the device's memory, and where in the job they happened."""
