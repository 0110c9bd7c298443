"""Language models: characters of a text, predicted by a small GPT."""
