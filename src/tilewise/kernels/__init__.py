"""Statistics and gradients of the scores of ONE pair of local blocks. No process groups, no losses."""
