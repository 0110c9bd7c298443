"""Benchmarks on one machine: strategies beside no communication and torch's DDP; the cost of metrics and checkpoints; faults."""
