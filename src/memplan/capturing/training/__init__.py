"""The job's training steps, and when enough of them has been seen."""
