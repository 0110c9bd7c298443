"""Hybrid acoustic models: from audio to word error rate."""
