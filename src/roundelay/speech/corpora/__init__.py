"""One file for each kind of corpus; each has a function that finds it and returns a Corpus."""
