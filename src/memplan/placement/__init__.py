"""What to ask a scheduler for, from a trace or an answer: card, MIG slice, GPU count, host RAM."""
