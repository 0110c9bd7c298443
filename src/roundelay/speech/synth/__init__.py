"""Synthetic speech: our own lexicon and sentences, spoken by espeak-ng in many voices."""
