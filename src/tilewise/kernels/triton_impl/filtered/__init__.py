"""Gradients without the (row, tile) pairs that carry almost no probability."""
