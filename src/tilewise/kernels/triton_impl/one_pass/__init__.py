"""A scalar loss and its gradients from one pass over the scores."""
