"""The flow that makes a job fit: estimate, plan, capture again."""
