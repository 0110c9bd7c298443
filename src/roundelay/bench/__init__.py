"""Speed as ratios measured in one run on one machine: against no communication at all, and against torch's DDP."""
