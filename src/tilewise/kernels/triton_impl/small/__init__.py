"""Small batches: the scores of all pairs at once."""
