"""The two differentiable operators under all losses: kernels x ring x autograd."""
