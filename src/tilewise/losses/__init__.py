"""What the numbers mean: one file per loss, the function and then its Module."""
