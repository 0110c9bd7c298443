"""Training runs: recipes and configuration, data, schedule and budget, the loop, checkpoints, metrics and reports."""
