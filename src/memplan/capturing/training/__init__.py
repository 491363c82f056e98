"""Follows the job's training steps, and decides when enough of them have been seen."""
