"""A config guessed from a sample of data: what each column is, and why."""
