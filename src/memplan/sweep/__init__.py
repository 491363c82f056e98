"""Many configurations of one job: every combination captured, and ranked."""
