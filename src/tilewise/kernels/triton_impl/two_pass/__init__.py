"""Statistics in forward; scores recomputed for the gradients in backward."""
