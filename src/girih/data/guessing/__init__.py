"""Guesses a config from a sample of data: the kind of each column, and the reason."""
