"""Autograd over kernels and ring, and nothing else: the one differentiable op under all losses."""
